"""Read and write long JSON lists a piece at a time: as one call, it would keep every other thread waiting for as long
as it takes, and hold an object for each number."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from cotenant.live.limits import MAX_RANK

PIECE = 1 << 15  # bytes of JSON that are read at once: some 0.3 ms
VALUES = 1 << 12  # numbers that are written at once: as long
_BLOCK = 1 << 18  # the same where only the structure is looked at

_NESTED = re.compile(rb"[ \t\r\n]*\[[ \t\r\n]*\[")
_COMMA = re.compile(rb",")
_BRACKETS = b"[]"
_INNERMOST = ord("a")  # stands for a list of numbers, the letter after it for a list of such lists, and so on
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


_encoder = msgspec.json.Encoder()


def packed_numbers(
    raw: msgspec.Raw, decoder: msgspec.json.Decoder[list[Any]], code: str, expected: int
) -> tuple[int, bytearray]:
    """Return how many numbers a JSON list holds, flat or nested, and, if that is as expected, the numbers themselves,
    little-endian.

    raw: valid JSON. decoder: of a flat list. code: of a number, as `struct` has it. Raises what these two raise,
    TypeError for what is no list, and ValueError for rows that differ in length.
    """
    text = memoryview(raw)
    nested = _NESTED.match(text) is not None
    if nested:
        _check_rows(text)
    elif bytes(text[:1]) + bytes(text[-1:]) != _BRACKETS:
        raise TypeError("it is not a list")
    size = struct.calcsize(f"<{code}")
    count, packed = 0, bytearray(expected * size if expected <= len(text) else 0)
    for piece in _pieces(text if nested else text[1:-1]):
        items = decoder.decode(b"[%b]" % (piece.translate(None, _BRACKETS) if nested else piece))
        if nested and not items:
            raise ValueError("it has an empty row")
        if (count + len(items)) * size <= len(packed):
            struct.pack_into(f"<{len(items)}{code}", packed, count * size, *items)
        count += len(items)
    return count, packed


def json_list(pieces: Iterable[Sequence[Any]], most: int) -> msgspec.Raw | None:
    """Return the values of all pieces, none of them empty, as one JSON list; None above `most` bytes."""
    written, size = [], 1
    for piece in pieces:
        text = _encoder.encode(piece)[1:-1]
        size += len(text) + 1
        if size > most:
            return None
        written.append(text)
        _let_others_run()
    return msgspec.Raw(b"[%b]" % b",".join(written))


def _pieces(text: memoryview) -> Iterator[bytes]:
    """Yield what lies between some of the commas."""
    start = 0
    while start <= len(text):
        comma = _COMMA.search(text, start + PIECE)
        end = len(text) if comma is None else comma.start()
        yield bytes(text[start:end])
        _let_others_run()
        start = end + 1


def _check_rows(text: memoryview) -> None:
    """Raise ValueError where nested lists differ in length."""
    lists, level = _lists_of_rows(text), _INNERMOST
    while lists != _list_of(level, lists.count(b",") + 1):
        end = lists.index(b"]") + 1
        row = lists[lists.rindex(b"[", 0, end) : end]
        if row == lists or row != _list_of(level, row.count(b",") + 1):
            raise ValueError("its rows differ in length")
        level += 1
        lists = lists.replace(row, b"%c" % level)


def _list_of(level: int, count: int) -> bytes:
    return b"[%b%c]" % (b"%c," % level * (count - 1), level)


def _lists_of_rows(text: memoryview) -> bytes:
    """Return the brackets and commas of nested lists, lists of numbers that are as long as the first as one letter.
    Raises ValueError where they are too deep."""
    found: list[bytes] = []
    pending: list[bytes] = []
    row = b""
    for start in range(0, len(text), _BLOCK):
        block = bytes(text[start : start + _BLOCK]).translate(None, _NO_STRUCTURE)
        end = block.rfind(b"]") + 1
        if end:
            whole = b"".join([*pending, block[:end]])
            if not row:
                row = b"[" + whole[: whole.index(b"]") + 1].lstrip(b"[")
                if len(whole) - len(whole.lstrip(b"[")) > MAX_RANK:
                    raise ValueError(f"it is nested in more than {MAX_RANK} levels")
            found.append(whole.replace(row, b"%c" % _INNERMOST))
            pending = []
        pending.append(block[end:])
        _let_others_run()
    return b"".join([*found, *pending])


def _let_others_run() -> None:
    time.sleep(0)  # releases the interpreter's lock
