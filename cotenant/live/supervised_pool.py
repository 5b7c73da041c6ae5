"""Start and stop workers by name, without a plan, and supervise them.

For profiling and measurements, so shares are ceilings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from cotenant.backends import Backend
from cotenant.control.events import LaneReady, LanesDown, LaneStopped, StartFailed, StartLane, StopLane
from cotenant.control.orchestrator import Command, Orchestrator
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor import Supervisor
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import LaneId
from cotenant.errors import WorkerError
from cotenant.live.batch_listener import BatchListener, Payload
from cotenant.live.confinement import Confinement
from cotenant.live.control_driver import ControlDriver, WorkerStatus
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.process import private_memory
from cotenant.worker.arena import Arena
from cotenant.worker.wire import WorkerModel


class Listener(BatchListener, Protocol):
    """Hear of lanes, from the event loop and never from within `SupervisedPool.run`."""

    def ready(self, lane: LaneId) -> None:
        """Hear that a lane's worker is ready, for the first time or after a restart."""
        ...

    def died(self, lane: LaneId, reason: str) -> None:
        """Hear that a lane's worker died, and its batch is lost. `ready` follows, unless the lane permanently fails."""
        ...


class SupervisedPool:
    """Run and supervise workers. warm_workers: pre-started processes per worker template. All methods belong to the
    event loop."""

    def __init__(
        self,
        backend: Backend,
        arena: Arena,
        listener: Listener,
        *,
        options: SupervisorOptions | None = None,
        warm_workers: int = 0,
        confinement: Confinement | None = None,
    ) -> None:
        orchestrator = Orchestrator(supervisor=Supervisor(options))  # lanes outside of any plan revision
        self._supervisor = orchestrator.supervisor
        self._listener = listener
        self._driver = ControlDriver(
            orchestrator, self._perform, backend.with_ceilings(), arena, listener, warm_workers=warm_workers
        )
        self._driver.transport.confine(confinement or Confinement())
        self._started: dict[LaneId, asyncio.Future[str]] = {}  # why it is not ready; empty where it is
        self._stopped: dict[LaneId, asyncio.Future[None]] = {}
        self._closed = False

    async def start(
        self, lane: LaneId, share: int, models: Sequence[WorkerModel], *, leaving: Collection[LaneId] = ()
    ) -> None:
        """Start a lane and wait until its worker is ready. leaving: lanes that stop once this one has taken over.
        Raises WorkerError, with the reason and with nothing left behind."""
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
        """Give a lane its next batch: the input tensors of each request. The lane must be idle and its worker ready."""
        state = self._supervisor.state(lane)
        if state not in (LaneState.READY, None):
            raise WorkerError(f"lane '{lane}' cannot take batch {batch}: its worker is {state}")
        self._driver.transport.run(lane, batch, model, payloads)

    def poll(self) -> None:
        """Receive the answers that have arrived."""
        self._driver.transport.poll()

    def shares_process(self, lane: LaneId) -> bool:
        """Return whether the lane's process may serve other lanes."""
        return self._driver.transport.shares_process(lane)

    @property
    def warm_workers(self) -> int:
        """Return the number of pre-started processes."""
        return self._driver.transport.warm_workers

    def status(self) -> list[WorkerStatus]:
        """Return the status of workers. It reads their memory on the event loop: nobody is served meanwhile."""
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
                unfinished = self._driver.transport.unfinished
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
