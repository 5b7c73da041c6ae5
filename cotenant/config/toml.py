"""Read TOML files as structs. Errors name the file, the key and what to write instead."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from cotenant.core import units
from cotenant.errors import ConfigError

MOST_TARGET = 1e6  # seconds: eleven days
MOST_DEVICES = 1_000_000
LEAST_RATE, MOST_RATE = 1e-6, 1e7  # = requests/s: two in a month, and the capacity of some 100,000 GPUs


def check_one_of(value: str, literal: Any, place: str) -> Any:
    known = get_args(literal)
    if value not in known:
        raise ConfigError(f"{place}: {value!r} is unknown; use {check_exclusive(known)}")
    return value


def check_exclusive(names: Any) -> str:
    return " or ".join(repr(name) for name in sorted(names))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8 (byte {error.start}); is it the right file?") from None


File = TypeVar("File")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_PLACED = re.compile(r"(?P<what>.*) - at `\$\.?(?P<place>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<key>.*)`")
_EXPECTED = re.compile(r"Expected `(?P<wanted>.*)`, got `(?P<got>.*)`")
_WORDS = {
    "str": "text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list in brackets",
    "object": "a table",
}


def decode_toml(text: str, type_: type[File], path: Path) -> File:
    try:
        entries = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    try:
        return msgspec.convert(entries, type_)
    except msgspec.ValidationError as error:
        explanation = _other_file(entries, _keys(type_, "")) or explain_error(error, type_)
        raise ConfigError(f"{path}: {explanation}") from None


def _other_file(entries: Mapping[str, Any], known: Collection[str]) -> str:
    """Report a problem that was given as the settings of a server, or settings given as a problem."""
    # Both may have [[devices]] and profiles, which are a list in a problem, and one file in settings.
    if "model_repository" in known and "devices" in entries and isinstance(entries.get("profiles"), list):
        return "is a problem, not a server's settings: it has [[devices]]; give it to `cotenant plan`"
    if "model_repository" not in known and "model_repository" in entries and "devices" in known:
        return "is a server's settings, not a problem: it has a model_repository; give it with --settings"
    return ""


def explain_error(error: msgspec.ValidationError, type_: type[Any]) -> str:
    message = str(error)
    if unknown := _UNKNOWN.fullmatch(message):
        key, place = unknown["key"], unknown["place"] or ""
        known = _keys(type_, place)
        return f"{place + ': ' if place else ''}unknown key {key!r}; {nearest_hint(key, known)}"
    placed = _PLACED.fullmatch(message)
    what = _in_words(placed["what"] if placed else message)
    return f"{placed['place']}: {what}" if placed else what


def _in_words(what: str) -> str:
    """Rephrase msgspec's messages on types in the words of TOML."""
    if missing := _MISSING.fullmatch(what):
        return f"key {missing['key']!r} is missing"
    expected = _EXPECTED.fullmatch(what)
    if not expected:
        return what
    wanted = [name for name in expected["wanted"].split(" | ") if name in _WORDS]
    if expected["got"] == "object" and wanted == ["array"]:
        return "found a single table where several are allowed; write its name in two brackets, [[…]]"
    if "float" in wanted and "int" in wanted:
        wanted.remove("int")
    found = _WORDS.get(expected["got"], expected["got"])
    return f"found {found}; write {' or '.join(_WORDS[name] for name in wanted)}"


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"available: {', '.join(known)}"


def _keys(type_: type[Any], place: str) -> list[str]:
    """Return the keys of the table at a place such as ``models[2]``."""
    info = msgspec.inspect.type_info(type_)
    for name in filter(None, re.sub(r"\[[^]]*\]", "", place).split(".")):
        assert isinstance(info, msgspec.inspect.StructType)
        info = next(field.type for field in info.fields if field.encode_name == name)
        if isinstance(info, msgspec.inspect.ListType):
            info = info.item_type
        if isinstance(info, msgspec.inspect.UnionType):  # a table that may be left out
            info = next(each for each in info.types if isinstance(each, msgspec.inspect.StructType))
    assert isinstance(info, msgspec.inspect.StructType)
    return [field.encode_name for field in info.fields]


def parse_target(text: str | float, place: str) -> float:
    value = units.parse_seconds(str(text), place)
    if value <= 0:
        raise ConfigError(f"{place}: a target of {text!r} must be above 0")
    if value > MOST_TARGET:
        raise ConfigError(f"{place}: a target of {text!r} is out of range; the longest is {MOST_TARGET:g} s")
    return value


def parse_name(name: str, place: str) -> str:
    """Check the name of a model, a kind or an application. Raises ConfigError."""
    if not name:
        raise ConfigError(f"{place}: is empty; give it a name")
    if "\0" in name:
        raise ConfigError(f"{place}: {name!r} contains a NUL character; rename it")
    return name


def parse_count(count: int | None, place: str) -> int | None:
    """Check a number of devices; None: any number. Raises ConfigError."""
    if count is not None and not 0 <= count <= MOST_DEVICES:
        raise ConfigError(f"{place}: {count} devices; write 0 to {MOST_DEVICES}, or leave it out for any number")
    return count


def parse_priority(priority: int, place: str) -> int:
    """Check the priority of a model. Raises ConfigError."""
    if priority < 1:
        raise ConfigError(f"{place}: {priority} must be at least 1, the highest priority")
    return priority


def parse_rate(rate: float, place: str) -> float:
    """Check requests/s. Raises ConfigError for what is no rate, or outside of the range of planners."""
    if not 0 <= rate < math.inf:
        raise ConfigError(f"{place}: {rate:g} requests/s; a rate is finite and at least 0")
    if 0 < rate < LEAST_RATE or rate > MOST_RATE:
        raise ConfigError(f"{place}: {rate:g} requests/s; write 0, or {LEAST_RATE:g} to {MOST_RATE:g}")
    return rate


def parse_cuts(percents: tuple[float, ...], place: str) -> tuple[int, ...]:
    if not percents:
        raise ConfigError(f"{place}: no share is legal; write at least one, such as [100]")
    if max(percents) == 1:
        raise ConfigError(
            f"{place}: the largest share is 1 %; shares are in percent: [20, 50, 100] rather than [0.2, 0.5, 1]"
        )
    return tuple(sorted({units.parse_share(percent, place) for percent in percents}))
