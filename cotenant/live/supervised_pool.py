"""Workers without a plan: started and stopped by name, and supervised meanwhile. For profiling and measurements,
so shares are ceilings."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from cotenant.backends import Backend
from cotenant.control.events import LaneReady, LanesDown, LaneStopped, StartFailed, StartLane, StopLane
from cotenant.control.orchestrator import Command, Orchestrator
from cotenant.control.supervisor import LaneState, Supervisor, SupervisorOptions
from cotenant.core.identity import LaneId
from cotenant.errors import WorkerError
from cotenant.live.control_driver import ControlDriver, WorkerStatus
from cotenant.live.pool import BatchListener, LaneSetup, Payload
from cotenant.live.process import private_memory
from cotenant.worker.arena import Arena
from cotenant.worker.wire import WorkerModel


class Listener(BatchListener, Protocol):
    """Told from the event loop, never from within `SupervisedPool.run`."""

    def ready(self, lane: LaneId) -> None:
        """The lane's worker is up and warm: for the first time, or again."""
        ...

    def died(self, lane: LaneId, reason: str) -> None:
        """The lane's worker is gone, and what it ran is lost. `ready` follows, unless it dies again and again."""
        ...


class SupervisedPool:
    """warm_workers: processes that are kept ready for lanes that start, of each template that lanes have. All methods
    belong to the event loop."""

    def __init__(
        self,
        backend: Backend,
        arena: Arena,
        listener: Listener,
        *,
        options: SupervisorOptions | None = None,
        warm_workers: int = 0,
    ) -> None:
        orchestrator = Orchestrator(supervisor=Supervisor(options))  # to which no revision is given
        self._supervisor = orchestrator.supervisor
        self._listener = listener
        self._driver = ControlDriver(
            orchestrator, self._perform, backend.with_ceilings(), arena, listener, warm_workers=warm_workers
        )
        self._started: dict[LaneId, asyncio.Future[str]] = {}  # why it did not get ready; empty where it did
        self._stopped: dict[LaneId, asyncio.Future[None]] = {}
        self._closed = False

    async def start(
        self, lane: LaneId, share: int, models: Sequence[WorkerModel], *, leaving: Collection[LaneId] = ()
    ) -> None:
        """leaving: lanes that stop once this one has taken over. Raises WorkerError, with the reason, where the worker
        does not become ready; nothing is left of it then."""
        if self._closed:
            raise WorkerError(f"the worker of {lane} did not start: the server stops")
        if self._supervisor.state(lane) is not None:
            raise WorkerError(f"lane '{lane}' has a worker already; stop it first")
        self._driver.watch()
        self._driver.setups[lane] = LaneSetup(share, tuple(models))
        started = self._started[lane] = asyncio.get_running_loop().create_future()
        self._driver.feed(StartLane(lane, lane.device, tuple(leaving)))
        try:
            reason = await started
        except asyncio.CancelledError:
            await asyncio.shield(self.stop(lane, grace=0.0))
            raise
        if reason:
            raise WorkerError(f"the worker of {lane} did not start: {reason}")

    async def stop(self, lane: LaneId, grace: float) -> None:
        """Let a lane finish its batch, within `grace` seconds. Harmless where there is no such lane."""
        if self._supervisor.state(lane) is None:
            return
        stopped = self._stopped.setdefault(lane, asyncio.get_running_loop().create_future())
        self._driver.feed(StopLane(lane, grace))
        await asyncio.shield(stopped)

    async def close(self, grace: float) -> None:
        """Stop all lanes; none starts any more."""
        self._closed = True
        await asyncio.gather(*(self.stop(lane, grace) for lane in self._supervisor.lanes()))
        await self._driver.close()

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        """Give a lane its next batch: the input tensors of each request. It holds none, and its worker is ready."""
        state = self._supervisor.state(lane)
        if state not in (LaneState.READY, None):
            raise WorkerError(f"lane '{lane}' cannot take batch {batch}: its worker is {state}")
        self._driver.pool.run(lane, batch, model, payloads)

    def poll(self) -> None:
        """Take what workers have answered by now."""
        self._driver.pool.poll()

    def shares_process(self, lane: LaneId) -> bool:
        """Whether the lane's process may serve others, too."""
        return self._driver.pool.shares_process(lane)

    @property
    def ahead(self) -> int:
        """How many processes wait for lanes to start."""
        return self._driver.pool.ahead

    def status(self) -> list[WorkerStatus]:
        """The memory of workers is read here and now: nobody is served meanwhile."""
        return [
            worker if worker.pid is None else msgspec.structs.replace(worker, memory=private_memory(worker.pid))
            for worker in self._driver.status()
        ]

    def _perform(self, command: Command) -> None:
        match command:
            case LaneReady(lane):
                self._settle(lane, "")
                self._listener.ready(lane)
            case LanesDown(lanes, reason, expected):
                unfinished = self._driver.pool.unfinished
                for lane in lanes:
                    if not expected or lane in unfinished:
                        unfinished.discard(lane)
                        self._listener.died(lane, reason)
            case StartFailed(lane, reason):
                self._settle(lane, reason)
            case LaneStopped(lane):
                self._settle(lane, "it was stopped while it loaded its models")
                if (stopped := self._stopped.pop(lane, None)) is not None:
                    stopped.set_result(None)

    def _settle(self, lane: LaneId, reason: str) -> None:
        started = self._started.pop(lane, None)
        if started is not None and not started.done():
            started.set_result(reason)
