"""Drive an orchestrator on the event loop: carry out its commands, and report the results to it.

It decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from cotenant.backends import Backend
from cotenant.control.events import (
    Assign,
    ClosePartition,
    DeviceRestored,
    DevicesLost,
    KillWorker,
    LaneFailed,
    LanesDown,
    LaneStopped,
    PromoteWorker,
    RetireWorker,
    SpawnWorker,
    StartFailed,
    Unassignable,
    WakeAt,
    Woke,
    WorkersExited,
)
from cotenant.control.orchestrator import Command, Event, Orchestrator
from cotenant.control.supervised_lane import LaneState, SupervisedLane
from cotenant.core.identity import LaneId
from cotenant.live.batch_listener import BatchListener
from cotenant.live.event_pump import EventPump
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.nodes.cluster import Cluster
from cotenant.live.nodes.router import PoolRouter
from cotenant.live.pool import Pool
from cotenant.live.transport import WorkerTransport
from cotenant.worker.arena import Arena

logger = logging.getLogger(__name__)

TICK = 0.5  # seconds between two checks of all workers and devices


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the state of a lane's worker.

    state: starting, ready, stalled (requests of its batch have expired), restarting, lost (its device is), or failed
    (permanently). pid: None for a worker on a node.
    share: ‰ that it should keep to; used_share: ‰ that it used of late, None where that is not known. over_share: it
    used more than its share. restarts: starts after the first, and standby workers that took over; promotions: these
    alone. reason: of its last death. standby: "loading" or "ready"; "" where there is none. memory: bytes that are its
    process's own, which may be that of other lanes, too; where it has a `pid`, only in a `Status`, since to know them
    takes reading /proc.
    """

    lane: LaneId
    state: str
    share: int
    pid: int | None
    used_share: float | None
    over_share: bool
    restarts: int
    models: tuple[str, ...]
    reason: str
    standby: str = ""
    promotions: int = 0
    memory: int = 0


class ControlDriver:
    """Carry out the orchestrator's commands, and report events to it.

    perform: receives the commands that are not for the transport, about lanes and rollouts. setups: what each lane is
    started with, set before it starts.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        perform: Callable[[Command], None],
        backend: Backend,
        arena: Arena,
        batches: BatchListener,
        *,
        warm_workers: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        local = backend.local if isinstance(backend, Cluster) else backend
        self.pool = self.make_pool(local, arena, batches, warm_workers)  # of this machine
        self.transport: WorkerTransport = self.pool
        if isinstance(backend, Cluster):
            if not backend.ceilings:  # else it serves nobody
                backend.nodes.receive_into(arena)
            self.transport = PoolRouter(self.pool, backend.nodes, self.feed, batches, ceilings=backend.ceilings)
        self.setups: dict[LaneId, LaneSetup] = {}
        # Whether a stopped lane may start again, as one that made room for a rollout.
        self.keeps: Callable[[LaneId], bool] = lambda lane: False
        self.predicted: Callable[[LaneId], float] = lambda lane: 0.0  # seconds of the batch that the lane runs
        self._clock = clock
        # The clock is looked up when it is read: tests in virtual time set another one.
        self._pump = EventPump(orchestrator.handle, self._perform, self._failed, lambda: self._clock())
        self._supervisor = orchestrator.supervisor
        self._perform_other = perform
        self._backend = backend
        self._timer: asyncio.TimerHandle | None = None
        self._wakes: set[asyncio.TimerHandle] = set()

    def make_pool(self, backend: Backend, arena: Arena, batches: BatchListener, warm_workers: int) -> Pool:
        """Create the pool of this machine; tests in virtual time override this."""
        return Pool(backend, arena, self.feed, batches, warm_workers=warm_workers)

    def feed(self, event: Event) -> None:
        """Give the orchestrator an event, and carry out its commands; see `EventPump`."""
        self._pump.feed(event)

    def _failed(self, command: Command, error: Exception) -> None:
        """Tell the machine of a command that failed, where it waits for what would have come of it."""
        reason = f"{type(error).__name__}: {error}"
        match command:
            case SpawnWorker(lane, incarnation):
                self.feed(WorkersExited(((lane, incarnation),), reason))
            case Assign(revision):
                self.feed(Unassignable(revision.number, reason))

    def watch(self) -> None:
        """Check all workers and devices periodically from now on."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    async def close(self) -> None:
        """End what is left once all lanes have stopped."""
        for timer in (self._timer, *self._wakes):
            if timer is not None:
                timer.cancel()
        await self.transport.close()

    def status(self) -> list[WorkerStatus]:
        """Return the status of all lanes that are not stopping."""
        return [
            self._status(lane) for lane in self._supervisor.lanes().values() if lane.state is not LaneState.STOPPING
        ]

    def _status(self, supervised: SupervisedLane) -> WorkerStatus:
        lane = supervised.lane
        setup, ready = self.setups[lane], supervised.state is LaneState.READY
        audit = self.transport.audit(lane) if ready else None  # otherwise it is of a worker that is gone
        pid = self.transport.pid(lane) if ready else None
        return WorkerStatus(
            lane=lane,
            state=supervised.state.value,
            share=setup.share,
            pid=pid,
            used_share=audit.used_share if audit else None,
            over_share=audit.over_share if audit else False,
            restarts=supervised.restarts,
            models=tuple(model.name for model in setup.models),
            reason=supervised.reason,
            standby=supervised.standby,
            promotions=supervised.promotions,
            memory=self.transport.memory(lane) if ready else 0,
        )

    def _perform(self, command: Command, now: float) -> None:
        match command:
            case SpawnWorker(lane, incarnation, fresh, leaving, standby):
                self.transport.spawn(
                    lane, incarnation, self.setups[lane], fresh=fresh, leaving=leaving, standby=standby
                )
            case PromoteWorker(lane, incarnation):
                logger.info("the standby worker of %s takes over", lane)
                self.transport.promote(lane, incarnation)
            case KillWorker(lane, incarnation, reason, abandon):
                self.transport.kill(lane, incarnation, reason, abandon=abandon)
            case RetireWorker(lane, incarnation, grace):
                self.transport.retire(lane, incarnation, grace)
            case ClosePartition(lane, incarnation):
                self.transport.close_partition(lane, incarnation)
            case WakeAt(lane, due):
                self._wake(Woke(lane, due), due - now)
            case _:
                self._log(command)
                self._perform_other(command)
                if isinstance(command, StartFailed | LaneStopped) and not self.keeps(command.lane):
                    self.setups.pop(command.lane, None)

    def _wake(self, woke: Woke, delay: float) -> None:
        def due() -> None:
            self._wakes.discard(timer)
            self.feed(woke)

        timer = asyncio.get_running_loop().call_later(max(delay, 0.0), due)
        self._wakes.add(timer)

    def _log(self, command: Command) -> None:
        match command:
            case LanesDown(lanes, reason, False):
                for lane in lanes:
                    logger.warning("the worker of %s died: %s", lane, reason)
            case LaneFailed(lane, reason, deaths):
                logger.error("%s permanently failed: its worker died %d times in a row: %s", lane, deaths, reason)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
        self._look_at_devices()
        for busy in self.transport.busy():
            self.feed(msgspec.structs.replace(busy, predicted=self.predicted(busy.lane)))
        self.transport.sample()
        states = {lane.state for lane in self._supervisor.lanes().values()}
        if not states & {LaneState.STARTING, LaneState.RESTARTING}:
            self.transport.keep_warm()

    def _look_at_devices(self) -> None:
        known = self._supervisor.lost
        lost = self._backend.lost()
        fresh = {device: f"{device} is lost: {reason}" for device, reason in lost.items() if device not in known}
        for reason in fresh.values():
            logger.error("%s", reason)
        if fresh:
            self.feed(DevicesLost({**fresh}))
        for device in known.keys() - lost.keys():
            logger.warning("%s is back", device)
            self.feed(DeviceRestored(device))
