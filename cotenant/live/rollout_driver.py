"""Drive rollouts on the event loop: name the lanes of a revision, tell the dispatcher, answer the caller.

It decides nothing: that is the orchestrator's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from cotenant.backends import Backend
from cotenant.control.events import (
    Aborted,
    Assign,
    Assigned,
    Dispatch,
    LaneStopped,
    Requested,
    ResizeLanes,
    ReviveLane,
    RolloutEnded,
    Shutdown,
    StartFailed,
    Switch,
    Switched,
    Unassignable,
)
from cotenant.control.orchestrator import Command, Orchestrator
from cotenant.control.revision import PlannedLane, PlanRevision, RolloutOutcome, memory_capacity, planned_lane
from cotenant.control.rollout import RolloutStatus
from cotenant.control.supervised_lane import LaneState
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.profile import Profile
from cotenant.errors import CotenantError, RolloutError, WorkerError
from cotenant.live.confinement import Confinement
from cotenant.live.control_driver import ControlDriver, WorkerStatus
from cotenant.live.deployment import Deployment, applications_of, with_profile, worker_models
from cotenant.live.driver import Driver, Tensors
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.nodes.cluster import divides
from cotenant.live.rollout_statistics import Past, RolloutStatistics
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.runtime.events import Drained
from cotenant.runtime.lane_assignment import LaneAssignment, LaneMatcher
from cotenant.runtime.lane_specs import lane_specs, workers_per_partition
from cotenant.worker.arena import Arena

logger = logging.getLogger(__name__)


REVIVE_INTERVAL = 0.02  # seconds between two looks at a lane that is revived


class RolloutDriver:
    """Put deployments into force. All methods belong to the event loop."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        state: ServingState,
        driver: Driver,
        observer: ServingObserver,
        backend: Backend,
        arena: Arena,
        *,
        warm_workers: int = 0,
        confinement: Confinement | None = None,
        control: type[ControlDriver] = ControlDriver,
    ) -> None:
        """control: drives the orchestrator; tests in virtual time have another."""
        self.statistics = RolloutStatistics()
        self.on_ended: Callable[[Past], None] = lambda past: None
        self.orchestrator = orchestrator
        self.supervisor = orchestrator.supervisor
        self._state = state
        self._driver = driver
        self._observer = observer
        self._backend = backend
        self._control = control(orchestrator, self._perform, backend, arena, driver, warm_workers=warm_workers)
        self._control.transport.confine(confinement or Confinement())
        self._control.keeps = self._may_start_again
        self._control.predicted = driver.predicted
        self._matcher = LaneMatcher()
        self._revisions = itertools.count(1)
        self._deployments: dict[int, Deployment] = {}  # revisions in force, in progress, or queued
        self._assigned = 0  # the revision whose lanes were requested last
        self._wanted: dict[LaneId, LaneAssignment] = {}  # its lanes until its rollout ends; those in force afterwards
        self._callers: dict[int, asyncio.Future[RolloutEnded | None]] = {}  # None: in force
        self._idle = asyncio.Event()  # no rollout is in progress
        self._idle.set()
        self._empty = asyncio.Event()  # all lanes have stopped

    # Revisions

    @property
    def desired(self) -> tuple[int | None, Deployment]:
        """Return the deployment that is wanted, as it was requested, and the number of its revision; None before the
        first."""
        revision = self.orchestrator.rollout.desired
        return (None, self._state.deployment) if revision is None else (revision.number, self._of(revision))

    def status(self) -> RolloutStatus:
        """Return the desired, requested and observed state of the rollout."""
        return self.orchestrator.rollout.status()

    async def idle(self) -> None:
        """Wait until no rollout is in progress."""
        await self._idle.wait()

    async def apply(self, deployment: Deployment, reason: str, *, base: int | None = None) -> None:
        """Request a deployment, and wait until it is in force; old lanes drain afterwards. base: see `PlanRevision`.

        Raises WorkerError where a new worker does not become ready, and RolloutError where it does not come into force
        for another reason; the previous deployment stays in force.
        """
        number = next(self._revisions)
        caller = self._callers[number] = asyncio.get_running_loop().create_future()
        self._request(number, deployment, reason, base)
        try:
            ended = await caller
        except asyncio.CancelledError:
            self._control.feed(Aborted(number, "whoever asked for it does not wait for it any more"))
            raise
        if ended is not None and ended.outcome is RolloutOutcome.ROLLED_BACK:
            raise WorkerError(ended.reason)
        if ended is not None and ended.outcome is not RolloutOutcome.COMPLETED:
            raise RolloutError(f"revision {number} ({reason}) was {ended.outcome}: {ended.reason}", ended.outcome)

    def request(self, deployment: Deployment, reason: str, *, base: int | None = None) -> int:
        """Request a deployment as `apply` does, and return the number of its revision; `on_ended` tells of its end,
        perhaps before this returns."""
        number = next(self._revisions)
        self._request(number, deployment, reason, base)
        return number

    def _request(self, number: int, deployment: Deployment, reason: str, base: int | None) -> None:
        self._control.watch()
        self._deployments[number] = deployment
        self.statistics.requested(number, self._observer.late)
        self._idle.clear()
        self._control.feed(
            Requested(
                PlanRevision(number=number, plan=deployment.plan, problem=deployment.problem, reason=reason, base=base)
            )
        )

    async def shutdown(self, grace: float) -> None:
        """Stop all lanes, each within `grace` seconds; none starts any more."""
        self._empty.clear()  # since then, the last model may have been unloaded and another loaded
        self._control.feed(Shutdown("the server stops", grace))
        if self.supervisor.lanes():
            await self._empty.wait()
        await self._control.close()

    def drained(self, lane: LaneId) -> None:
        """Hear from the dispatcher that a lane is drained."""
        self._control.feed(Drained(lane))

    @property
    def is_idle(self) -> bool:
        """Return whether no rollout is in progress."""
        return self._idle.is_set()

    def replace_profile(self, profile: Profile) -> None:
        """Let plans to come count with another profile of a model. Those that there are stay as they are."""
        for number, deployment in self._deployments.items():
            self._deployments[number] = replaced = with_profile(deployment, profile)
            if deployment is self._state.deployment:
                self._state.deploy(replaced)

    # Workers

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        """Give a lane its next batch."""
        self._control.transport.run(lane, batch, model, payloads)

    def poll(self) -> None:
        """Receive the answers that have arrived."""
        self._control.transport.poll()

    def workers(self) -> list[WorkerStatus]:
        """Return the state of every lane's worker."""
        return [
            msgspec.structs.replace(worker, state="stalled") if self._driver.stalled(worker.lane) else worker
            for worker in self._control.status()
        ]

    def is_ready(self, lane: LaneId) -> bool:
        """Return whether the lane is ready for a batch, or busy with one that may still be answered in time."""
        return self.supervisor.state(lane) is LaneState.READY and not self._driver.stalled(lane)

    async def revive(self, model: str) -> None:
        """Start the workers of a model's permanently failed lanes again, standby workers too. Raises WorkerError where
        a lane fails again, or has not started when one start would have timed out; it is tried further then."""
        lanes = list(self._state.lanes_of(model))
        failed = [lane for lane in lanes if self.supervisor.state(lane) is LaneState.FAILED]
        for lane in lanes:
            self._control.feed(ReviveLane(lane))
        loop, limit = asyncio.get_running_loop(), self.supervisor.options.start_timeout
        until = loop.time() + limit
        for lane in failed:
            while self.supervisor.state(lane) is LaneState.RESTARTING:
                if loop.time() >= until:
                    raise WorkerError(f"{lane} has not started again in {limit:g} s")
                await asyncio.sleep(REVIVE_INTERVAL)
            if self.supervisor.state(lane) is LaneState.FAILED:
                raise WorkerError(f"{lane} failed again: {self.supervisor.lanes()[lane].reason}")

    # Commands

    def _perform(self, command: Command) -> None:
        match command:
            case Dispatch(event):
                self._driver.tell(event)
            case Assign(revision):
                self._assign(revision)
            case ResizeLanes(lanes):
                self._resize(lanes)
            case Switch():
                self._switch(command)
            case RolloutEnded():
                self._ended(command)
            case LaneStopped() | StartFailed() if not self.supervisor.lanes():
                self._empty.set()

    def _may_start_again(self, lane: LaneId) -> bool:
        """Return whether a lane belongs to the revision in force or in progress."""
        return lane in self._matcher.lanes or lane in self._wanted

    def _of(self, revision: PlanRevision) -> Deployment:
        return self._deployments[revision.number]

    def _assign(self, revision: PlanRevision) -> None:
        self._assigned = revision.number
        deployment = self._of(revision)
        models = {name: offered.model for name, offered in deployment.offered.items()}
        try:
            specs = lane_specs(deployment.plan, models, deployment.problem.profiles)
            kinds = {kind.name: kind for kind in deployment.problem.fleet}
            self._wanted = self._matcher.match(
                deployment.plan, specs, lambda model: self._unchanged(model, deployment), kinds
            )
            for name, lane in self._wanted.items():
                if name not in self._matcher.lanes:
                    self._control.setups[name] = self._setup(lane, deployment)
            lanes, capacity = self._planned(deployment)
        except CotenantError as error:
            self._control.feed(Unassignable(revision.number, str(error)))
            return
        self._control.feed(Assigned(revision.number, lanes, capacity, applications_of(deployment)))

    def _setup(self, lane: LaneAssignment, deployment: Deployment) -> LaneSetup:
        """Return the models of a lane's worker, and the share that enforces its limit."""
        divided = divides(self._backend, lane.device.id)
        share = lane.partition.share // (workers_per_partition(lane.partition) if divided else 1)
        return LaneSetup(share, tuple(worker_models(deployment, lane.spec)))

    def _resize(self, lanes: Sequence[LaneId]) -> None:
        deployment = self._deployments[self._assigned]
        setups = {name: self._setup(self._wanted[name], deployment) for name in lanes}
        self._control.setups.update(setups)
        self._control.transport.resize(setups)

    def _planned(self, deployment: Deployment) -> tuple[tuple[PlannedLane, ...], dict[DeviceId, int]]:
        """Return the wanted lanes, and the memory of devices. Lanes that share a process share the models' weights;
        their total memory is unknown."""
        lanes = tuple(planned_lane(lane, deployment.problem) for lane in self._wanted.values())
        capacity = memory_capacity(deployment.plan, deployment.problem)
        for name, lane in self._matcher.lanes.items():
            if self._control.transport.shares_process(name):
                capacity.pop(lane.device.id, None)
        return lanes, capacity

    def _unchanged(self, model: str, deployment: Deployment) -> bool:
        """Return whether a model's file is the one that is being served."""
        current = self._state.deployment.offered
        return model in current and current[model].entry == deployment.offered[model].entry

    def _switch(self, switch: Switch) -> None:
        deployment = self._deployments[switch.number]
        self._observer.track(deployment.offered.values())
        self._state.deploy(deployment)
        self._driver.tell(switch.both)
        for ready in switch.ready:
            self._driver.tell(ready)
        # It is heard once this returns, and before lanes that have drained: to stop them is no part of the switch.
        self._control.feed(Switched(switch.number))
        self._driver.tell(switch.new)
        self._matcher.lanes = self._wanted
        self._state.lanes = self._wanted
        self._answer(switch.number, None)

    def _ended(self, ended: RolloutEnded) -> None:
        number, status = ended.revision.number, self.orchestrator.rollout.status()
        past = self.statistics.ended(ended, self._observer.late)
        if ended.outcome in (RolloutOutcome.ROLLED_BACK, RolloutOutcome.REJECTED):
            logger.warning("revision %d (%s) was %s: %s", number, ended.revision.reason, ended.outcome, ended.reason)
        else:
            logger.info("revision %d (%s) is %s", number, ended.revision.reason, ended.outcome)
        in_force = 0 if status.in_force is None else status.in_force.number
        if number != in_force:
            del self._deployments[number]
        for old in [old for old in self._deployments if old < in_force]:
            del self._deployments[old]
        if number == self._assigned:  # the next may have begun already, but its lanes have not been asked for
            self._wanted = self._matcher.lanes
        if status.phase is None:
            self._idle.set()
        for name in [name for name in self._control.setups if self.supervisor.state(name) is None]:
            if not self._may_start_again(name):
                del self._control.setups[name]  # never started
        self._answer(number, ended)
        self.on_ended(past)

    def _answer(self, number: int, ended: RolloutEnded | None) -> None:
        caller = self._callers.pop(number, None)
        if caller is not None and not caller.done():
            caller.set_result(ended)
