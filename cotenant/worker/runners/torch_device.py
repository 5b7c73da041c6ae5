"""Where a PyTorch model runs: the processor, or one stream of a GPU.

Everything that a batch of a GPU touches is allocated on its own stream and used on no other, so the caching allocator
never hands a block to one stream that another still reads. Weights are the exception: they are there, and the device
has come to rest, before the first batch, and stay until no runner has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

from cotenant.errors import DeviceError

T = TypeVar("T")

# Held by what concerns a process's allocator as a whole: memory is not given back while another lane records.
_allocator = threading.Lock()


class TorchDevice(Protocol):
    device: torch.device

    def scope(self) -> AbstractContextManager[object]:
        """What is computed within is computed here. It may still be under way when the block ends."""
        ...

    def stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that a copy leaves from, or goes to, while the host and other streams go on."""
        ...

    def arrive(self, host: torch.Tensor) -> torch.Tensor:
        """The same on the device."""
        ...

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """The same on the host, once `wait` has returned."""
        ...

    def wait(self) -> float:
        """Until all of the last scope is done: how many seconds the device took for it, by its own clock."""
        ...

    def broken(self) -> str:
        """Why nothing can run here in this process any more; "" where that is not so."""
        ...

    def taken(self) -> int:
        """Bytes of the device that batches here have taken, weights apart."""
        ...

    def release(self) -> int:
        """Give back what nothing here uses any more; bytes that are still in use."""
        ...

    def record(self, compute: Callable[[], T]) -> tuple[T, Callable[[], None]] | None:
        """What it computes, and how to compute it again, from the same memory into the same memory. None where that
        would save nothing."""
        ...


class CpuDevice:
    device = torch.device("cpu")

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def arrive(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        return value.contiguous()

    def wait(self) -> float:
        return 0.0

    def broken(self) -> str:
        return ""

    def taken(self) -> int:
        return 0

    def release(self) -> int:
        return 0

    def record(self, compute: Callable[[], T]) -> None:
        return None


class CudaDevice:
    """stream: a CUDA stream's handle on the first device that the process sees; 0 for a new one."""

    def __init__(self, stream: int) -> None:
        if not torch.cuda.is_available():
            why = "it is built without CUDA"
            if torch.version.cuda:
                why = f"its CUDA {torch.version.cuda} finds no driver, or CUDA_VISIBLE_DEVICES hides all"
            raise DeviceError(f"PyTorch {torch.__version__} sees no GPU: {why}; see `cotenant devices`")
        self.device = torch.device("cuda", 0)
        self._stream = torch.cuda.ExternalStream(stream, self.device) if stream else torch.cuda.Stream(self.device)
        # Blocking: a thread that waits leaves its core to others; one that spins for each lane would take them all.
        self._begun = torch.cuda.Event(enable_timing=True, blocking=True)
        self._ended = torch.cuda.Event(enable_timing=True, blocking=True)
        self._pool = torch.cuda.graph_pool_handle()  # for all graphs of the stream, which never run at the same time

    def scope(self) -> AbstractContextManager[object]:
        return _Scope(self._stream, self._begun, self._ended)

    def stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # PyTorch keeps pinned blocks and gives one out again once copies from it are through.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def arrive(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device, non_blocking=True)

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        return self.stage(tuple(value.shape), value.dtype).copy_(value, non_blocking=True)

    def wait(self) -> float:
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1e3

    def broken(self) -> str:
        # Errors that end a context come back from every later call; those of one call do not.
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            return str(error)
        return ""

    def taken(self) -> int:
        return sum(it["total_size"] for it in self._segments())

    def release(self) -> int:
        # Weights were on the default stream. Giving memory back holds up all that runs on the device, and takes what
        # others keep for their next batch, too; so only where there is any.
        with _allocator:
            if any(not it["active_size"] for it in self._segments(0)):
                torch.cuda.empty_cache()
        return sum(it["active_size"] for it in self._segments())

    def _segments(self, *others: int) -> list[dict[str, int]]:
        """What the allocator has for this stream, and for others."""
        streams = (self._stream.cuda_stream, *others)
        return [it for it in torch.cuda.memory.memory_snapshot() if it["stream"] in streams]

    def record(self, compute: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        with self.scope():  # libraries choose kernels and get their workspaces before they are recorded
            for _ in range(3):
                compute()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        # Other lanes go on meanwhile; `torch.cuda.graph` would wait for them all, and take their cached memory.
        with _allocator, torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        return result, graph.replay


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
