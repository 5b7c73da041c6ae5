"""Define what drivers see of workers, wherever these are: on this machine (`live.pool`) or on nodes (`live.nodes`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from cotenant.control.events import WorkerBusy
from cotenant.core.identity import LaneId
from cotenant.core.tensor import Tensor
from cotenant.live.confinement import Confinement
from cotenant.live.lane_workers import LaneSetup


class AuditReading(Protocol):
    """Tell what a lane's worker uses of a processor, as a `ShareAudit` does."""

    @property
    def used_share(self) -> float | None: ...

    @property
    def over_share(self) -> bool: ...


class WorkerTransport(Protocol):
    """Start, stop and talk to the workers of lanes, as `live.pool.Pool` describes it. unfinished: lanes whose last
    worker ended with a batch under way."""

    unfinished: set[LaneId]

    def confine(self, confinement: Confinement) -> None:
        """Confine processes that start from now on."""
        ...

    def spawn(
        self,
        lane: LaneId,
        incarnation: int,
        setup: LaneSetup,
        *,
        fresh: bool,
        leaving: Collection[LaneId] = (),
        standby: bool = False,
    ) -> None: ...

    def promote(self, lane: LaneId, incarnation: int) -> None: ...

    def kill(self, lane: LaneId, incarnation: int, reason: str, *, abandon: bool = False) -> None: ...

    def retire(self, lane: LaneId, incarnation: int, grace: float) -> None: ...

    def resize(self, setups: Mapping[LaneId, LaneSetup]) -> None: ...

    def close_partition(self, lane: LaneId, incarnation: int) -> None: ...

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[tuple[Tensor, ...]]) -> None: ...

    def poll(self) -> None: ...

    def busy(self) -> Iterator[WorkerBusy]: ...

    def sample(self) -> None: ...

    def keep_warm(self) -> None: ...

    @property
    def warm_workers(self) -> int: ...

    def pid(self, lane: LaneId) -> int | None:
        """Return the process of a lane's worker, where it is one of this machine."""
        ...

    def memory(self, lane: LaneId) -> int:
        """Return the bytes that a lane's worker has of its own, as far as that is known without a look at it."""
        ...

    def audit(self, lane: LaneId) -> AuditReading | None: ...

    def shares_process(self, lane: LaneId) -> bool: ...

    async def close(self) -> None: ...
