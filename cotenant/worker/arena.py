"""Allocate memory that the server shares with its workers, so that large tensors cross without a copy.

A block lives as long as anything references it: its view, a slice of it, an array on it. Blocks are therefore never
freed by hand, and none can be read after it has a new owner. The memory is sparse: untouched pages cost nothing, and
those that are free again go back to the system, but for the lowest `KEPT`.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
import tempfile
import weakref
from collections import deque
from typing import Any, cast

import numpy as np

PAGE = 4096
KEPT = 128 << 20  # bytes whose pages stay: to give them back and take them anew costs as much as to write them


class Block:
    """`size` bytes at byte `offset` of the arena, seen through `view`."""

    __slots__ = ("offset", "size", "view")

    def __init__(self, offset: int, size: int, view: memoryview) -> None:
        self.offset = offset
        self.size = size
        self.view = view


class _Lease(weakref.ref[Any]):
    """Reference the bytes of a block weakly, and know their range even after they were dropped."""

    __slots__ = ("end", "start")
    start: int
    end: int


class Region:
    """Allocate the bytes from `start` to `end` of shared memory in whole pages, lowest free page first: those are
    already backed by memory. kept: bytes at the start whose pages stay when they are free."""

    def __init__(self, memory: mmap.mmap, start: int, end: int, *, kept: int) -> None:
        self._memory = memory
        self._kept = start + kept
        self._free = [(start, end)]  # start and end of each hole, ascending, coalesced
        self._leases: dict[int, _Lease] = {}  # by start; a weak reference calls back only while it is alive
        self._dropped: deque[_Lease] = deque()

    def allocate(self, size: int) -> Block | None:
        """Allocate a block of `size` ≥ 1 bytes; None if no hole is large enough."""
        self.reclaim()
        need = _whole_pages(size)
        index = next((index for index, (start, end) in enumerate(self._free) if end - start >= need), None)
        if index is None:
            return None
        start, end = self._free[index]
        if end - start == need:
            del self._free[index]
        else:
            self._free[index] = (start + need, end)
        data = np.frombuffer(self._memory, np.uint8, size, start)
        # The callback may run at any point, even inside this method: it only appends to a queue.
        lease = _Lease(data, self._dropped.append)
        lease.start, lease.end = start, start + need
        self._leases[start] = lease
        return Block(start, size, memoryview(cast(Any, data)))

    @property
    def free(self) -> int:
        """Return the bytes that belong to no block."""
        self.reclaim()
        return sum(end - start for start, end in self._free)

    def reclaim(self) -> None:
        """Take back the blocks that were dropped, and give memory above what is kept back to the system."""
        while self._dropped:
            self._reclaim(self._dropped.popleft())

    def _reclaim(self, lease: _Lease) -> None:
        start, end = lease.start, lease.end
        del self._leases[start]
        if end > self._kept:
            self._give_back(max(start, self._kept), end)
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))

    def _give_back(self, start: int, end: int) -> None:
        # A file in a folder that cannot have holes keeps its pages; so does a system that has none to make.
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE, start, end - start)


class Arena(Region):
    """Allocate `size` bytes of memory that workers map.

    fd: the file descriptor that they map. size: of all of it, in bytes. parts: what other processes allocate from,
    `beyond` further bytes, from which each is given a block.
    """

    def __init__(self, size: int, *, beyond: int = 0) -> None:
        own = _whole_pages(size)
        self.size = own + _whole_pages(beyond)
        self.fd = _unnamed_file()
        os.ftruncate(self.fd, self.size)
        _seal_size(self.fd)
        memory = map_memory(self.fd, self.size)
        super().__init__(memory, 0, own, kept=KEPT)
        self.parts = Region(memory, own, self.size, kept=0)

    def close(self) -> None:
        """Close the file descriptor; the memory itself is freed with the last block."""
        os.close(self.fd)


def map_memory(fd: int, size: int) -> mmap.mmap:
    """Map the arena, at the same offsets as in the server."""
    return mmap.mmap(fd, size)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _seal_size(fd: int) -> None:
    """Keep workers from changing the size of the arena: reading what is no longer there would kill the server."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        with contextlib.suppress(OSError):  # it is a file of a system without memfd_create
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("cotenant", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
