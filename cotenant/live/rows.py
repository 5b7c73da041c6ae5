"""Take tensors apart by rows, and put them together again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cotenant.core.tensor import Tensor, nbytes
from cotenant.errors import FailedError

LENGTH = 4  # bytes before each element of BYTES that say how long it is


def split_rows(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return views of a tensor with these numbers of rows, in order, without a copy; the rows behind are left out.

    Raises FailedError where the elements of a tensor of strings end before its shape says.
    """
    data = memoryview(tensor.data)
    parts = []
    start = 0
    for size in sizes:
        shape = (size, *tensor.shape[1:])
        end = (
            _end_of_strings(tensor, start, shape)
            if tensor.datatype == "BYTES"
            else start + nbytes(tensor.datatype, shape)
        )
        parts.append(msgspec.structs.replace(tensor, shape=shape, data=data[start:end], start=tensor.start + start))
        start = end
    return parts


def _end_of_strings(tensor: Tensor, position: int, shape: tuple[int, ...]) -> int:
    """Return the byte behind as many elements as `shape` has, the first at `position`."""
    data = memoryview(tensor.data)
    for _ in range(math.prod(shape)):
        position += LENGTH + int.from_bytes(data[position : position + LENGTH], "little")
    if position > len(data):
        raise FailedError(f"tensor {tensor.name!r} ends before its shape {list(tensor.shape)} says")
    return position


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Return the rows of tensors, one after the other; a single tensor as it is. Raises FailedError where rows differ
    in shape or datatype."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if any(
        (tensor.name, tensor.datatype, tensor.shape[1:]) != (first.name, first.datatype, first.shape[1:])
        for tensor in tensors
    ):
        raise FailedError(f"rows of {first.name!r} have different shapes, and cannot be put together")
    rows = sum([tensor.shape[0] for tensor in tensors])
    return Tensor(first.name, first.datatype, (rows, *first.shape[1:]), b"".join([tensor.data for tensor in tensors]))
