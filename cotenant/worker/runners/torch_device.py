"""Represent the device of a PyTorch model: the CPU, or one stream of a GPU.

Everything that a batch touches on a GPU is allocated on its own stream and used on no other, so the caching allocator
never hands a block to one stream while another still reads it. Weights are the exception: they are loaded and
synchronised before the first batch and stay until no runner uses them.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol, TypeVar

import numpy as np
import torch

from cotenant.errors import DeviceError
from cotenant.worker.arena import KEPT
from cotenant.worker.runners.arrays import Array

T = TypeVar("T")

# Bytes of a part from which a copy of its own costs less than joining it to others in staging memory.
DIRECT = 1 << 17

# Guards operations on the process-wide allocator: no memory is released while another lane captures a graph.
_allocator = threading.Lock()


class TorchDevice(Protocol):
    """Represent where the batches of one lane run."""

    device: torch.device

    def scope(self) -> AbstractContextManager[object]:
        """Run what is computed inside the block on this device; it may still be running when the block ends."""
        ...

    def stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory for asynchronous copies."""
        ...

    def reads(self, parts: Sequence[Array]) -> bool:
        """Return whether the device copies these arrays from where they are as fast as from staging memory."""
        ...

    def to_device(self, host: Sequence[torch.Tensor], into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy tensors to the device, joined by their first dimension: one that is staged, or such as it reads.

        into: a tensor of the device whose first rows they become; a new one without it.
        """
        ...

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host; it may be read after `wait` has returned."""
        ...

    def wait(self) -> float:
        """Wait for the last scope to finish; return its seconds by the device's own clock."""
        ...

    def broken(self) -> str:
        """Return why nothing can run on the device in this process any more; empty if it can."""
        ...

    def taken(self) -> int:
        """Return the device bytes that batches of this stream have taken, without weights."""
        ...

    def release(self) -> int:
        """Release cached memory that is not in use; return the bytes that still are."""
        ...

    def capture(self, compute: Callable[[], T], runs: int) -> tuple[T, Callable[[], None]] | None:
        """Capture a computation; return its result and a function that replays it in the same memory.

        runs: how often to run it before. None if replaying would save nothing. Raises what PyTorch raises if it
        cannot be captured; it can then still be run.
        """
        ...


class CpuDevice:
    device = torch.device("cpu")

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def reads(self, parts: Sequence[Array]) -> bool:
        return False

    def to_device(self, host: Sequence[torch.Tensor], into: torch.Tensor | None = None) -> torch.Tensor:
        (staged,) = host
        return staged if into is None else _first_rows(into, staged).copy_(staged)

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        return value.contiguous()

    def wait(self) -> float:
        return 0.0

    def broken(self) -> str:
        return ""

    def taken(self) -> int:
        return 0

    def release(self) -> int:
        return 0

    def capture(self, compute: Callable[[], T], runs: int) -> None:
        return None


class CudaDevice:
    """Represent the first visible CUDA device.

    stream: handle of the CUDA stream to use; 0 for a new one. memory: the arena; of its first part, whose pages stay,
    the device reads large inputs by itself, which saves the processor to join them in staging memory.
    """

    def __init__(self, stream: int, memory: mmap.mmap | None = None) -> None:
        if not torch.cuda.is_available():
            why = "it is built without CUDA"
            if torch.version.cuda:
                why = f"its CUDA {torch.version.cuda} finds no driver, or CUDA_VISIBLE_DEVICES hides all"
            raise DeviceError(f"PyTorch {torch.__version__} sees no GPU: {why}; see `cotenant devices`")
        self.device = torch.device("cuda", 0)
        self._stream = torch.cuda.ExternalStream(stream, self.device) if stream else torch.cuda.Stream(self.device)
        # Blocking events: one spinning thread per lane would take all cores.
        self._begun = torch.cuda.Event(enable_timing=True, blocking=True)
        self._ended = torch.cuda.Event(enable_timing=True, blocking=True)
        self._readable = range(0) if memory is None else _registered(memory)
        self._pool = torch.cuda.graph_pool_handle()  # shared by all graphs of the stream, which never run concurrently

    def scope(self) -> AbstractContextManager[object]:
        return _Scope(self._stream, self._begun, self._ended)

    def stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # PyTorch caches pinned blocks and reuses one when its copies are done.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def reads(self, parts: Sequence[Array]) -> bool:
        return all(
            part.nbytes >= DIRECT
            and part.flags.c_contiguous
            and self._readable.start <= part.ctypes.data
            and part.ctypes.data + part.nbytes <= self._readable.stop
            for part in parts
        )

    def to_device(self, host: Sequence[torch.Tensor], into: torch.Tensor | None = None) -> torch.Tensor:
        if len(host) == 1:
            if into is None:
                return host[0].to(self.device, non_blocking=True)
            return _first_rows(into, host[0]).copy_(host[0], non_blocking=True)
        rows = sum(len(part) for part in host)
        if into is None:
            joined = torch.empty((rows, *host[0].shape[1:]), dtype=host[0].dtype, device=self.device)
        else:
            joined = into[:rows]
        for place, part in zip(joined.split([len(part) for part in host]), host, strict=True):
            place.copy_(part, non_blocking=True)
        return joined

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        return self.stage(tuple(value.shape), value.dtype).copy_(value, non_blocking=True)

    def wait(self) -> float:
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1e3

    def broken(self) -> str:
        # An error that corrupts the context is returned by every later call.
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            return str(error)
        return ""

    def taken(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    def release(self) -> int:
        # Weights were loaded on the default stream. Emptying the cache stalls the device and takes what other lanes
        # cached for their next batch, so it is done only if there is anything to release.
        with _allocator:
            if any(not segment["active_size"] for segment in self._segments(0)):
                torch.cuda.empty_cache()
        return sum(segment["active_size"] for segment in self._segments())

    def _segments(self, *others: int) -> list[dict[str, int]]:
        """Return the allocator's segments of this stream and of others."""
        streams = (self._stream.cuda_stream, *others)
        return [segment for segment in torch.cuda.memory.memory_snapshot() if segment["stream"] in streams]

    def capture(self, compute: Callable[[], T], runs: int) -> tuple[T, Callable[[], None]]:
        with self.scope():  # libraries choose kernels and allocate workspaces before the capture
            for _ in range(runs):
                compute()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        # Other lanes go on running; `torch.cuda.graph` would synchronise with all of them and empty their caches.
        with _allocator, torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                try:
                    result = compute()
                finally:
                    graph.capture_end()
            except BaseException:
                self._abandon_capture()
                raise
        return result, graph.replay

    def _abandon_capture(self) -> None:
        """Tell the allocator that a capture has failed: before 2.12 PyTorch does not (its pull request 180395), and
        the process would abort at a later allocation. The memory of the capture is never used again."""
        with suppress(RuntimeError):  # the allocator has been told
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


def _first_rows(into: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return as much of a tensor as another one fills: all of it, or as many rows."""
    return into if into.shape == value.shape else into[: len(value)]


_readable: weakref.WeakKeyDictionary[mmap.mmap, range] = weakref.WeakKeyDictionary()  # addresses, by mapping


def _registered(memory: mmap.mmap) -> range:
    """Have the driver keep the first part of the arena in place, for the device to read; return its addresses.

    The pages beyond `KEPT` go back to the system when they are free, so they are not registered. None are if the driver
    refuses, such as beyond a limit on locked memory: inputs are then copied by the processor. What is registered stays
    so until the process ends, as its mapping of the arena does.
    """
    with _allocator:
        if memory not in _readable:
            start, size = np.frombuffer(memory, np.uint8).ctypes.data, min(len(memory), KEPT)
            _readable[memory] = range(start, start + size) if _register(start, size) else range(0)
        return _readable[memory]


def _register(start: int, size: int) -> bool:
    """Return whether the driver keeps this memory in place.

    It is asked by its own interface: a refusal by the runtime's would be the error of PyTorch's next call. That needs
    the device's context in this thread, where a lane on a green context has used none yet: a call of the runtime that
    asks the device brings it.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    torch.cuda.mem_get_info()
    (code,) = driver.cuMemHostRegister(start, size, driver.CU_MEMHOSTREGISTER_PORTABLE)
    return code == driver.CUresult.CUDA_SUCCESS  # type: ignore[no-any-return]


class _Scope:
    def __init__(self, stream: torch.cuda.Stream, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._stream = stream
        self._current = torch.cuda.stream(stream)
        self._begun = begun
        self._ended = ended

    def __enter__(self) -> None:
        self._current.__enter__()
        self._begun.record(self._stream)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        try:
            if kind is None:
                self._ended.record(self._stream)
        finally:
            self._current.__exit__(kind, value, traceback)
