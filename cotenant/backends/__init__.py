"""How a partition is made real: a share of a device for one worker process. No backend knows models or requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process of one partition is started with.

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
        """Whether several workers of a partition divide its share among them, so that each is opened with its part; or
        else each is opened with the whole of it, in the same partition."""
        ...

    def fleet(self) -> tuple[Kind, ...]:
        """The devices of this machine."""
        ...

    def isolation(self) -> str:
        """In a few words, for people: what holds a worker to its share."""
        ...

    def capacity_fingerprint(self) -> str:
        """In words that change when it does: what one device amounts to."""
        ...

    def with_ceilings(self) -> Backend:
        """Return this backend with shares that are ceilings, which is what profiles are measured on; itself where
        they are."""
        ...

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        """Set a partition of that share (‰) up, for a worker that is about to start. It may stand where lanes are that
        are `leaving`: they close once this one has taken over. Raises DeviceError, ConfigError.

        Like `attach` and `close` it may take its time, and none of them is called while another is under way; but the
        other methods are, from other threads."""
        ...

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        """The worker of that partition runs as this process. Raises DeviceError, ConfigError."""
        ...

    def close(self, lane: LaneId) -> None:
        """Take down what `open` set up. Harmless where there is nothing."""
        ...

    def lost(self) -> dict[DeviceId, str]:
        """By name of the device, why nothing can run on it now. Asked twice a second, so it has to be quick."""
        ...

    def stop(self) -> None:
        """End what it runs for itself, once nothing is open: the next one may want the same devices."""
        ...
