"""Tensors on their way to a worker and back: inline, or in the arena."""

from __future__ import annotations

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
