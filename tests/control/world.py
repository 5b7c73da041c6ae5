"""A world in which an orchestrator and a dispatcher can be driven step by step: workers, devices, timers, callers.

It keeps the transport's side of the contract and nothing more: news of different workers come in any order, twice, or
long after. What must hold at every moment is checked at every step.
"""

from __future__ import annotations

import math
from collections import Counter, deque

import msgspec

from cotenant.control.events import (
    Aborted,
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
    ReviveLane,
    RolloutEnded,
    Shutdown,
    SpawnWorker,
    StartFailed,
    StartLane,
    StopLane,
    SupervisorCommand,
    SupervisorEvent,
    Switch,
    Switched,
    Unassignable,
    WakeAt,
    Woke,
    WorkerBusy,
    WorkerReady,
    WorkerRefused,
    WorkersExited,
)
from cotenant.control.orchestrator import Command, Event, Orchestrator
from cotenant.control.revision import MemoryPolicy, PlannedLane, PlanRevision
from cotenant.control.rollout import Rollout, RolloutOptions
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor import Supervisor
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Plan
from cotenant.core.request import Outcome, Request
from cotenant.runtime import events as runtime
from cotenant.runtime.dispatcher import Dispatcher

OPTIONS = SupervisorOptions(lives=3, start_timeout=20.0, hang_timeout=5.0)


class Cut(msgspec.Struct, frozen=True):
    """A partition that a plan may have: two plans with the same one keep its lane."""

    device: DeviceId
    models: tuple[str, ...]
    memory: int | None = 1
    share: int = 100

    def at(self, share: int) -> Cut:
        return msgspec.structs.replace(self, share=share)


def planned(key: LaneId, cut: Cut) -> PlannedLane:
    models = tuple(runtime.LaneModel(model=model, latencies=(0.1, 0.15)) for model in cut.models)
    spec = runtime.LaneSpec(id=key, models=models)
    return PlannedLane(id=key, device=cut.device, share=cut.share, spec=spec, memory=cut.memory)


def revision(number: int, *, base: int | None = None) -> PlanRevision:
    return PlanRevision(number=number, plan=Plan(planner="hand", devices=()), reason="a test", base=base)


class Worker:
    def __init__(self, lane: LaneId) -> None:
        self.lane = lane
        self.ready = False
        self.killed = ""  # why
        self.retired = False
        self.abandoned = False  # its device is lost; it may be gone or not
        self.standby = False


class CountingSupervisor(Supervisor):
    """starts: those asked for, less those that came to something."""

    def __init__(self, options: SupervisorOptions) -> None:
        super().__init__(options)
        self.starts: Counter[LaneId] = Counter()

    def handle(self, event: SupervisorEvent, now: float) -> list[SupervisorCommand]:
        if isinstance(event, StartLane):
            self.starts[event.lane] += 1
        return super().handle(event, now)


class World:
    def __init__(
        self,
        capacity: dict[DeviceId, int] | None = None,
        memory: MemoryPolicy = MemoryPolicy.REFUSE,
        options: SupervisorOptions = OPTIONS,
        *,
        in_place: bool = False,
        standbys: int = 0,
    ) -> None:
        """in_place: workers go on with other shares. standbys: standby workers of a device."""
        self.standbys = standbys
        self.in_place = in_place
        self.resizing: dict[LaneId, Cut] = {}  # what lanes of the last plan that was assigned are to become
        self.supervisor = CountingSupervisor(options)
        self.orchestrator = Orchestrator(Rollout(RolloutOptions(memory=memory)), self.supervisor, standbys=standbys)
        self.dispatcher = Dispatcher()
        self.capacity: dict[DeviceId, int] = dict(capacity or {})
        self.memory = memory
        self.now = 0.0
        self.plans: dict[int, tuple[Cut, ...]] = {}  # by number of the revision
        self.cuts: dict[LaneId, Cut] = {}  # of all lanes that ever were
        self.workers: dict[int, Worker] = {}  # by incarnation, until nothing is left
        self.open: set[LaneId] = set()  # partitions that are set up
        self.closing: list[ClosePartition] = []
        self.timers: list[WakeAt | runtime.WakeAt] = []
        self.running: dict[LaneId, runtime.Run] = {}  # by lane
        self.lost: set[DeviceId] = set()
        self.ended: dict[int, RolloutEnded] = {}
        self.in_force: list[int] = [0]  # numbers, one after the other
        self.replies: dict[int, Outcome] = {}
        self.reasons: Counter[str] = Counter()
        self.asked = 0
        self.said: list[Command] = []  # since `take`
        self.news: list[Event] = []  # all that was ever told
        self.unassignable: set[int] = set()
        self._pending: deque[Event] = deque()
        self._busy = False

    # Telling

    def feed(self, event: Event) -> None:
        self._pending.append(event)
        if self._busy:
            return
        self._busy = True
        while self._pending:
            event = self._pending.popleft()
            if not isinstance(event, Requested | Assigned | Unassignable | Switched | Shutdown | runtime.Drained):
                self.news.append(event)
            commands = self.orchestrator.handle(event, self.now)
            self.said += commands
            for command in commands:
                self._perform(command)
        self._busy = False
        self._check()

    def tell(self, event: runtime.Event) -> None:
        """The dispatcher, and do what it says."""
        for command in self.dispatcher.handle(event, self.now):
            match command:
                case runtime.Run(lane):
                    ready = [worker for worker in self._serving(lane) if worker.ready]
                    assert len(ready) == 1, f"{lane} runs a batch on {len(ready)} workers"
                    assert lane not in self.running
                    self.running[lane] = command
                case runtime.Reply(requests, outcome, reason):
                    for request in requests:
                        assert request.id not in self.replies
                        self.replies[request.id] = outcome
                    self.reasons[reason] += len(requests)
                case runtime.WakeAt():
                    self.timers.append(command)
                case runtime.Drained():
                    self.feed(command)
        self.dispatcher.invariants()

    def take(self) -> list[Command]:
        """What was said since the last call."""
        said, self.said = self.said, []
        return said

    def _held(self, lane: LaneId) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.lane == lane and not worker.abandoned]

    def _serving(self, lane: LaneId) -> list[Worker]:
        return [worker for worker in self._held(lane) if not worker.standby]

    def _perform(self, command: Command) -> None:
        match command:
            case Assign(wanted):
                self._assign(wanted.number)
            case Dispatch(event):
                if isinstance(event, runtime.Died):
                    for lane in (event.lane, *event.others):
                        self.running.pop(lane, None)
                self.tell(event)
            case Switch(number, both, ready, new):
                self.tell(both)
                for each in ready:
                    self.tell(each)
                self.tell(new)
                self.in_force.append(number)
                self.feed(Switched(number))
            case RolloutEnded(of):
                assert of.number not in self.ended, "a rollout ended twice"
                self.ended[of.number] = command
                status = self.orchestrator.rollout.status()
                assert (0 if status.in_force is None else status.in_force.number) == self.in_force[-1]
                assert (command.outcome == "completed") == (of.number in self.in_force)
                assert bool(command.reason) == (command.outcome != "completed")
            case ResizeLanes(lanes):
                assert self.in_place
                assert {*lanes} == self.resizing.keys()
                self.cuts |= self.resizing
                self.resizing = {}
            case SpawnWorker(lane, incarnation, fresh, _, standby):
                assert len(self._serving(lane)) == standby, f"{lane} has a worker already, or none to stand by for"
                assert not standby or not any(worker.standby for worker in self._held(lane)), f"{lane} has a standby"
                assert fresh or lane in self.open
                assert self.cuts[lane].device not in self.lost
                self.open.add(lane)
                self.workers[incarnation] = Worker(lane)
                self.workers[incarnation].standby = standby
            case PromoteWorker(lane, incarnation):
                assert not self._serving(lane), f"{lane} has a worker already"
                assert not self.workers[incarnation].killed, "a worker that was killed is promoted"
                self.workers[incarnation].standby = False
            case KillWorker(lane, incarnation, reason, abandon):
                assert abandon == (self.cuts[lane].device in self.lost)
                self.workers[incarnation].killed = reason
                self.workers[incarnation].abandoned = abandon
            case RetireWorker(_, incarnation):
                assert self.workers[incarnation].ready
                self.workers[incarnation].retired = True
            case ClosePartition(lane):
                assert not self._held(lane), f"the partition of {lane} is closed around its worker"
                self.closing.append(command)
            case WakeAt():
                self.timers.append(command)
            case StartFailed(lane, reason) | LaneLost(lane, reason) | LaneFailed(lane, reason):
                assert reason
                self.supervisor.starts.pop(lane, None)
            case LaneReady(lane) | LaneStopped(lane):
                self.supervisor.starts.pop(lane, None)
            case LanesDown() | LaneRestarts() | StartLane() | StopLane():
                pass

    def _assign(self, number: int) -> None:
        """Lanes of cuts that are in force stay."""
        if number in self.unassignable:
            self.feed(Unassignable(number, "no such device"))
            return
        free = dict(self.orchestrator.rollout.lanes)
        self.resizing = {}
        lanes = []
        for cut in self.plans[number]:
            key = next((key for key in free if self.cuts[key] == cut), None)
            if key is None and self.in_place:
                key = next((key for key in free if self.cuts[key].at(cut.share) == cut), None)
                if key is not None:
                    self.resizing[key] = cut
            if key is None:
                key = LaneId(cut.device, len(self.cuts))
                self.cuts[key] = cut
            else:
                del free[key]
            lanes.append(planned(key, cut))
        self.feed(Assigned(number, tuple(lanes), self.capacity))

    # What may happen

    def request(self, number: int, *cuts: Cut, base: int | None = None) -> None:
        self.plans[number] = cuts
        self.feed(Requested(revision(number, base=base)))

    def ready(self, incarnation: int) -> None:
        worker = self.workers[incarnation]
        worker.ready = worker.ready or not worker.killed
        self.feed(WorkerReady(worker.lane, incarnation))

    def exit(self, incarnation: int, reason: str = "it was killed by SIGKILL") -> None:
        worker = self.workers.pop(incarnation)
        self.feed(WorkersExited(((worker.lane, incarnation),), worker.killed or reason))

    def crash(self, incarnations: list[int], reason: str = "it was killed by SIGSEGV") -> None:
        """A process that several lanes share."""
        gone = {number: self.workers.pop(number) for number in incarnations}
        self.feed(WorkersExited(tuple((worker.lane, number) for number, worker in gone.items()), reason))

    def refuse(self, incarnation: int) -> None:
        worker = self.workers.pop(incarnation)
        self.feed(WorkerRefused(worker.lane, incarnation, "too many open files"))

    def busy(self, incarnation: int, since: float) -> None:
        self.feed(WorkerBusy(self.workers[incarnation].lane, incarnation, since, "a batch of 1 of 'm'"))

    def close(self, number: int = 0) -> None:
        command = self.closing.pop(number)
        if not self._serving(command.lane):
            self.open.discard(command.lane)
        self.feed(PartitionClosed(command.lane, command.incarnation))

    def lose(self, *devices: DeviceId) -> None:
        self.lost.update(devices)
        self.feed(DevicesLost({device: f"{device} is lost: it fell off the bus" for device in devices}))

    def restore(self, device: DeviceId) -> None:
        self.lost.discard(device)
        self.feed(DeviceRestored(device))

    def abort(self, number: int) -> None:
        self.feed(Aborted(number, "the operator said so"))

    def revive(self, lane: LaneId) -> None:
        self.feed(ReviveLane(lane))

    def shutdown(self) -> None:
        self.feed(Shutdown("the server stops", 1.0))

    def arrive(self, model: str, within: float = 1e6) -> int:
        self.asked += 1
        self.tell(runtime.Arrived(Request(self.asked, model, self.now, self.now + within)))
        return self.asked

    def finish(self, lane: LaneId) -> None:
        run = self.running.pop(lane)
        self.tell(runtime.Finished(lane, run.batch))

    def wake(self) -> None:
        """Let time pass until the next timer."""
        timer = min(self.timers, key=lambda timer: timer.time)
        self.timers.remove(timer)
        self.now = max(self.now, timer.time)
        if isinstance(timer, WakeAt):
            self.feed(Woke(timer.lane, timer.time))
        else:
            self.tell(runtime.Woke(timer.lane, timer.time))

    # To the end

    def incarnation(self, lane: LaneId) -> int:
        serving = self._serving(lane)
        (number,) = [number for number, worker in self.workers.items() if worker in serving]
        return number

    def standby(self, lane: LaneId) -> int:
        """The incarnation of a lane's standby worker; 0 where it has none."""
        numbers = [number for number, worker in self.workers.items() if worker.lane == lane and worker.standby]
        return numbers[0] if numbers else 0

    def settle(self) -> None:
        """Everything goes well from now on, until nothing more happens."""
        for device in sorted(self.lost):
            self.restore(device)
        for _ in range(10_000):
            if self.running:
                self.finish(next(iter(self.running)))
            elif self.closing:
                self.close()
            elif leaving := [n for n, w in self.workers.items() if w.killed or w.retired]:
                self.exit(leaving[0], "it was stopped")
            elif starting := [n for n, w in self.workers.items() if not w.ready]:
                self.ready(starting[0])
            elif self.timers:
                self.wake()
            else:
                return
        raise AssertionError("it never ends")

    def check_settled(self) -> None:
        """Nothing is left over, and nobody waits."""
        rollout, supervisor = self.orchestrator.rollout, self.supervisor
        status = rollout.status()
        assert status.phase is None and rollout.desired == rollout.revision
        assert self.ended.keys() == self.plans.keys()
        assert self.replies.keys() == set(range(1, self.asked + 1))
        assert not self.supervisor.starts, "a start was never answered"
        shut = bool(rollout._closed)
        lanes = set() if shut else set(rollout.lanes)
        assert status.requested == lanes == self.open
        failed = {key for key, lane in supervisor.lanes().items() if lane.state is LaneState.FAILED}
        assert status.observed == lanes - failed
        assert sorted(worker.lane for worker in self.workers.values() if not worker.standby) == sorted(lanes - failed)
        standing_by = [worker.lane for worker in self.workers.values() if worker.standby]
        assert sorted(standing_by) == sorted((set() if shut else self.orchestrator._kept) - failed)
        if not shut:
            assert self.dispatcher.lanes.keys() == lanes
            wanted = self.plans[rollout.revision.number] if rollout.revision else ()
            assert Counter(self.cuts[key] for key in lanes) == Counter(wanted)
        assert {key for key, lane in self.dispatcher.lanes.items() if lane.up} == status.observed

    def _check(self) -> None:
        self.orchestrator.invariants()
        if self.memory is not MemoryPolicy.OVERSUBSCRIBE:
            needs: Counter[DeviceId] = Counter()
            for worker in self.workers.values():
                if not worker.abandoned:
                    needs[self.cuts[worker.lane].device] += self.cuts[worker.lane].memory or 0
            for device, need in needs.items():
                assert need <= self.capacity.get(device, math.inf), f"{device} holds more than its memory"
        # What serves is ready, and what the dispatcher takes for up has a worker that was.
        for name, lane in self.dispatcher.lanes.items():
            if lane.up:
                assert [worker for worker in self._serving(name) if worker.ready], name
