"""Lend tensors to another process that maps the same arena, and borrow its own.

Small tensors travel in messages. A large one stays where it is, in the lender's part of the arena, until the borrower
says that nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from cotenant.core.tensor import Tensor
from cotenant.errors import UnavailableError, WorkerError
from cotenant.live.http_processes.event_loop import EventLoop
from cotenant.worker.arena import Block
from cotenant.worker.wire import LARGE, TensorPart, aligned


class Lender:
    """Keep what is lent, by number. allocate: returns a block that the borrower can read, or None."""

    def __init__(self, allocate: Callable[[int], Block | None]) -> None:
        self._allocate = allocate
        self._lent: dict[int, tuple[Sequence[Tensor], Block | None]] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def parts(self, number: int, tensors: Sequence[Tensor]) -> list[TensorPart]:
        """Return how tensors travel. Raises UnavailableError where there is no room for one that lies elsewhere."""
        room = sum(
            [aligned(len(tensor.data)) for tensor in tensors if tensor.block is None and len(tensor.data) >= LARGE]
        )
        block = self._allocate(room) if room else None
        if room and block is None:
            raise UnavailableError("tensors take too much memory now; try again", retry_after=1.0)
        parts, used, lent = [], 0, False
        for tensor in tensors:
            size = len(tensor.data)
            if tensor.block is not None:
                start = cast(Block, tensor.block).offset + tensor.start
            elif size >= LARGE and block is not None:
                start = block.offset + used
                block.view[used : used + size] = tensor.data
                used += aligned(size)
            else:
                data = cast(memoryview, tensor.data)
                parts.append(TensorPart(tensor.name, tensor.datatype, tensor.shape, data))
                continue
            lent = True
            parts.append(TensorPart(tensor.name, tensor.datatype, tensor.shape, None, start, size))
        if lent:
            self._lent[number] = tuple(tensors), block
        return parts

    def returned(self, numbers: Iterable[int]) -> None:
        """Let go of what was lent under these numbers."""
        for number in numbers:
            self._lent.pop(number, None)


class Borrower:
    """Read what is lent. part: where it may lie. give_back: called on the event loop with a number, when nothing refers
    to what was lent under it any more."""

    def __init__(self, part: Block, loop: EventLoop, give_back: Callable[[int], object]) -> None:
        self._part = part
        self._loop = loop
        self._give_back = give_back

    def tensors(self, number: int, parts: Sequence[TensorPart]) -> tuple[Tensor, ...]:
        """Return tensors. Raises WorkerError for one that lies elsewhere."""
        for part in parts:
            if part.data is None:
                return self._borrow(number, parts)
        return tuple([Tensor(part.name, part.datatype, part.shape, cast(Any, part.data)) for part in parts])

    def _borrow(self, number: int, parts: Sequence[TensorPart]) -> tuple[Tensor, ...]:
        whole = np.frombuffer(self._part.view, np.uint8)  # all views of these tensors refer to it, and it to the part
        weakref.finalize(whole, self._unused, number).atexit = False
        base = self._part.offset
        block = Block(base, self._part.size, memoryview(cast(Any, whole)))
        tensors = []
        for part in parts:
            if part.data is not None:
                tensors.append(Tensor(part.name, part.datatype, part.shape, part.data))
                continue
            start = part.start - base
            if start < 0 or part.size < 0 or start + part.size > block.size:
                raise WorkerError(f"tensor {part.name!r} lies where it has no room")
            view = block.view[start : start + part.size]
            tensors.append(Tensor(part.name, part.datatype, part.shape, view, block, start))
        return tuple(tensors)

    def _unused(self, number: int) -> None:
        """Hear, from any thread, that nothing refers any more to what was lent under this number."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._give_back, number)
