"""The text format of protocol buffers, without a schema: what people write into config.pbtxt.

https://protobuf.dev/reference/protobuf/textformat-spec. Left out: extensions and `Any` in brackets, which no
ModelConfig holds. Without a schema nothing tells a field that repeats from one that does not, so the caller names
those that do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cotenant.errors import ModelError

Message = dict[str, Any]

MAX_DEPTH = 100  # protobuf's own limit

_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
    |(?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?)(?![\w.]))
    |(?P<name>[A-Za-z_]\w*)
    |(?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
    |(?P<mark>[-:{}<>\[\],;])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(rb"\\(?:[xX]([0-9a-fA-F]{1,2})|([0-7]{1,3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_LETTERS |= {mark: mark for mark in (b"\\", b"'", b'"', b"?")}
_CLOSE = {"{": "}", "<": ">"}
_BOOLS = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}


class _Token(NamedTuple):
    kind: str | None
    text: str
    line: int


def read_pbtxt(text: str, repeated: Collection[str], place: str) -> Message:
    """Fields by name. A field in `repeated` is a list, however often it stands there; so is any other that stands
    there more than once. A map is a dict. Enum values are strings.

    Raises ModelError that starts with `place` and the line.
    """
    return _Reader(text, repeated, place).message("", 0)


def write_pbtxt(message: Mapping[str, Any], indent: str = "") -> str:
    """The inverse of `read_pbtxt`, but that a list, of scalars or messages, is a repeated field, and an enum value a
    string in capitals that begins with TYPE_."""
    lines = []
    for name, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name} {{\n{write_pbtxt(value, indent + '  ')}{indent}}}\n")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if any(isinstance(item, Mapping) for item in value):
                lines.extend(write_pbtxt({name: item}, indent) for item in value)
            else:
                lines.append(f"{indent}{name}: [{', '.join(map(_scalar, value))}]\n")
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: str | bool | int | float) -> str:
    if isinstance(value, str) and re.fullmatch("TYPE_[A-Z0-9]+", value):
        return value
    return json.dumps(value, ensure_ascii=False)  # its strings and escapes are the text format's too


class _Reader:
    def __init__(self, text: str, repeated: Collection[str], place: str) -> None:
        self.repeated = repeated
        self.place = place
        self.tokens: list[_Token] = []
        self.next = 0
        at, line = 0, 1
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self.error(f"cannot read {text[at : at + 20].splitlines()[0]!r}", line)
            if match.lastgroup != "blank":
                self.tokens.append(_Token(match.lastgroup, match[0], line))
            line += match[0].count("\n")
            at = match.end()
        self.tokens.append(_Token(None, "the end", line))

    def error(self, what: str, line: int) -> ModelError:
        return ModelError(f"{self.place}:{line}: {what}; expected protobuf text, such as `max_batch_size: 8`")

    def unexpected(self, wanted: str) -> ModelError:
        token = self.tokens[self.next]
        return self.error(f"{token.text!r} where {wanted} was due", token.line)

    def take(self, *texts: str) -> str | None:
        """Step over the next token if it is one of these marks."""
        token = self.tokens[self.next]
        if token.kind == "mark" and token.text in texts:
            self.next += 1
            return token.text
        return None

    def message(self, end: str, depth: int) -> Message:
        """Up to and over the mark `end`; all that is left where `end` is empty."""
        if depth > MAX_DEPTH:
            raise self.unexpected(f"no message nested more than {MAX_DEPTH} deep")
        fields: dict[str, list[Any]] = {}
        while not (self.take(end) if end else self.tokens[self.next].kind is None):
            token = self.tokens[self.next]
            if token.kind != "name":
                raise self.unexpected(f"a field or {end!r}" if end else "a field")
            self.next += 1
            values = fields.setdefault(token.text, [])
            colon = self.take(":")
            if self.take("["):
                while not self.take("]"):
                    values.append(self.value(depth, colon=True))
                    if not self.take(",") and self.tokens[self.next].text != "]":
                        raise self.unexpected("',' or ']'")
            else:
                values.append(self.value(depth, colon=bool(colon)))
            self.take(",", ";")
        return {name: self.collapse(name, values) for name, values in fields.items()}

    def collapse(self, name: str, values: list[Any]) -> Any:
        # A map travels as messages of a key and a value; no other message of a ModelConfig has a field `key`.
        if values and all(
            isinstance(value, dict) and "key" in value and value.keys() <= {"key", "value"} for value in values
        ):
            return {str(value["key"]): value.get("value", {}) for value in values}
        return values if name in self.repeated or len(values) != 1 else values[0]

    def value(self, depth: int, *, colon: bool) -> Any:
        if opened := self.take("{", "<"):
            return self.message(_CLOSE[opened], depth + 1)
        if not colon:
            raise self.unexpected("':' or '{'")
        token = self.tokens[self.next]
        if token.kind == "string":
            return self.string()
        minus = self.take("-") is not None
        token = self.tokens[self.next]
        self.next += 1
        if token.kind == "number":
            if len(token.text) > 40:
                raise self.error(f"a number of {len(token.text)} digits", token.line)
            number = _number(token.text)
            return -number if minus else number
        if token.kind == "name" and token.text.lower() in ("inf", "infinity", "nan"):
            return float(f"{'-' if minus else ''}{token.text}")
        if token.kind == "name" and not minus:
            return _BOOLS.get(token.text, token.text)
        self.next -= 1
        raise self.unexpected("a number" if minus else "a value")

    def string(self) -> str:
        """One string, or several in a row, which are one."""
        parts = []
        line = self.tokens[self.next].line
        while self.tokens[self.next].kind == "string":
            token = self.tokens[self.next]
            self.next += 1
            try:
                parts.append(_ESCAPE.sub(_unescape, token.text[1:-1].encode()))
            except KeyError as error:
                raise self.error(f"no escape \\{error.args[0].decode()} in {token.text}", token.line) from None
            except (ValueError, OverflowError):
                raise self.error(f"no such character in {token.text}", token.line) from None
        try:
            return b"".join(parts).decode()
        except UnicodeDecodeError:
            raise self.error("a string that is not UTF-8", line) from None


def _number(text: str) -> int | float:
    if text[:2] in ("0x", "0X"):
        return int(text, 16)
    if text.isdecimal():
        return int(text, 8) if re.fullmatch("0[0-7]+", text) else int(text)
    return float(text.rstrip("fF"))


def _unescape(match: re.Match[bytes]) -> bytes:
    hexadecimal, octal, short, long, letter = match.groups()
    if hexadecimal or octal:
        return bytes([int(hexadecimal, 16) if hexadecimal else int(octal, 8)])
    if short or long:
        return chr(int(short or long, 16)).encode()
    return _LETTERS[letter]
