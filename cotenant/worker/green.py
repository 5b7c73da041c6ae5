"""A device's multiprocessors in groups, and CUDA streams whose kernels run on some of the groups alone.

A stream belongs to a green context, and that to groups of one split of the device: contexts over groups of one split
are disjoint where their groups are, those of two splits are not. All green contexts of a process share the device's
primary context, which PyTorch uses, too: its memory, its modules, and so the weights of models. What is submitted to
any other stream runs on all multiprocessors, so whoever wants partitions has to put everything on such streams.

All of it is the CUDA driver's interface since 12.5 (CUDA driver API, "Green Contexts"). `python -m
cotenant.worker.green` prints the sizes of the groups: who only wants to know them asks a process that ends with the
answer, since one that opened a device keeps a context and its memory there.
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

OLDEST = 12050  # the first CUDA that makes streams of green contexts, as drivers number it

Groups = tuple[int, ...]


class Multiprocessors:
    """Those of the first device that this process sees. The device is opened for the first stream, and stays open until
    the process ends. Any thread may ask.

    Groups have the numbers 0, 1, … and one size; where they leave a rest, that is the last.
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
        """Multiprocessors of each group."""
        with self._lock:
            return tuple(resource.sm.smCount for resource in self._resources)

    @contextlib.contextmanager
    def stream(self, groups: Groups) -> Iterator[int]:
        """The handle of a stream on these groups that nobody else has meanwhile. Raises DeviceError.

        Streams are kept and used again, since PyTorch keeps memory, and cuBLAS a workspace, for each that it has seen.
        """
        with self._lock:
            first = not self._contexts
            stream = self._free[groups].pop() if self._free[groups] else self._cuda.stream(self._context(groups))
            self._used[groups] = self._used.get(groups, 0) + 1
            if first:
                self._prepare()
        try:
            yield int(stream)
        finally:
            with self._lock:
                self._free[groups].append(stream)
                self._used[groups] -= 1

    def _prepare(self) -> None:
        """Contexts for what is likely to be asked for: all groups, the first, the last. Any cut in two is of these."""
        sizes = [resource.sm.smCount for resource in self._resources]
        equal = sizes.count(sizes[0])
        cuts = [(range(size), range(size, equal)) for size in range(1, equal)]
        with contextlib.suppress(DeviceError):  # there is a limit to how many; then they are made when they are needed
            for groups in map(tuple, [range(len(sizes)), *itertools.chain(*cuts)]):
                if groups not in self._contexts:
                    self._contexts[groups] = self._made(groups)

    def _context(self, groups: Groups) -> Any:
        if groups not in self._contexts:
            try:
                made = self._made(groups)
            except DeviceError:
                if not self._forget():
                    raise
                made = self._made(groups)
            self._contexts[groups] = made
        return self._contexts[groups]

    def _made(self, groups: Groups) -> Any:
        if len(groups) == len(self._resources):
            # What a split leaves may be aligned otherwise than its groups, and is not joined with them then.
            return self._cuda.context([self._cuda.whole])
        return self._cuda.context([self._resources[group] for group in groups])

    def _forget(self) -> bool:
        """Destroy the contexts that no stream in use belongs to; whether there were any."""
        idle = [groups for groups in self._contexts if not self._used.get(groups)]
        for groups in idle:
            self._cuda.destroy(self._contexts.pop(groups), self._free.pop(groups, []))
        return bool(idle)


class _Driver:
    """The calls that we need, as functions that raise DeviceError. Opening it retains the primary context, so that it
    is not made anew for each green one."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise DeviceError("green contexts need the package cuda-bindings; install cotenant[gpu]") from None
        self._api = driver
        self._call("cuInit", 0)
        version = self._call("cuDriverGetVersion")
        if version < OLDEST:
            raise DeviceError(
                f"green contexts need a driver with CUDA {_dotted(OLDEST)} or newer, and this one has "
                f"{_dotted(version)}; update it, or use the backend mps"
            )
        self._device = self._call("cuDeviceGet", 0)
        self._call("cuDevicePrimaryCtxRetain", self._device)
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        self.whole = self._call("cuDeviceGetDevResource", self._device, kind)

    def split(self) -> list[Any]:
        """Resources of groups of one size, and of the rest if there is any."""
        size = self._step()
        wanted = self.whole.sm.smCount // size
        groups, count, rest = self._call("cuDevSmResourceSplitByCount", wanted, self.whole, 0, size)
        return [*groups[:count], *([rest] if rest.sm.smCount else [])]

    def _step(self) -> int:
        """Of how many multiprocessors a group is a multiple. Drivers before 13.0 do not say; then it is what the
        documentation of `cuDevSmResourceSplitByCount` has for each compute capability."""
        if told := getattr(self.whole.sm, "minSmPartitionSize", 0):
            return int(told)
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
        except RuntimeError as error:  # no driver, or none that has this function
            raise DeviceError(f"{name}: {' '.join(str(error).split())}") from None
        if code != self._api.CUresult.CUDA_SUCCESS:
            _, text = self._api.cuGetErrorString(code)
            raise DeviceError(f"{name}: {code.name}: {(text or b'').decode()}")
        return results[0] if len(results) == 1 else results


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    try:
        print(json.dumps(Multiprocessors().sizes))  # noqa: T201  # that is what it is for
    except DeviceError as error:
        sys.exit(str(error))
