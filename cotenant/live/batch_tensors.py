"""Tensors on their way to a worker and back: inline, or in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from cotenant.core.tensor import Tensor
from cotenant.errors import WorkerError
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import LARGE, BatchResult, TensorPart, aligned


def tensor_part(tensor: Tensor, arena: Arena, kept: list[object]) -> TensorPart:
    """Return how a tensor travels. What the worker looks at is added to `kept`, to stay as long as that."""
    kept.append(tensor)
    size = len(tensor.data)
    if tensor.block is not None:
        start = cast(Block, tensor.block).offset + tensor.start
        return TensorPart(tensor.name, tensor.datatype, tensor.shape, None, start, size)
    if size >= LARGE and (block := arena.allocate(size)) is not None:
        block.view[:] = tensor.data
        kept.append(block)
        return TensorPart(tensor.name, tensor.datatype, tensor.shape, None, block.offset, size)
    return TensorPart(tensor.name, tensor.datatype, tensor.shape, cast(memoryview, tensor.data))


def joined_parts(payloads: Sequence[tuple[Tensor, ...]]) -> tuple[list[TensorPart], tuple[int, ...]]:
    """Return the inputs of requests as those of one, which costs both ends less, and the rows of each; nothing where
    they cannot be joined: they have strings, are large, or differ in more than their rows and data."""
    first, parts = payloads[0], []
    rows = tuple([inputs[0].shape[0] for inputs in payloads if len(inputs) == len(first)])
    if len(rows) < len(payloads):
        return [], ()
    for place, model in enumerate(first):
        name, datatype, row = model.name, model.datatype, model.shape[1:]
        data = []
        for inputs in payloads:
            each = inputs[place]
            if (
                each.name != name
                or each.datatype != datatype
                or each.shape[1:] != row
                or each.block is not None
                or len(each.data) >= LARGE
            ):
                return [], ()
            data.append(each.data)
        if datatype == "BYTES":
            return [], ()
        parts.append(TensorPart(name, datatype, (sum(rows), *row), memoryview(b"".join(data))))
    return parts, rows


def separated(parts: Sequence[TensorPart], rows: Sequence[int], room: Block | None) -> list[tuple[Tensor, ...]]:
    """Return the outputs of each request of a batch that was answered as one. rows: of each request. Raises WorkerError
    where they are not so many rows, or do not lie in the room that the worker was given."""
    total = sum(rows)
    columns = []
    for part in parts:
        whole = tensor_of(part, room)
        name, datatype, shape, data, block, at = whole.name, whole.datatype, whole.shape, whole.data, whole.block, 0
        row, rest = len(data) // total, shape[1:]
        if shape[:1] != (total,) or row * total != len(data) or datatype == "BYTES":
            raise WorkerError(f"it answered output {name!r} of {total} rows with {len(data)} bytes of {list(shape)}")
        column = []
        for count in rows:
            end, start = at + count * row, 0 if block is None else whole.start + at
            column.append(Tensor(name, datatype, (count, *rest), data[at:end], block, start))
            at = end
        columns.append(column)
    return list(zip(*columns, strict=True))


def output_size(answer: BatchResult) -> int:
    """Return the bytes that the outputs of a batch take in the arena, but for strings, which are not placed there."""
    parts = [
        part for parts in answer.requests if not isinstance(parts, str) for part in parts if part.datatype != "BYTES"
    ]
    return sum(aligned(part.size if part.data is None else len(part.data)) for part in parts)


def is_inline(answer: BatchResult) -> bool:
    """Return whether no tensor of an answer lies in the arena."""
    for parts in answer.requests:
        if not isinstance(parts, str):
            for part in parts:
                if part.data is None:
                    return False
    return True


def tensor_of(part: TensorPart, room: Block | None) -> Tensor:
    """Return an output. Raises WorkerError where it does not lie in the room that the worker was given."""
    if part.data is not None:
        return Tensor(part.name, part.datatype, part.shape, part.data)
    if room is None or part.start < room.offset or part.size < 0 or part.start + part.size > room.offset + room.size:
        raise WorkerError(f"it put output {part.name!r} where it has no room")
    start = part.start - room.offset
    return Tensor(part.name, part.datatype, part.shape, room.view[start : start + part.size], room, start)
