"""TOML files as structs: what does not fit is said with the file, the key and what to write instead."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from cotenant.core import units
from cotenant.errors import ConfigError


def one_of(value: str, literal: Any, place: str) -> Any:
    known = get_args(literal)
    if value not in known:
        raise ConfigError(f"{place}: {value!r} is not known; take {either(known)}")
    return value


def either(names: Any) -> str:
    return " or ".join(repr(name) for name in sorted(names))


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8 (byte {error.start}); is it the right file?") from None


File = TypeVar("File")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_PLACED = re.compile(r"(?P<what>.*) - at `\$\.?(?P<place>.*)`", re.DOTALL)


def decode(text: str, type_: type[File], path: Path) -> File:
    try:
        return msgspec.convert(tomllib.loads(text), type_)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, type_)}") from None


def explain(error: msgspec.ValidationError, type_: type[Any]) -> str:
    message = str(error)
    if unknown := _UNKNOWN.fullmatch(message):
        key, place = unknown["key"], unknown["place"] or ""
        known = _keys(type_, place)
        return f"{place + ': ' if place else ''}unknown key {key!r}; {nearest(key, known)}"
    placed = _PLACED.fullmatch(message)
    return f"{placed['place']}: {placed['what']}" if placed else message


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at what was meant."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"


def _keys(type_: type[Any], place: str) -> list[str]:
    """The keys of the table at a place such as ``models[2]``."""
    info = msgspec.inspect.type_info(type_)
    for name in filter(None, re.sub(r"\[[^]]*\]", "", place).split(".")):
        assert isinstance(info, msgspec.inspect.StructType)
        info = next(field.type for field in info.fields if field.encode_name == name)
        if isinstance(info, msgspec.inspect.ListType):
            info = info.item_type
    assert isinstance(info, msgspec.inspect.StructType)
    return [field.encode_name for field in info.fields]


def target_of(text: str | float, place: str) -> float:
    value = units.seconds(str(text), place)
    if value <= 0:
        raise ConfigError(f"{place}: a target of {text!r} must lie above 0")
    return value


def cuts_of(percents: tuple[float, ...], place: str) -> tuple[int, ...]:
    if not percents:
        raise ConfigError(f"{place}: no share is legal; write at least one, such as [100]")
    return tuple(sorted({units.share(percent, place) for percent in percents}))
