"""Check where an ONNX model keeps its tensors, before any library opens those files.

A tensor may name a file that holds its data. A model from elsewhere can so name any file that this user may read, and
give its bytes away as outputs. ONNX Runtime checks that since its version 1.24, of sparse tensors since 1.27, and of
hard links in no version (1.32). So every tensor of the file is checked here: of the graph, its subgraphs and functions,
of sparse initialisers and of constants.

The file is walked as protobuf's wire format, without a copy of any tensor. Whatever could be read in two ways is no
model.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cotenant.errors import ModelError

_EXTERNAL = 1  # TensorProto.data_location
_MAX_TAG = 1 << 32


class _Field(NamedTuple):
    """A field that is followed: the name of its message, and the word for it."""

    message: str
    word: str


# Of each message of onnx.proto, the fields that lead to tensors, by number.
_FIELDS: dict[str, dict[int, _Field]] = {
    "model": {
        7: _Field("graph", ""),
        20: _Field("training", "training_info"),
        25: _Field("function", "function"),
    },
    "training": {1: _Field("graph", "initialization"), 2: _Field("graph", "algorithm")},
    "function": {7: _Field("node", "node"), 11: _Field("attribute", "attribute")},
    "graph": {
        1: _Field("node", "node"),
        5: _Field("tensor", "initializer"),
        15: _Field("sparse", "sparse_initializer"),
    },
    "node": {5: _Field("attribute", "attribute")},
    "attribute": {
        5: _Field("tensor", "tensor"),
        6: _Field("graph", "graph"),
        10: _Field("tensor", "tensor"),
        11: _Field("graph", "graph"),
        22: _Field("sparse", "sparse_tensor"),
        23: _Field("sparse", "sparse_tensor"),
    },
    "sparse": {1: _Field("tensor", "values"), 2: _Field("tensor", "indices")},
}
_NAMES = {"node": 3, "attribute": 1, "function": 1, "tensor": 8}  # the field that is the name of a message
_OUTPUT = 2  # of a node; the first names it where it has no name
_TENSOR_ENTRY, _TENSOR_LOCATION = 13, 14  # external_data, data_location


def check_external_data(path: Path | str) -> bool:
    """Check that the data of each tensor lie in the model or in a regular file of their own, in the model's folder or
    below it, reached over no link; return whether any lie in such a file. Raises ModelError, also for a file that is no
    ONNX model."""
    path, external = Path(path), False
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise _Broken("it is empty")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                for tensor, place, location in _locations(data):
                    external = True
                    if reason := _objection(path.parent, location):
                        raise ModelError(
                            f"{path}: tensor {tensor!r} ({place}) has its data in {location!r}, {reason}; "
                            "keep them in a file of their own beside the model"
                        )
    except _Broken as error:
        raise ModelError(f"{path}: no ONNX model: {error}; export it again as ONNX") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror}") from None
    return external


class _Broken(Exception):  # noqa: N818
    """Say why a file is not protobuf's wire format of an ONNX model."""


def _objection(folder: Path, location: str) -> str:
    """Return why a location may not be read, or "" where it may."""
    parts = location.split("/")
    if not location:
        return "which names no file"
    if location.startswith("/"):
        return "an absolute path"
    if "*" in location:
        return "which ONNX Runtime takes for an address in memory"
    if "\0" in location or "\\" in location:
        return "which is not a path"
    if ".." in parts:
        return "which leads out of its folder"
    at = folder
    try:
        for part in parts:
            at /= part
            found = at.lstat()
            if stat.S_ISLNK(found.st_mode):
                return "which is reached over a symbolic link"
    except OSError as error:
        return f"which cannot be read ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "which is not a regular file"
    if found.st_nlink > 1:
        return "which has other names by hard links"
    return ""


def _locations(data: mmap.mmap) -> Iterator[tuple[str, str, str]]:
    """Yield each external tensor of a model: its name, its place, and the location of its data. No recursion: graphs
    may be nested deeply."""
    pending = [("model", 0, len(data), "")]
    while pending:
        message, start, end, place = pending.pop()
        if message == "tensor":
            yield from _tensor(data, start, end, place)
            continue
        followed, name = [], ""
        for number, value, size in _fields(data, start, end):
            field = _FIELDS[message].get(number)
            if field is not None:
                if size < 0:
                    raise _Broken(f"field {number} of a {message} is a number")
                followed.append((field, value, size))
            elif size >= 0 and (
                number == _NAMES.get(message) or (message == "node" and number == _OUTPUT and not name)
            ):
                name = _text(data, value, size)
        if name:
            place = f"{place} {name!r}"
        for field, value, size in reversed(followed):  # the first is checked first
            pending.append((field.message, value, value + size, f"{place}, {field.word}".lstrip(", ")))


def _tensor(data: mmap.mmap, start: int, end: int, place: str) -> Iterator[tuple[str, str, str]]:
    name, external = "", False
    locations: list[str] = []
    for number, value, size in _fields(data, start, end):
        if number == _NAMES["tensor"] and size >= 0:
            name = _text(data, value, size)
        elif number == _TENSOR_LOCATION:
            external = external or value == _EXTERNAL
        elif number == _TENSOR_ENTRY and size >= 0:
            external = True
            key, text = "", ""
            for part, at, length in _fields(data, value, value + size):
                if part == 1 and length >= 0:
                    key = _text(data, at, length)
                elif part == 2 and length >= 0:
                    text = _text(data, at, length)
            if key == "location":
                locations.append(text)
    if external:
        for location in locations or [""]:
            yield name, place, location


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a message: number, and where its bytes begin with their count; or, for a number, its value
    and -1. Raises _Broken."""
    position = start
    while position < end:
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if tag >= _MAX_TAG or not number:
            raise _Broken(f"field {number} at byte {position}")
        if kind == 0:
            value, position = _varint(data, position, end)
            yield number, value, -1
            continue
        if kind == 2:
            size, position = _varint(data, position, end)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise _Broken(f"a field of no known type at byte {position}")
        if size > end - position:
            raise _Broken(f"a field at byte {position} is longer than what holds it")
        yield number, position, size if kind == 2 else -1
        position += size


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    """Return an integer of at most 64 bits, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, position
    raise _Broken(f"no integer at byte {position}")


def _text(data: mmap.mmap, start: int, size: int) -> str:
    return data[start : start + size].decode("utf-8", "surrogateescape")
