"""Partition NVIDIA GPUs by the Multi-Process Service: a worker is a client limited to a percentage of the threads.

A share is a cap: no client gets more, and co-located clients may run on the same SMs. With `static=True` (CUDA 13.1 and
Ampere, or newer) each has dedicated SMs instead. Either way the share is set when the process starts and stays; another
share is another worker, warm before the first one stops.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cotenant.backends import Launch, nvidia, sibling_of
from cotenant.backends.mps_daemon import (
    STATIC,
    DaemonFolder,
    MpsDaemon,
    Protocol,
    StaticPartition,
    control_version,
    is_alive,
    occupying_daemon,
)
from cotenant.backends.nvidia import Gpu
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE, show_share
from cotenant.errors import DeviceError

logger = logging.getLogger(__name__)

CUT = 50  # ‰: shares are multiples of it, and so whole percentages, as MPS requires
JOB_PERCENT = 50  # of a device's threads that the kernels of a best-effort job may take
LOOK = 0.25  # seconds between two checks of a daemon
AGAIN = 5.0  # seconds until the next attempt to restart a daemon


def mps_unavailable(gpu: Gpu, *, static: bool = False) -> str:
    """Return why MPS cannot partition this GPU now; empty if it can."""
    if reason := nvidia.available_sharing_modes(gpu)["mps"]:
        return reason
    if static and float(gpu.capability) < 8:
        return f"static partitions need Ampere or newer (compute capability 8.0; this is {gpu.capability})"
    if static and (found := control_version()) < STATIC:
        return f"static partitions need the MPS of CUDA 13.1 ({STATIC}; this is {found or 'older'}); leave them off"
    return occupying_daemon(gpu)


class Mps:
    """Partition these GPUs by MPS. All daemons run once this is created, and end with it or with this process.

    directory: for pipes and logs, in a private folder; default: the system's temporary folder. memory_limits: a worker
    may allocate no more than its share of the memory. static: dedicated SMs for each worker. protocol: of the control
    program; 3 needs a recent one and always has static partitions.
    """

    name = "mps"

    def __init__(
        self,
        gpus: Sequence[Gpu],
        *,
        directory: Path | None = None,
        memory_limits: bool = False,
        static: bool = False,
        protocol: Protocol = 2,
    ) -> None:
        self._gpus = tuple(gpus)
        self._memory_limits = memory_limits
        self._static = static
        home = DaemonFolder(directory)
        self._devices = {
            name: _Device(name, gpu, MpsDaemon(home.folder / f"{index:02}", gpu.uuid, protocol=protocol, static=static))
            for index, (name, gpu) in enumerate(nvidia.gpus_by_device(gpus).items())
        }
        self._watch = nvidia.DeviceWatch({name: device.gpu for name, device in self._devices.items()})
        self._stop = weakref.finalize(self, _stop, self._devices, self._watch, home)  # also when this process exits
        try:
            for device in self._devices.values():
                if reason := mps_unavailable(device.gpu, static=static):
                    raise DeviceError(f"{device.name} ({device.gpu.uuid}): {reason}")
            with ThreadPoolExecutor(max(len(self._devices), 1)) as starters:
                list(starters.map(_Device.start, self._devices.values()))
        except DeviceError:
            self.stop()
            raise

    @property
    def divides(self) -> bool:
        """Return True for caps, which each worker has of its own; a static partition takes many workers."""
        return not self._static

    def stop(self) -> None:
        """End the daemons; workers that still run lose the GPU."""
        self._stop()

    def fleet(self) -> tuple[Kind, ...]:
        return nvidia.device_kinds(self._gpus, self._cuts)

    def capacity_fingerprint(self) -> str:
        return nvidia.capacity_fingerprint(self._gpus)

    def isolation(self) -> str:
        if self._static:
            return "MPS static partitions: dedicated SMs"
        return "MPS active thread percentage: a cap, not a reservation"

    def hardware_ids(self) -> tuple[str, ...]:
        return tuple([device.gpu.uuid for device in self._devices.values()])

    def with_ceilings(self) -> Mps:
        return self

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        """Set up a partition. A static one is taken from free SMs, or inherited from a leaving lane of the same size,
        since it cannot change while it has clients. Raises DeviceError."""
        device = self._device(lane)
        env = dict(device.daemon.client)
        if self._static:
            chunks = max(round(share * _chunks(device.gpu) / WHOLE), 1)
            env["CUDA_MPS_SM_PARTITION"] = device.carve(lane, chunks, leaving)
        else:
            if _too_small(device.gpu, share):
                raise DeviceError(
                    f"{show_share(share)} of {device.name} is less than one of its {device.gpu.multiprocessors}"
                    " multiprocessors; give more"
                )
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * share / WHOLE:g}"
        if self._memory_limits:
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={device.gpu.memory * share // WHOLE >> 20}M"
        device.workers[lane] = 0
        return Launch(env=env, cuda=True)

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        raise DeviceError(f"{self.name}: a share needs a worker of its own: {', '.join(shares)}")

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        self._device(lane).workers[lane] = pid

    def close(self, lane: LaneId) -> None:
        device = self._devices.get(lane.device)
        if device is not None and device.workers.pop(lane, None) is not None:
            device.release(lane)

    def open_job(self, device: DeviceId) -> Launch:
        """Let a job be a client of low priority, whose kernels wait for those of others, on no more of the threads than
        JOB_PERCENT: a client's percentage cannot change, and kernels that run are not interrupted."""
        held = self._devices.get(device)
        if held is None:
            raise DeviceError(f"no device {device!r}; available: {', '.join(self._devices)}")
        if self._static:
            raise DeviceError(f"{device}: static partitions leave a job no multiprocessors; set static = false")
        env = {
            **held.daemon.client,
            "CUDA_MPS_CLIENT_PRIORITY": "1",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(JOB_PERCENT),
        }
        return Launch(env=env, cuda=True)

    def lost(self) -> dict[DeviceId, str]:
        """Return what the watching threads have found, without waiting for MPS."""
        return {
            name: reason for name, device in self._devices.items() if (reason := device.lost())
        } | self._watch.lost()

    def _device(self, lane: LaneId) -> _Device:
        try:
            return self._devices[lane.device]
        except KeyError:
            raise DeviceError(f"{lane!r} is on no device of {', '.join(self._devices)}") from None

    def _cuts(self, gpu: Gpu) -> tuple[int, ...]:
        if self._static:
            chunks = _chunks(gpu)
            return tuple(round(WHOLE * count / chunks) for count in range(1, chunks + 1))
        return tuple(share for share in range(CUT, WHOLE + 1, CUT) if not _too_small(gpu, share))


def _too_small(gpu: Gpu, share: int) -> bool:
    """Return whether a share is less than one SM; never, if the driver does not report SMs."""
    return 0 < share * gpu.multiprocessors < WHOLE


def _chunks(gpu: Gpu) -> int:
    """Return the number of chunks into which MPS divides a GPU: of 8 SMs from Hopper on, of 4 before."""
    return max(gpu.multiprocessors // (8 if float(gpu.capability) >= 9 else 4), 1)


class _Device:
    """Hold a GPU and its daemon, watched by a thread. workers: process ids by lane; 0: not started yet."""

    def __init__(self, name: DeviceId, gpu: Gpu, daemon: MpsDaemon) -> None:
        self.name = name
        self.gpu = gpu
        self.daemon = daemon
        self.workers: dict[LaneId, int] = {}
        self._reason = ""  # why nothing can run on it now
        self._told = False  # reported to the caller of `lost`
        self._carved: dict[LaneId, StaticPartition] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"cotenant-mps-{name}", daemon=True)

    def start(self) -> None:
        self.daemon.start()
        self._thread.start()

    def stop(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.daemon.stop()

    def lost(self) -> str:
        """Return why nothing can run on the device now; empty if it can."""
        self._told = bool(self._reason)
        return self._reason

    def carve(self, lane: LaneId, chunks: int, leaving: Collection[LaneId]) -> str:
        if (sibling := sibling_of(lane, self._carved)) is not None:
            self._carved[lane] = self._carved[sibling]
            return self._carved[lane].id
        try:
            carved = self.daemon.carve(chunks)
        except DeviceError:
            staying = [part for other, part in self._carved.items() if other not in leaving]
            free = (part for part in self._carved.values() if part.chunks == chunks and part not in staying)
            if (inherited := next(free, None)) is None:
                raise
            carved = inherited
        self._carved[lane] = carved
        return carved.id

    def release(self, lane: LaneId) -> None:
        carved = self._carved.pop(lane, None)
        if carved is not None and carved not in self._carved.values():
            self.daemon.uncarve(carved)

    def _watch(self) -> None:
        """Restart the server after a fatal error, once all its clients are gone, as it accepts no new ones before.

        Not before the error was reported, or a worker would be restarted and find no server.
        """
        while not self._closed.wait(LOOK):
            if not self._reason:
                self._reason = self.daemon.health_error(self.workers)
            elif self._told and not any(is_alive(pid) for pid in list(self.workers.values()) if pid):
                self._restart()

    def _restart(self) -> None:
        logger.warning("MPS is started again on %s: %s", self.name, self._reason)
        self.daemon.stop()
        try:
            self.daemon.start()
        except DeviceError as error:
            self._reason = str(error)
            self._closed.wait(AGAIN)
        else:
            self._carved.clear()
            self._reason, self._told = "", False


def _stop(devices: dict[DeviceId, _Device], watch: nvidia.DeviceWatch, home: DaemonFolder) -> None:
    watch.close()
    for device in devices.values():  # one after the other: while a process exits it cannot start threads
        device.stop()
    home.remove()
