"""Split a device's multiprocessors (SMs) into groups, and make CUDA streams that run on some of the groups only.

A stream belongs to a green context, and the context to groups of one split of the device. Contexts over disjoint groups
of one split are disjoint; contexts of two splits are not. All green contexts of a process share the device's primary
context, which PyTorch uses too: its memory, its modules, and so the weights of models. Work on any other stream runs on
all SMs, so partitions hold only if everything is submitted to such streams.

The interface is the CUDA driver's since 12.5 (CUDA driver API, "Green Contexts"). `python -m cotenant.worker.green`
prints the sizes of the groups; it is a process of its own because one that opens a device keeps a context and memory
there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from cotenant.errors import DeviceError

MIN_DRIVER_VERSION = 12050  # CUDA 12.5, the first with streams of green contexts, as drivers number it

Groups = tuple[int, ...]


class Multiprocessors:
    """Manage the SMs of the first visible device, in groups numbered 0, 1, … of one size; a remainder is the last
    group.

    The device is opened with the first stream and stays open until the process ends. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[Groups, Any] = {}
        self._free: defaultdict[Groups, list[Any]] = defaultdict(list)  # streams
        self._used: dict[Groups, int] = {}  # how many streams

    @functools.cached_property
    def _cuda(self) -> _Driver:
        return _Driver()

    @functools.cached_property
    def _resources(self) -> list[Any]:
        return self._cuda.split()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the SMs of each group."""
        with self._lock:
            return tuple(resource.sm.smCount for resource in self._resources)

    @contextlib.contextmanager
    def stream(self, groups: Groups) -> Iterator[int]:
        """Lease a stream on these groups exclusively and yield its handle. Raises DeviceError.

        Streams are reused, since PyTorch caches memory, and cuBLAS a workspace, for every stream it has seen.
        """
        with self._lock:
            first = not self._contexts
            stream = self._free[groups].pop() if self._free[groups] else self._cuda.stream(self._context(groups))
            self._used[groups] = self._used.get(groups, 0) + 1
            if first:
                self._create_likely_contexts()
        try:
            yield int(stream)
        finally:
            with self._lock:
                self._free[groups].append(stream)
                self._used[groups] -= 1

    def _create_likely_contexts(self) -> None:
        """Create the contexts of any cut in two: all groups, the first n, and the rest."""
        sizes = [resource.sm.smCount for resource in self._resources]
        equal = sizes.count(sizes[0])
        cuts = [(range(size), range(size, equal)) for size in range(1, equal)]
        with contextlib.suppress(DeviceError):  # their number is limited; the others are created when needed
            for groups in map(tuple, [range(len(sizes)), *itertools.chain(*cuts)]):
                if groups not in self._contexts:
                    self._contexts[groups] = self._create(groups)

    def _context(self, groups: Groups) -> Any:
        if groups not in self._contexts:
            try:
                context = self._create(groups)
            except DeviceError:
                if not self._destroy_idle():
                    raise
                context = self._create(groups)
            self._contexts[groups] = context
        return self._contexts[groups]

    def _create(self, groups: Groups) -> Any:
        if len(groups) == len(self._resources):
            # The remainder may be aligned differently from the groups and then cannot be joined with them.
            return self._cuda.context([self._cuda.whole])
        return self._cuda.context([self._resources[group] for group in groups])

    def _destroy_idle(self) -> bool:
        """Destroy the contexts without a stream in use; return whether there were any."""
        idle = [groups for groups in self._contexts if not self._used.get(groups)]
        for groups in idle:
            self._cuda.destroy(self._contexts.pop(groups), self._free.pop(groups, []))
        return bool(idle)


class _Driver:
    """Call the driver, raising DeviceError. Retains the primary context, so that it is not created anew for each green
    context."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise DeviceError("green contexts need the package cuda-bindings; install cotenant[gpu]") from None
        self._api = driver
        self._call("cuInit", 0)
        version = self._call("cuDriverGetVersion")
        if version < MIN_DRIVER_VERSION:
            raise DeviceError(
                f"green contexts need a driver with CUDA {_dotted(MIN_DRIVER_VERSION)} or newer, and this one has "
                f"{_dotted(version)}; update it, or use the backend mps"
            )
        self._device = self._call("cuDeviceGet", 0)
        self._call("cuDevicePrimaryCtxRetain", self._device)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self.whole = self._call("cuDeviceGetDevResource", self._device, kind)

    def split(self) -> list[Any]:
        """Return the resources of groups of one size, and of the remainder if there is one."""
        size = self._group_step()
        wanted = self.whole.sm.smCount // size
        groups, count, rest = self._call("cuDevSmResourceSplitByCount", wanted, self.whole, 0, size)
        return [*groups[:count], *([rest] if rest.sm.smCount else [])]

    def _group_step(self) -> int:
        """Return the number of SMs of which a group is a multiple.

        Drivers before 13.0 do not report it; then the values of the documentation of `cuDevSmResourceSplitByCount`
        for each compute capability apply.
        """
        if reported := getattr(self.whole.sm, "minSmPartitionSize", 0):
            return int(reported)
        major = self._call(
            "cuDeviceGetAttribute",
            self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            self._device,
        )
        return 8 if major >= 9 else 4 if major == 8 else 2

    def context(self, resources: Sequence[Any]) -> Any:
        described = self._call("cuDevResourceGenerateDesc", list(resources), len(resources))
        flags = self._api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return self._call("cuGreenCtxCreate", described, self._device, flags)

    def stream(self, context: Any) -> Any:
        return self._call("cuGreenCtxStreamCreate", context, self._api.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)

    def destroy(self, context: Any, streams: Sequence[Any]) -> None:
        for stream in streams:
            self._call("cuStreamDestroy", stream)
        self._call("cuGreenCtxDestroy", context)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(self._api, name)(*arguments)
        except RuntimeError as error:  # no driver, or one without this function
            raise DeviceError(f"{name}: {' '.join(str(error).split())}") from None
        if code != self._api.CUresult.CUDA_SUCCESS:
            _, text = self._api.cuGetErrorString(code)
            raise DeviceError(f"{name}: {code.name}: {(text or b'').decode()}")
        return results[0] if len(results) == 1 else results


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    try:
        print(json.dumps(Multiprocessors().sizes))  # noqa: T201  # the output of this program
    except DeviceError as error:
        sys.exit(str(error))
