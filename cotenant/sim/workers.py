"""Drive the orchestrator in a simulated run: inject failures, change plans, and start workers in virtual time.

It decides nothing. A worker is ready once its start-up time is over and its device is back, and exits at once when told
to. Interference between the old and the new workers of a rollout is not modelled.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from heapq import heappop, heappush

from cotenant.control.events import (
    Assign,
    Assigned,
    ClosePartition,
    DeviceRestored,
    DevicesLost,
    Dispatch,
    KillWorker,
    LaneFailed,
    LaneLost,
    LaneReady,
    LaneRestarts,
    LanesDown,
    LaneStopped,
    PartitionClosed,
    PromoteWorker,
    Requested,
    ResizeLanes,
    RetireWorker,
    RolloutEnded,
    SpawnWorker,
    StartFailed,
    StartLane,
    StopLane,
    Switch,
    Switched,
    WakeAt,
    Woke,
    WorkerBusy,
    WorkerReady,
    WorkersExited,
)
from cotenant.control.orchestrator import Command, Event, Orchestrator
from cotenant.control.revision import PlanRevision, RolloutOutcome, memory_capacity, planned_lane
from cotenant.control.rollout import Rollout
from cotenant.control.supervisor import Supervisor
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Plan
from cotenant.errors import ConfigError, PlanError
from cotenant.planners import Problem
from cotenant.runtime.events import ApplicationSpec, Drained, Finished, LaneSpec, Run
from cotenant.runtime.events import Command as RuntimeCommand
from cotenant.runtime.events import Event as RuntimeEvent
from cotenant.runtime.lane_assignment import LaneAssignment, LaneMatcher
from cotenant.runtime.lane_specs import workers_per_partition
from cotenant.sim.loop import Handle, Tell
from cotenant.workload.failures import Failure

# A simulated worker always becomes ready unless its device fails: it must not time out before.
OPTIONS = SupervisorOptions(start_timeout=math.inf)


class Workers:
    """Simulate the workers, as the actor of `sim.loop.play`. Call `fail`, `change` and `control` before that.

    specs: the lanes of a plan; raises PlanError for a plan that cannot stand. opened: called with lanes before they run
    anything. startup: seconds from the start of a lane's worker until it is ready. Those of the first plan are ready
    from the beginning. applications: those of a plan. standbys: standby workers of each device.
    """

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        specs: Callable[[Plan], Iterable[LaneSpec]],
        opened: Callable[[Mapping[LaneId, LaneAssignment]], None],
        startup: Callable[[LaneAssignment], float],
        applications: Callable[[Plan], tuple[ApplicationSpec, ...]] = lambda plan: (),
        standbys: int = 0,
    ) -> None:
        self.orchestrator = Orchestrator(Rollout(), Supervisor(OPTIONS), standbys=standbys)
        self.ended: list[RolloutEnded] = []
        self._first = plan
        self._problem = problem
        self._specs = specs
        self._opened = opened
        self._startup = startup
        self._applications = applications
        self._matcher = LaneMatcher()
        self._lanes: dict[LaneId, LaneAssignment] = {}  # all lanes of the run so far
        self._wanted: dict[LaneId, LaneAssignment] = {}  # of the rollout in progress
        self._failures: list[Failure] = []
        self.cuts = 0  # failures that cut nodes off
        self._unheard: list[Finished] = []  # what nodes that are cut off have finished
        self._revisions = itertools.count(1)
        self._by_hand: set[int] = set()  # revisions of which memory must hold the workers
        self.on_rollout_ended: Callable[[RolloutEnded, float], None] = lambda ended, now: None
        self.on_devices_lost: Callable[[tuple[DeviceId, ...], str, float], None] = lambda lost, reason, now: None
        self.on_device_restored: Callable[[DeviceId, float], None] = lambda device, now: None
        self._agenda: list[tuple[float, int, Callable[[float], object]]] = []
        self._order = itertools.count()
        self._events: deque[Event] = deque()
        self._busy = False
        self._tell: Tell = lambda event, now: None
        self.at(0.0, partial(self.request, plan, "the first plan"))

    def fail(self, failures: Iterable[Failure]) -> None:
        """Schedule a failure. Raises ConfigError for parts that the first plan does not have."""
        names = list(LaneMatcher().match(self._first, self._specs(self._first)))
        for failure in failures:
            if not any(failure.hits(name) for name in names):
                there = ", ".join(names) or "none"
                raise ConfigError(f"a failure of {failure.names}: no partition is there; the plan has {there}")
            self.at(failure.time, partial(self._fail, failure))
            self.cuts += bool(failure.nodes)

    def change(self, changes: Iterable[tuple[float, Plan]]) -> None:
        """Schedule a request for a plan. The run raises PlanError where a device has no memory for its workers in
        addition to those of the plan before; a plan requested by a control is then dropped."""
        for time, plan in changes:
            self.at(time, partial(self.request, plan, "a change of the scenario", by_hand=True))

    # The actor of a run

    @property
    def due(self) -> float:
        return self._agenda[0][0] if self._agenda else math.inf

    def act(self, now: float, tell: Tell) -> None:
        self._tell = tell
        _, _, step = heappop(self._agenda)
        step(now)

    def drained(self, lane: LaneId, now: float) -> None:
        self._feed(Drained(lane), now)

    def began(self, run: Run, predicted: float, seconds: float, now: float) -> None:
        """Hear of a batch that begins and takes long; the supervisor is told when it hangs."""
        supervisor = self.orchestrator.supervisor
        limit = supervisor.options.hang_limit(predicted)
        lane = supervisor.lanes().get(run.lane)
        if seconds > limit and lane is not None:
            batch = f"a batch of {sum(request.size for request in run.requests)} of {run.model!r}"
            busy = WorkerBusy(run.lane, lane.incarnation, now, batch, predicted)
            self._later(math.nextafter(now + limit, math.inf), busy)

    # Events

    def at(self, time: float, step: Callable[[float], object]) -> None:
        """Do something at a time of the run, unless that is infinite."""
        if time < math.inf:
            heappush(self._agenda, (time, next(self._order), step))

    def _later(self, time: float, event: Event) -> None:
        self.at(time, partial(self._feed, event))

    def request(self, plan: Plan, reason: str, now: float, *, by_hand: bool = False) -> int:
        """Request a plan; return the number of its revision. by_hand: the run ends where memory does not hold it."""
        number = next(self._revisions)
        if by_hand:
            self._by_hand.add(number)
        self._feed(Requested(PlanRevision(number=number, plan=plan, problem=self._problem, reason=reason)), now)
        return number

    def shares(self) -> dict[LaneId, float]:
        """Return the part of a device that each lane in force has, in ‰."""
        return {
            name: lane.partition.share / workers_per_partition(lane.partition)
            for name, lane in self._matcher.lanes.items()
        }

    def lose(self, devices: Collection[DeviceId], reason: str, now: float) -> None:
        """From now on nothing runs on these devices, until they are restored."""
        if devices:
            self._feed(DevicesLost(dict.fromkeys(devices, reason)), now)

    def restore(self, devices: Iterable[DeviceId], now: float) -> None:
        for device in devices:
            self._feed(DeviceRestored(device), now)

    def _fail(self, failure: Failure, now: float) -> None:
        """Fail lanes, whose workers restart later, or devices, until they are back."""
        self._failures.append(failure)
        if failure.nodes:
            step = partial(self._notice if failure.is_noticed else self._answer_late, failure)
            self.at(now + min(failure.noticed, failure.back), step)
        reason = f"{failure.names} failed"
        lanes = self.orchestrator.supervisor.lanes()
        hit = [
            (part, lanes[part].incarnation)
            for part in failure.parts
            if isinstance(part, LaneId) and part in lanes and lanes[part].incarnation
        ]
        devices = [part for part in failure.parts if isinstance(part, DeviceId)]
        for device in devices:
            self.at(failure.time + failure.back, partial(self._restore, device))
        if devices:
            self._feed(DevicesLost(dict.fromkeys(devices, reason)), now)
            self.on_devices_lost(tuple(devices), reason, now)
        if hit:
            self._feed(WorkersExited(tuple(hit), reason), now)

    def _notice(self, failure: Failure, now: float) -> None:
        """Notice that nodes are cut off: all that runs there is lost."""
        known = {DeviceId(kind.name, index) for kind in self._problem.fleet for index in range(kind.count or 0)}
        known |= {lane.device for lane in self._lanes}
        devices = tuple(sorted(device for device in known if device.node in failure.nodes))
        for device in devices:
            self.at(failure.time + failure.back, partial(self._restore, device))
        reason = f"{', '.join(failure.nodes)} cut off"
        self._unheard = [event for event in self._unheard if event.lane.device.node not in failure.nodes]
        self._feed(DevicesLost(dict.fromkeys(devices, reason)), now)
        self.on_devices_lost(devices, reason, now)

    def _answer_late(self, failure: Failure, now: float) -> None:
        """Tell what nodes have finished while they were cut off, which nobody noticed."""
        for event in [event for event in self._unheard if event.lane.device.node in failure.nodes]:
            self._unheard.remove(event)
            self._tell(event, now)  # it may be cut off by another failure still

    def hearing(self, handle: Handle) -> Handle:
        """Return a dispatcher's `handle` that is not told of batches whose answers do not arrive: for ever, or until
        their node is back where nobody has noticed by then."""

        def hear(event: RuntimeEvent, now: float) -> list[RuntimeCommand]:
            if type(event) is Finished and any(failure.silences(event.lane, now) for failure in self._failures):
                self._unheard.append(event)
                return []
            return handle(event, now)

        return hear

    def _restore(self, device: DeviceId, now: float) -> None:
        if not any(failure.loses(device) and failure.covers(now) for failure in self._failures):
            self._feed(DeviceRestored(device), now)
            self.on_device_restored(device, now)

    def _feed(self, event: Event, now: float) -> None:
        """Give the orchestrator an event. Events that this causes are queued, so that events keep their order. Where a
        command fails, the others are carried out; then the first error is raised."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        errors: list[Exception] = []
        try:
            while self._events:
                for command in self.orchestrator.handle(self._events.popleft(), now):
                    try:
                        self._perform(command, now)
                    except Exception as error:  # noqa: BLE001
                        errors.append(error)
        finally:
            self._busy = False
        if errors:
            raise errors[0]

    # Commands

    def _perform(self, command: Command, now: float) -> None:
        match command:
            case Dispatch(event):
                self._tell(event, now)
            case SpawnWorker(lane, incarnation):
                self._spawn(WorkerReady(lane, incarnation), now)
            case KillWorker(lane, incarnation, reason):
                self._feed(WorkersExited(((lane, incarnation),), reason), now)
            case RetireWorker(lane, incarnation):
                self._feed(WorkersExited(((lane, incarnation),), "it was stopped"), now)
            case ClosePartition(lane, incarnation):
                self._feed(PartitionClosed(lane, incarnation), now)
            case PromoteWorker():
                pass  # it will be ready, or is, as it was started
            case WakeAt(lane, time):
                self._later(time, Woke(lane, time))
            case Assign(revision):
                self._assign(revision, now)
            case Switch():
                self._switch(command, now)
            case RolloutEnded():
                self._rollout_ended(command, now)
            case ResizeLanes():
                pass  # batches take what the new revision says from `_switch` on
            case StartLane() | StopLane():
                pass  # the supervisor has it
            case LaneReady() | LanesDown() | LaneRestarts() | LaneLost() | LaneFailed() | StartFailed() | LaneStopped():
                pass  # news for people

    def _spawn(self, ready: WorkerReady, now: float) -> None:
        """Schedule when a worker is ready: those of the first plan at once, before anything can fail then."""
        if self.orchestrator.rollout.revision is None:
            self._feed(ready, now)
        else:
            self._later(self._up(ready.lane, now), ready)

    def _up(self, lane: LaneId, now: float) -> float:
        """Return when a worker that starts now is ready: not before its device is back."""
        ends = (
            failure.time + failure.back for failure in self._failures if lane in failure.parts and failure.covers(now)
        )
        return max(ends, default=now) + self._startup(self._lanes[lane])

    def _assign(self, revision: PlanRevision, now: float) -> None:
        plan = revision.plan
        kinds = {kind.name: kind for kind in self._problem.fleet}
        self._wanted = self._matcher.match(plan, self._specs(plan), kinds=kinds)
        self._lanes.update(self._wanted)
        lanes = tuple(planned_lane(lane, self._problem) for lane in self._wanted.values())
        capacity = memory_capacity(plan, self._problem) | memory_capacity(self._plan, self._problem)
        self._feed(Assigned(revision.number, lanes, capacity, self._applications(plan)), now)

    @property
    def _plan(self) -> Plan:
        """Return the plan in force."""
        revision = self.orchestrator.rollout.revision
        return self._first if revision is None else revision.plan

    def _switch(self, switch: Switch, now: float) -> None:
        fresh = {name: lane for name, lane in self._wanted.items() if name not in self._matcher.lanes}
        self._opened(fresh)
        self._tell(switch.both, now)
        for ready in switch.ready:
            self._tell(ready, now)
        self._matcher.lanes = self._wanted
        self._opened(self._wanted)  # not before: a lane that stays may have had larger batches until now
        self._tell(switch.new, now)
        self._feed(Switched(switch.number), now)

    def _rollout_ended(self, ended: RolloutEnded, now: float) -> None:
        self.ended.append(ended)
        if ended.outcome is RolloutOutcome.REJECTED and ended.revision.number in self._by_hand:
            raise PlanError(f"the plan cannot change after {now:g} s: {ended.reason}")
        self.on_rollout_ended(ended, now)
