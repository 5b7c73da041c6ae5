"""Turn partitions into reality: give one worker process a share of a device. No backend knows models or requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Describe what a worker process of one partition is started with.

    env: added to the environment before CUDA is called for the first time. cores: the only cores it may run on; empty:
    any. threads: for one batch. cpu_limit: processor seconds per second that the worker holds itself to, by ending each
    batch no earlier than its processor time allows; None where something else holds it. lend: that is a floor, to which
    it keeps only while others need its cores. lent_by_kernel: it never holds itself, and has its limit only to tell
    what it was lent. budget: processor seconds per second that its share allows, whoever holds it, for the audit; None
    where a share is not of processor time. fake: it sleeps for the profiled time, and runs nothing. cuda: batches run
    on the first CUDA device that its environment shows. process: lanes of the same process share one worker, and in it
    one copy of each model's weights; "": a worker of its own. groups: the device's groups of multiprocessors that
    batches run on; empty: all.
    """

    env: dict[str, str] = {}
    cores: tuple[int, ...] = ()
    threads: int = 1
    cpu_limit: float | None = None
    lend: bool = False
    lent_by_kernel: bool = False
    budget: float | None = None
    fake: bool = False
    cuda: bool = False
    process: str = ""
    groups: tuple[int, ...] = ()


def sibling_of(lane: LaneId, others: Iterable[LaneId]) -> LaneId | None:
    """Return the lane of another worker of the same partition, the first of these; None where there is none."""
    for other in others:
        if other != lane and (other.device, other.slot) == (lane.device, lane.slot):
            return other
    return None


class Backend(Protocol):
    name: str

    @property
    def divides(self) -> bool:
        """Return whether several workers of a partition divide its share among them, so that each is opened with its
        part; otherwise each is opened with the whole share, in the same partition."""
        ...

    def fleet(self) -> tuple[Kind, ...]:
        """Return the devices of this machine."""
        ...

    def isolation(self) -> str:
        """Return what isolates partitions, in a few words for people."""
        ...

    def capacity_fingerprint(self) -> str:
        """Return a text that changes when the capacity of one device does."""
        ...

    def hardware_ids(self) -> tuple[str, ...]:
        """Return what names the devices that this backend has to itself among those of all machines, such as the UUIDs
        of GPUs; () for devices that others may use too."""
        ...

    def with_ceilings(self) -> Backend:
        """Return this backend with shares that are ceilings, which is what profiles are measured on; itself where
        they are."""
        ...

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        """Open a partition of that share (‰) for a worker that is about to start. It may reuse the place of lanes that
        are `leaving`: they close once this one has taken over. Raises DeviceError, ConfigError.

        Like `on_worker_started` and `close` it may be slow, and none of these is called while another runs; the other
        methods are called meanwhile, from other threads.
        """
        ...

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        """Change the shares (‰) of partitions that are open, all at one moment, and return what their workers are to
        go by. Asked only for changes that `Kind.in_place` allows, or of batches alone. Quick, and called at any time,
        from the event loop."""
        ...

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        """Hear that the worker of that partition runs as this process. Raises DeviceError, ConfigError."""
        ...

    def close(self, lane: LaneId) -> None:
        """Close the partition that `open` opened. Harmless where there is none."""
        ...

    def open_job(self, device: DeviceId) -> Launch:
        """Return what a best-effort job on that device is started with: a place without a share of its own, whose work
        gives way to that of partitions. Quick, and called from the event loop. Raises DeviceError where a device has no
        such place."""
        ...

    def lost(self) -> dict[DeviceId, str]:
        """Return by device why nothing can run on it now. Called twice a second, so it has to be quick."""
        ...

    def stop(self) -> None:
        """Stop the backend's own processes once nothing is open: another backend may use the same devices."""
        ...
