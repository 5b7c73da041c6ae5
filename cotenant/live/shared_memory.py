"""Read inputs from shared memory that callers of this machine register, and put outputs there.

Nothing of a region is mapped. Its bytes are copied by `preadv` and `pwrite`, which fall short where a caller has shrunk
its region meanwhile; touching a map would then end the process (SIGBUS). A copy is what a socket would cost as well.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from cotenant.errors import InvalidError, NotFoundError, UnavailableError, UnsupportedError
from cotenant.live.limits import MAX_BODY, MAX_REGIONS, Limits, MemoryBudget
from cotenant.worker.arena import Block
from cotenant.worker.wire import LARGE

FOLDER = Path("/dev/shm")  # noqa: S108  # where Linux keeps the regions of shm_open(3)
_KEY = re.compile(r"/?[A-Za-z0-9_.-]{1,250}")
_DISABLED = "no shared memory is registered here (allow_client_shm is off); send the tensor"

Data = bytes | memoryview


class SharedMemoryNamedError(UnsupportedError):
    """Raised by readers of requests that are given no regions, for a tensor that lies in one."""

    def __init__(self) -> None:
        super().__init__(_DISABLED)


class RegionStatus(msgspec.Struct, frozen=True):
    """Describe a region as it was registered. offset, byte_size: of the caller's memory, in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


class _Region:
    """Hold a region's file for as long as anything refers to it."""

    def __init__(self, status: RegionStatus, fd: int) -> None:
        self.status = status
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def place(self, offset: int, size: int) -> int:
        """Return where a tensor begins in the file. Raises InvalidError where it does not lie in the region."""
        if not (offset >= 0 and size >= 0 and offset + size <= self.status.byte_size):
            raise InvalidError(
                f"{size} bytes at {offset} do not lie in shared memory region {self.status.name!r} of "
                f"{self.status.byte_size} bytes"
            )
        return self.status.offset + offset

    def shrunk(self) -> InvalidError:
        return InvalidError(f"shared memory region {self.status.name!r} is smaller than it was registered")


class _CountedBlock(Block):
    """A block that can be told of when nothing refers to it any more."""

    __slots__ = ("__weakref__",)


class OutputRegion(msgspec.Struct, frozen=True):
    """Say where in a region an output goes. size: at most so many bytes."""

    region: _Region
    offset: int
    size: int

    @property
    def name(self) -> str:
        return self.region.status.name

    def write(self, data: Data | bytearray) -> None:
        """Put an output there. Raises InvalidError where it does not fit."""
        if len(data) > self.size:
            raise InvalidError(
                f"an output of {len(data)} bytes does not fit into {self.size} bytes of shared memory region "
                f"{self.name!r}"
            )
        start = self.region.place(self.offset, len(data))
        if start + len(data) > os.fstat(self.region.fd).st_size:
            raise self.region.shrunk()
        view = memoryview(data)
        while view:
            try:
                written = os.pwrite(self.region.fd, view, start)
            except OSError as error:  # such as no space left for a page that was never written
                raise InvalidError(f"shared memory region {self.name!r} cannot be written: {error.strerror}") from None
            start, view = start + written, view[written:]


class SharedTensors:
    """Read the tensors of one request from regions. Room for them is taken at once; `copy` fills it, perhaps in a
    thread.

    size: bytes that are still to be copied.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.size = 0
        self._memory = memory
        self._copies: list[tuple[_Region, int, memoryview]] = []
        self._checks: list[Callable[[], None]] = []

    def read(self, name: str, offset: int, size: int) -> tuple[Data, Block | None]:
        """Return a tensor's bytes, and the block of workers' memory that they lie in, if they do: there they are once
        `copy` has ended.

        Raises InvalidError for what does not lie in the region, UnavailableError where too much is held.
        """
        region = self._memory.find(name)
        start = region.place(offset, size)
        if size > self._memory.tensor:
            raise InvalidError(f"a tensor of {size} bytes; at most {self._memory.tensor} are read")
        if size < LARGE:
            data = os.pread(region.fd, size, start)
            if len(data) < size:
                raise region.shrunk()
            return data, None
        block = self._memory.reserve(size)
        view = block.view[:size]
        self._copies.append((region, start, view))
        self.size += size
        return view, block

    def output(self, name: str, offset: int, size: int) -> OutputRegion:
        """Return where an output is to go. Raises InvalidError for what does not lie in the region."""
        region = self._memory.find(name)
        region.place(offset, size)
        return OutputRegion(region, offset, size)

    def then(self, check: Callable[[], None]) -> None:
        """Have tensors checked once they are copied."""
        self._checks.append(check)

    def copy(self) -> None:
        """Copy the tensors, and check them. Raises InvalidError."""
        for region, start, view in self._copies:
            done = 0
            while done < len(view):
                count = os.preadv(region.fd, [view[done:]], start + done)
                if not count:
                    raise region.shrunk()
                done += count
        for check in self._checks:
            check()


class SharedMemory:
    """Hold the regions that callers have registered.

    enabled: whether callers may register any. allocate: memory that workers share. tensor: bytes of one tensor at most.
    budget: counts those that are read and not done with. loop: that the budget belongs to; None: nothing is read beside
    this thread. Methods raise UnsupportedError where it is not enabled.
    """

    def __init__(
        self,
        *,
        enabled: bool = False,
        allocate: Callable[[int], Block | None] = lambda size: None,
        tensor: int = MAX_BODY,
        budget: MemoryBudget | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        folder: Path = FOLDER,
    ) -> None:
        self.enabled = enabled
        self._allocate = allocate
        self.tensor = tensor
        self._budget = MemoryBudget(Limits().memory) if budget is None else budget
        self._loop = loop
        self._thread = threading.get_ident()
        self._folder = folder
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region of shm_open(3) by its key. Raises InvalidError for one that is not there, is too small, or
        whose name is taken."""
        self._check_enabled()
        if not name or name in self._regions:
            raise InvalidError(f"shared memory region {name!r} is registered already; unregister it first")
        if len(self._regions) >= MAX_REGIONS:
            raise InvalidError(f"{MAX_REGIONS} shared memory regions are registered, the most; unregister some")
        if not _KEY.fullmatch(key) or key.strip("/") in (".", ".."):
            raise InvalidError(f"shared memory key {key[:100]!r}: it is a name, without folders")
        if offset < 0 or byte_size <= 0 or offset + byte_size >= 1 << 63:
            raise InvalidError(f"{byte_size} bytes at {offset} are no shared memory region")
        fd = self._open(key)
        region = _Region(RegionStatus(name, key, offset, byte_size), fd)
        if offset + byte_size > os.fstat(fd).st_size:
            raise InvalidError(
                f"shared memory {key!r} has {os.fstat(fd).st_size} bytes; the region is to end at {offset + byte_size}"
            )
        self._regions[name] = region

    def _open(self, key: str) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self._folder / key.strip("/"), flags)
        except OSError as error:
            raise InvalidError(f"shared memory {key!r} cannot be opened: {error.strerror}; create it first") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidError(f"shared memory {key!r} is not shared memory")
        return fd

    def unregister(self, name: str = "") -> None:
        """Forget a region, all without a name. Harmless for one that is not registered; requests that use it end."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[RegionStatus]:
        """Return the regions, or the one of a name. Raises NotFoundError where there is none."""
        if name and name not in self._regions:
            raise NotFoundError(f"no shared memory region {name!r} is registered")
        return [region.status for region in self._regions.values() if name in ("", region.status.name)]

    def tensors(self) -> SharedTensors:
        """Return what reads the tensors of one request."""
        return SharedTensors(self)

    def reserve(self, size: int) -> Block:
        """Return memory for a tensor, counted for as long as anything refers to it. Raises UnavailableError where too
        much is held."""
        budget = self._budget
        block = self._allocate(size) if budget.used + size <= budget.total else None
        if block is None:
            raise UnavailableError("tensors of shared memory take too much memory now; try again", retry_after=1.0)
        counted = _CountedBlock(block.offset, block.size, block.view)
        budget.used += size
        weakref.finalize(counted, self._release, size)
        return counted

    def _release(self, size: int) -> None:
        """Count a tensor no more, whichever thread has dropped it."""
        if self._loop is None or threading.get_ident() == self._thread:
            self._budget.used -= size
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release, size)

    def find(self, name: str) -> _Region:
        """Return a region. Raises InvalidError where none has that name."""
        self._check_enabled()
        region = self._regions.get(name)
        if region is None:
            raise InvalidError(f"no shared memory region {name!r} is registered; register it first")
        return region

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise UnsupportedError(_DISABLED)
        if sys.platform != "linux":
            raise UnsupportedError("clients' shared memory works on Linux only; send the tensor")
