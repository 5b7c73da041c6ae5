"""Send each command to where its lane's device is: to the pool of this machine, or to that of a node."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from cotenant.control.events import SupervisorEvent, WorkerBusy
from cotenant.core.identity import LaneId
from cotenant.errors import WorkerError
from cotenant.live.batch_listener import BatchListener, Payload
from cotenant.live.confinement import Confinement
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.nodes.registry import Nodes
from cotenant.live.nodes.remote_pool import RemotePool
from cotenant.live.pool import Pool
from cotenant.live.transport import AuditReading, WorkerTransport


class PoolRouter:
    """Be one pool of several: one for this machine, and one for each node, opened when it is first needed."""

    def __init__(
        self,
        local: Pool,
        nodes: Nodes,
        tell: Callable[[SupervisorEvent], None],
        batches: BatchListener,
        *,
        ceilings: bool,
    ) -> None:
        self._local = local
        self.unfinished = local.unfinished  # one set, of all
        self._nodes = nodes
        self._tell = tell
        self._batches = batches
        self._ceilings = ceilings
        self._remote: dict[str, RemotePool] = {}

    def _of(self, lane: LaneId) -> WorkerTransport:
        """Return the pool of a lane. Raises WorkerError where there is no such node any more."""
        name = lane.device.node
        if not name:
            return self._local
        pool = self._remote.get(name)
        node = self._nodes.get(name)
        if pool is None or (node is not None and not pool.is_of(node)):
            if node is None:
                raise WorkerError(f"{lane}: there is no node {name!r} any more")
            pool = self._remote[name] = RemotePool(node, self._tell, self._batches, ceilings=self._ceilings)
            pool.unfinished = self.unfinished
        return pool

    def _all(self) -> list[WorkerTransport]:
        return [self._local, *self._remote.values()]

    def confine(self, confinement: Confinement) -> None:
        self._local.confine(confinement)

    def spawn(
        self,
        lane: LaneId,
        incarnation: int,
        setup: LaneSetup,
        *,
        fresh: bool,
        leaving: Collection[LaneId] = (),
        standby: bool = False,
    ) -> None:
        self._of(lane).spawn(lane, incarnation, setup, fresh=fresh, leaving=leaving, standby=standby)

    def promote(self, lane: LaneId, incarnation: int) -> None:
        self._of(lane).promote(lane, incarnation)

    def kill(self, lane: LaneId, incarnation: int, reason: str, *, abandon: bool = False) -> None:
        self._of(lane).kill(lane, incarnation, reason, abandon=abandon)

    def retire(self, lane: LaneId, incarnation: int, grace: float) -> None:
        self._of(lane).retire(lane, incarnation, grace)

    def resize(self, setups: Mapping[LaneId, LaneSetup]) -> None:
        parts: defaultdict[str, dict[LaneId, LaneSetup]] = defaultdict(dict)
        for lane, setup in setups.items():
            parts[lane.device.node][lane] = setup
        for part in parts.values():
            self._of(next(iter(part))).resize(part)

    def close_partition(self, lane: LaneId, incarnation: int) -> None:
        self._of(lane).close_partition(lane, incarnation)

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        self._of(lane).run(lane, batch, model, payloads)

    def poll(self) -> None:
        self._local.poll()

    def busy(self) -> Iterator[WorkerBusy]:
        for pool in self._all():
            yield from pool.busy()

    def sample(self) -> None:
        self._local.sample()

    def keep_warm(self) -> None:
        self._local.keep_warm()

    @property
    def warm_workers(self) -> int:
        return sum(pool.warm_workers for pool in self._all())

    def pid(self, lane: LaneId) -> int | None:
        return self._of(lane).pid(lane)

    def memory(self, lane: LaneId) -> int:
        return self._of(lane).memory(lane)

    def audit(self, lane: LaneId) -> AuditReading | None:
        return self._of(lane).audit(lane)

    def shares_process(self, lane: LaneId) -> bool:
        return self._of(lane).shares_process(lane)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._all()))
