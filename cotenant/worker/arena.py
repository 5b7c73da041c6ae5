"""Memory that the server shares with all its workers, so that large tensors cross without a copy.

A block lives as long as anything looks at it: its view, a slice of it, an array on it. So nobody gives blocks back, and
nobody can read one that has a new owner. The memory is sparse: what no block has touched costs nothing.
"""

from __future__ import annotations

import bisect
import mmap
import os
import tempfile
import weakref
from collections import deque
from typing import Any, cast

import numpy as np

PAGE = 4096


class Block:
    """`size` bytes at byte `offset` of the arena, seen through `view`."""

    __slots__ = ("offset", "size", "view")

    def __init__(self, offset: int, size: int, view: memoryview) -> None:
        self.offset = offset
        self.size = size
        self.view = view


class _Lease(weakref.ref[Any]):
    """Tells, after the bytes of a block were dropped, which they were."""

    __slots__ = ("end", "start")
    start: int
    end: int


class Arena:
    """`size` bytes, handed out in whole pages, the lowest free ones first: those are the ones already backed by memory.

    `fd` is what a worker maps.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self.fd = _unnamed_file()
        os.ftruncate(self.fd, self.size)
        self._memory = map_memory(self.fd, self.size)
        self._free = [(0, self.size)]  # start and end of each hole, ascending, no two touching
        self._leases: dict[int, _Lease] = {}  # by start: a reference is called back only while it is kept
        self._dropped: deque[_Lease] = deque()

    def allocate(self, size: int) -> Block | None:
        """A block of at least 1 byte, or None where no hole is large enough."""
        while self._dropped:
            self._reclaim(self._dropped.popleft())
        need = -(-size // PAGE) * PAGE
        index = next((index for index, (start, end) in enumerate(self._free) if end - start >= need), None)
        if index is None:
            return None
        start, end = self._free[index]
        if end - start == need:
            del self._free[index]
        else:
            self._free[index] = (start + need, end)
        data = np.frombuffer(self._memory, np.uint8, size, start)
        # The callback may run in the middle of anything, even of this method: all it does is make a note.
        lease = _Lease(data, self._dropped.append)
        lease.start, lease.end = start, start + need
        self._leases[start] = lease
        return Block(start, size, memoryview(cast(Any, data)))

    @property
    def free(self) -> int:
        """Bytes in no block."""
        while self._dropped:
            self._reclaim(self._dropped.popleft())
        return sum(end - start for start, end in self._free)

    def close(self) -> None:
        """No worker can map it any more. The memory itself goes when the last block does."""
        os.close(self.fd)

    def _reclaim(self, lease: _Lease) -> None:
        start, end = lease.start, lease.end
        del self._leases[start]
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))


def map_memory(fd: int, size: int) -> mmap.mmap:
    """What a worker sees of the arena, at the same offsets."""
    return mmap.mmap(fd, size)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("cotenant")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
