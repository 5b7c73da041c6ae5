"""Partition a GPU's SMs by CUDA green contexts: one process per device serves all of its lanes.

A device is split once into groups of equal size (`worker.green`); a partition is any set of groups. A share can change
while a model is served: another lane of the same process gets other groups, and the weights are there already. Kernels
of a partition stay within its groups. Memory, its bandwidth, caches and faults are shared by all lanes of a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from cotenant.backends import Launch, sibling_of
from cotenant.backends.nvidia import (
    DeviceWatch,
    Gpu,
    available_sharing_modes,
    capacity_fingerprint,
    device_kinds,
    gpus_by_device,
)
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE, show_share
from cotenant.errors import DeviceError

PATIENCE = 60.0  # seconds to open a device; usually one, unless the driver has to initialise it first

# Hardware queues, one per stream; streams that share one wait for each other.
_CONNECTIONS = "32"


class Green:
    """Partition these GPUs by green contexts."""

    name = "green"
    divides = False

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = tuple(gpus)
        self._devices = gpus_by_device(gpus)
        self._watch = DeviceWatch(self._devices)
        self._splits: dict[str, tuple[int, ...]] = {}  # by UUID: multiprocessors of each group
        self._open: dict[LaneId, tuple[DeviceId, tuple[int, ...]]] = {}  # lane → its device and groups

    def fleet(self) -> tuple[Kind, ...]:
        return device_kinds(self._gpus, lambda gpu: legal_shares(self._sizes(gpu)))

    def capacity_fingerprint(self) -> str:
        groups = sorted({self._sizes(gpu)[0] for gpu in self._gpus})
        return f"{capacity_fingerprint(self._gpus)}; groups of {' or '.join(map(str, groups))}"

    def isolation(self) -> str:
        return "CUDA green contexts: kernels of a partition run on its own SMs; memory and its bandwidth are shared"

    def hardware_ids(self) -> tuple[str, ...]:
        return tuple([gpu.uuid for gpu in self._gpus])

    def with_ceilings(self) -> Green:
        return self

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        """Assign the groups of the partition's other worker, or else those with the fewest lanes, leaving lanes last
        counted. Raises DeviceError for an unknown device, or a share of less than one group."""
        device = lane.device
        if device not in self._devices:
            raise DeviceError(f"lane {lane!r}: no device {device!r}; available: {', '.join(self._devices)}")
        gpu = self._devices[device]
        sizes = self._sizes(gpu)
        sibling = sibling_of(lane, self._open)
        groups = (
            self._choose(device, sizes, groups_in(sizes, share, lane), leaving)
            if sibling is None
            else self._open[sibling][1]
        )
        self._open[lane] = device, groups
        return Launch(
            env={"CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_DEVICE_MAX_CONNECTIONS": _CONNECTIONS},
            cuda=True,
            process=str(device),
            groups=groups,
        )

    def stop(self) -> None:
        """Stop watching the devices."""
        self._watch.close()

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        raise DeviceError(f"{self.name}: a share needs a worker of its own: {', '.join(shares)}")

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        pass

    def close(self, lane: LaneId) -> None:
        self._open.pop(lane, None)

    def open_job(self, device: DeviceId) -> Launch:
        """Let a job choose groups at each step, by the share that it has then, in a process of its own."""
        if device not in self._devices:
            raise DeviceError(f"no device {device!r}; available: {', '.join(self._devices)}")
        env = {"CUDA_VISIBLE_DEVICES": self._devices[device].uuid, "CUDA_DEVICE_MAX_CONNECTIONS": _CONNECTIONS}
        return Launch(env=env, cuda=True, process=str(device))

    def lost(self) -> dict[DeviceId, str]:
        return self._watch.lost()

    def _choose(
        self, device: DeviceId, sizes: Sequence[int], count: int, leaving: Collection[LaneId]
    ) -> tuple[int, ...]:
        if count == len(sizes):
            return tuple(range(count))
        held: Counter[tuple[int, bool]] = Counter()
        for lane, (on, groups) in self._open.items():
            if on == device:
                held.update((group, lane in leaving) for group in groups)
        order = sorted(range(_equal(sizes)), key=lambda group: (held[group, False], held[group, True], group))
        return tuple(sorted(order[:count]))

    def _sizes(self, gpu: Gpu) -> tuple[int, ...]:
        """Return the SMs of each group of a GPU."""
        if gpu.uuid not in self._splits:
            self._splits[gpu.uuid] = _split(gpu)
        return self._splits[gpu.uuid]


def _split(gpu: Gpu) -> tuple[int, ...]:
    """Return the SMs of each group as the driver splits a GPU. Raises DeviceError."""
    if reason := available_sharing_modes(gpu)["green"]:
        raise DeviceError(f"{gpu.name} {gpu.uuid}: {reason}")
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "cotenant.worker.green"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{gpu.name} {gpu.uuid}: its driver did not open it within {PATIENCE:g} s") from None
    if asked.returncode:
        raise DeviceError(f"{gpu.name} {gpu.uuid}: {' '.join(asked.stderr.split()) or 'its driver failed'}")
    return tuple(json.loads(asked.stdout))


def legal_shares(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the legal shares (‰) of a device with groups of these sizes: any number of groups, rounded down, and the
    whole.

    The whole includes the remainder, which is no partition of its own. If that is large, shares are rounded up, so that
    shares that add up to a whole device always find disjoint groups.
    """
    groups = _equal(sizes)
    shares = {
        max(sum(sizes[:count]) * WHOLE // sum(sizes), count * WHOLE // (groups + 1) + 1)
        for count in range(1, groups + 1)
    }
    return tuple(sorted(shares | {WHOLE}))


def groups_in(sizes: Sequence[int], share: int, lane: LaneId) -> int:
    """Return the number of groups that fit into a share (‰). Raises DeviceError if none does."""
    if share == WHOLE:
        return len(sizes)
    count = sum(cut <= share for cut in legal_shares(sizes) if cut < WHOLE)
    if not count:
        least = legal_shares(sizes)[0]
        raise DeviceError(
            f"{lane}: a share of {show_share(share)} is less than one group, which is {show_share(least)}"
        )
    return count


def _equal(sizes: Sequence[int]) -> int:
    """Return the number of groups of equal size, without the remainder."""
    return sum(size == sizes[0] for size in sizes)
