"""Read, write, count and check the elements of tensors, as the front ends carry them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cotenant.core.tensor import DTYPES, Tensor
from cotenant.errors import FailedError, InvalidError
from cotenant.live.limits import MAX_CLASSES, MAX_ELEMENTS, MAX_STRINGS

# How `struct` names the datatypes that JSON and typed contents can carry.
FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}

SORTED_COLUMNS = 256  # of scores; of a longer row only the highest are sorted
_LENGTH = struct.Struct("<I")  # before each element of BYTES


class TensorHead(Protocol):
    """What is known of a tensor before its data are read."""

    @property
    def name(self) -> str: ...

    @property
    def datatype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_elements(tensor: TensorHead) -> int:
    """Return how many elements a tensor's shape has. Raises InvalidError where they are more than a tensor may have."""
    elements = math.prod(tensor.shape)
    most = MAX_STRINGS if tensor.datatype == "BYTES" else MAX_ELEMENTS
    # An empty tensor has a size in memory, too, as libraries compute it: without the dimensions that are 0.
    if elements > most or (not elements and math.prod(filter(None, tensor.shape)) > MAX_ELEMENTS):
        raise InvalidError(f"tensor {tensor.name!r} of shape {list(tensor.shape)} has more than {most} elements")
    return elements


def check_size(tensor: Tensor) -> None:
    """Raise InvalidError where a tensor's data is not as long as its datatype and shape require.

    Call it after `check_request`: what is counted here is bounded by the datatype and shape that the model takes.
    """
    expected = check_elements(tensor)
    if tensor.datatype == "BYTES":
        actual, unit = count_strings(tensor, expected), "elements"
    else:
        expected *= DTYPES[tensor.datatype].itemsize
        actual, unit = len(tensor.data), "bytes"
    if actual != expected:
        more = "more than " if actual > expected and unit == "elements" else ""
        raise InvalidError(
            f"tensor {tensor.name!r}: {more}{min(actual, expected) if more else actual} {unit}, but {tensor.datatype} "
            f"of shape {list(tensor.shape)} has {expected}"
        )


def to_values(tensor: Tensor) -> tuple[Any, ...]:
    """Return the elements as Python numbers, row-major. Only for the datatypes of FORMATS. Raises FailedError where the
    data does not fit the shape."""
    try:
        return struct.unpack(f"<{math.prod(tensor.shape)}{FORMATS[tensor.datatype]}", tensor.data)
    except struct.error:
        raise _misfit(tensor) from None


def value_pieces(tensor: Tensor, count: int) -> Iterator[tuple[Any, ...]]:
    """Yield the elements, so many at a time, as `to_values` returns them."""
    code, size = FORMATS[tensor.datatype], DTYPES[tensor.datatype].itemsize
    elements = math.prod(tensor.shape)
    if len(tensor.data) != elements * size:
        raise _misfit(tensor)
    for start in range(0, elements, count):
        yield struct.unpack_from(f"<{min(count, elements - start)}{code}", tensor.data, start * size)


def _misfit(tensor: Tensor) -> FailedError:
    return FailedError(f"output {tensor.name!r} is not what its shape says: {len(tensor.data)} bytes")


def pack_strings(items: Iterable[bytes]) -> bytes:
    """Return the wire form of BYTES elements."""
    return b"".join([struct.pack("<I", len(item)) + item for item in items])


def count_strings(tensor: Tensor, most: int) -> int:
    """Return how many elements a BYTES tensor has, `most` + 1 where it has more. Raises InvalidError where a length
    points past the end."""
    data, position, count = tensor.data, 0, 0
    end = len(data)
    while position < end and count <= most:
        if position + 4 > end or (position := position + 4 + _LENGTH.unpack_from(data, position)[0]) > end:
            raise InvalidError(f"tensor {tensor.name!r}: its element {count} ends after its data do")
        count += 1
    return count


def unpack_strings(tensor: Tensor) -> list[memoryview]:
    """Return the elements of a BYTES tensor. Raises InvalidError where a length points past the end."""
    return list(each_string(tensor))


def each_string(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the elements of a BYTES tensor. Raises InvalidError where a length points past the end."""
    data = memoryview(tensor.data)
    position, end, count = 0, len(data), 0
    while position < end:
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if start > end or position > end:
            raise InvalidError(f"tensor {tensor.name!r}: its element {count} ends after its data do")
        yield data[start:position]
        count += 1


def classify(tensor: Tensor, count: int, *, batched: bool, labels: Sequence[str] = ()) -> Tensor:
    """Return the `count` highest values as Triton's classification extension writes them: BYTES ``score:index``, and
    ``:label`` where the class has one.

    They are those of each row where the tensor is batched, else of the whole tensor; NaN is below all numbers. Only for
    the datatypes of FORMATS. Raises InvalidError for more labels than one output may have.
    """
    rows = tensor.shape[0] if batched else 1
    scores = _scores(tensor).reshape(rows, -1) if rows else _scores(tensor).reshape(0, 0)
    count = min(count, scores.shape[1])
    if rows * count > MAX_CLASSES:
        raise InvalidError(f"output {tensor.name!r}: {rows * count} labels; ask for {MAX_CLASSES} at most")
    form = "{:f}:{}" if tensor.datatype in ("FP32", "FP64") else "{:d}:{}"
    best = [
        (form.format(score, index) + (f":{labels[index]}" if index < len(labels) else "")).encode()
        for row, highest in zip(scores, _highest(scores, count), strict=True)
        for index, score in zip(highest.tolist(), row[highest].tolist(), strict=True)
    ]
    return Tensor(tensor.name, "BYTES", (rows, count) if batched else (count,), pack_strings(best))


def _highest(scores: NDArray[Any], count: int) -> Iterable[NDArray[np.intp]]:
    """Return where the `count` highest values of each row are: the highest first, of equal ones the first, and NaN as
    -inf."""
    if scores.dtype.kind == "f":
        scores = np.where(np.isnan(scores), -np.inf, scores)
    columns = scores.shape[1]
    if columns > SORTED_COLUMNS:
        return (_highest_of_row(row, count) for row in scores)
    # A stable sort, from the last: what is equal stays in order once it is turned round.
    ranked: NDArray[np.intp] = columns - 1 - np.argsort(scores[:, ::-1], axis=1, kind="stable")[:, ::-1]
    return ranked[:, :count]


def _highest_of_row(row: NDArray[Any], count: int) -> NDArray[np.intp]:
    if 0 < count < len(row):
        least = np.partition(row, len(row) - count)[len(row) - count]
        above, equal = np.flatnonzero(row > least), np.flatnonzero(row == least)
        found = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    else:
        found = np.arange(count)
    return found[::-1][np.argsort(row[found[::-1]], kind="stable")][::-1]


def _scores(tensor: Tensor) -> NDArray[Any]:
    """Return the elements as an array of one dimension. Raises FailedError where the data does not fit the shape."""
    if len(tensor.data) != math.prod(tensor.shape) * DTYPES[tensor.datatype].itemsize:
        raise _misfit(tensor)
    return np.frombuffer(tensor.data, DTYPES[tensor.datatype])
