"""Decide each step from one plan revision to the next, without losing a request.

Make before break: new lanes start and warm up beside the old, take over at one moment, and only then the old ones drain
and stop. Where one does not come up all new ones stop, and the old revision was never left. One rollout is in progress
at a time; of the revisions requested meanwhile, the last is next. The simulator and the live server run the same
rollout: events in, commands out; it never waits and reads no clock. Every requested revision ends in exactly one
`RolloutEnded`: only `_end` and `_end_unbegun` return one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cotenant.control.active_rollout import ActiveRollout, QueuedRevision
from cotenant.control.events import (
    Aborted,
    Assign,
    Assigned,
    Dispatch,
    LaneFailed,
    LaneLost,
    LaneReady,
    LaneRestarts,
    LanesDown,
    LaneStopped,
    Requested,
    ResizeLanes,
    RolloutCommand,
    RolloutEnded,
    RolloutEvent,
    Shutdown,
    StartFailed,
    StartLane,
    StopLane,
    Switch,
    Switched,
    Unassignable,
)
from cotenant.control.memory import shortages
from cotenant.control.revision import (
    MemoryPolicy,
    Phase,
    PlannedLane,
    PlanRevision,
    RolloutDurations,
    RolloutOutcome,
)
from cotenant.core.identity import DeviceId, LaneId
from cotenant.runtime.events import ApplicationSpec, Applied, Died, Drained, Ready, Restarting


class RolloutOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Set the options of rollouts. memory: what to do where a device cannot hold the old and the new workers at once.
    grace: seconds that the worker of a drained lane has to exit."""

    memory: MemoryPolicy = MemoryPolicy.REFUSE
    grace: float = 1.0


class RolloutStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the state of rollouts. desired: the revision that is wanted. in_force: the one that serves; None before
    the first. requested: lanes that the supervisor was asked for. observed: those of them that are ready. phase: of the
    rollout in progress, None where there is none, and rolling_out: its revision's number."""

    desired: PlanRevision | None
    in_force: PlanRevision | None
    requested: frozenset[LaneId]
    observed: frozenset[LaneId]
    phase: Phase | None = None
    rolling_out: int | None = None


class Rollout:
    """Decide the steps of rollouts. Feed it events in order of time; carry out its commands in order.

    lanes, applications: those in force, as their revision wants them.
    """

    def __init__(self, options: RolloutOptions | None = None) -> None:
        self.options = options or RolloutOptions()
        self.revision: PlanRevision | None = None
        self.lanes: dict[LaneId, PlannedLane] = {}
        self._workers: dict[LaneId, PlannedLane] = {}  # requested and not gone, as they were started
        self._up: set[LaneId] = set()
        self._applied: dict[LaneId, PlannedLane] = {}  # those that the dispatcher has, draining ones included
        self.applications: tuple[ApplicationSpec, ...] | None = None
        self._active: ActiveRollout | None = None
        self._next: QueuedRevision | None = None
        self._latest = 0  # the largest number requested so far
        self._closed = ""  # the reason, once nothing is started any more

    def handle(self, event: RolloutEvent, now: float) -> list[RolloutCommand]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock."""
        commands: list[RolloutCommand] = []
        match event:
            case LaneReady(lane):
                self._ready(lane, now, commands)
            case LanesDown():
                self._down(event, commands)
            case LaneRestarts(lane, time):
                if lane in self._applied:
                    commands.append(Dispatch(Restarting(self._applied[lane].spec.id, time)))
            case LaneLost(lane, reason) | LaneFailed(lane, reason):
                self._gone_for_now(lane, reason, now, commands)
            case StartFailed(lane, reason):
                self._start_failed(lane, reason, now, commands)
            case LaneStopped(lane):
                self._stopped(lane, now, commands)
            case Drained(lane):
                self._drained(lane, commands)
            case Requested(revision):
                self._requested(revision, now, commands)
            case Assigned():
                self._assigned(event, now, commands)
            case Unassignable(number, reason):
                if (active := self._in_phase(number, Phase.ASSIGN)) is not None:
                    self._roll_back(active, RolloutOutcome.REJECTED, reason, now, commands)
            case Switched(number):
                if (active := self._in_phase(number, Phase.SWITCH)) is not None:
                    active.enter(Phase.DRAIN, now)
                    self._advance(now, commands)
            case Aborted(number, reason):
                self._aborted(number, reason, now, commands)
            case Shutdown(reason, grace):
                self._shutdown(reason, grace, now, commands)
        return commands

    def status(self) -> RolloutStatus:
        active = self._active
        return RolloutStatus(
            desired=self.desired,
            in_force=self.revision,
            requested=frozenset(self._workers),
            observed=frozenset(self._up),
            phase=None if active is None else active.phase,
            rolling_out=None if active is None else active.revision.number,
        )

    @property
    def workers(self) -> dict[LaneId, PlannedLane]:
        """Return the lanes that have a worker, or are about to, with the memory that it needs."""
        return dict(self._workers)

    def workers_during(self, assigned: Assigned) -> dict[LaneId, PlannedLane] | None:
        """Return all lanes that have a worker while old and new are there; None where the rollout does not wait for
        these lanes."""
        if self._in_phase(assigned.number, Phase.ASSIGN) is None:
            return None
        wanted = {lane.id: lane for lane in assigned.lanes}
        fresh = {key: lane for key, lane in wanted.items() if key not in self.lanes}
        return {key: _larger(lane, wanted.get(key, lane)) for key, lane in self._workers.items()} | fresh

    @property
    def desired(self) -> PlanRevision | None:
        """Return the revision that is wanted; after a failed rollout, the one before it."""
        if self._next is not None:
            return self._next.revision
        if self._active is not None and self._active.phase in (Phase.ASSIGN, Phase.PREPARE):
            return self._active.revision
        return self.revision

    # Revisions

    def _requested(self, revision: PlanRevision, now: float, commands: list[RolloutCommand]) -> None:
        if revision.number <= self._latest:
            return
        base, self._latest = self.desired, revision.number
        queued = QueuedRevision(revision, now)
        if self._closed:
            self._end_unbegun(queued, RolloutOutcome.ABORTED, self._closed, now, commands)
        elif revision.base is not None and (base is None or base.number != revision.base):
            why = f"it builds on revision {revision.base}, which is not the one that is wanted any more"
            self._end_unbegun(queued, RolloutOutcome.OUTDATED, why, now, commands)
        else:
            if self._next is not None:
                why = f"revision {revision.number} was requested before it began"
                self._end_unbegun(self._next, RolloutOutcome.SUPERSEDED, why, now, commands)
            self._next = queued
            self._begin_next(now, commands)

    def _begin_next(self, now: float, commands: list[RolloutCommand]) -> None:
        if self._active is None and self._next is not None:
            self._active, self._next = ActiveRollout(self._next, now), None
            commands.append(Assign(self._active.revision))

    def _in_phase(self, number: int, *phases: Phase) -> ActiveRollout | None:
        """Return the rollout in progress, if it is of this revision and in one of these phases."""
        active = self._active
        return active if active is not None and active.revision.number == number and active.phase in phases else None

    def _end(self, active: ActiveRollout, now: float, commands: list[RolloutCommand]) -> None:
        self._active = None
        commands.append(RolloutEnded(active.revision, active.outcome, active.reason, active.durations(now)))
        self._begin_next(now, commands)

    def _end_unbegun(
        self, queued: QueuedRevision, outcome: RolloutOutcome, reason: str, now: float, commands: list[RolloutCommand]
    ) -> None:
        commands.append(RolloutEnded(queued.revision, outcome, reason, RolloutDurations(queued=now - queued.since)))

    def _aborted(self, number: int, reason: str, now: float, commands: list[RolloutCommand]) -> None:
        if self._next is not None and self._next.revision.number == number:
            queued, self._next = self._next, None
            self._end_unbegun(queued, RolloutOutcome.ABORTED, reason, now, commands)
        elif (active := self._in_phase(number, Phase.ASSIGN, Phase.PREPARE)) is not None:
            self._roll_back(active, RolloutOutcome.ABORTED, reason, now, commands)

    def _shutdown(self, reason: str, grace: float, now: float, commands: list[RolloutCommand]) -> None:
        self._closed = self._closed or reason
        if self._next is not None:
            queued, self._next = self._next, None
            self._end_unbegun(queued, RolloutOutcome.ABORTED, reason, now, commands)
        active = self._active
        if active is not None and active.phase is not Phase.SHUTDOWN:
            if active.phase in (Phase.ASSIGN, Phase.PREPARE):
                active.outcome, active.reason = RolloutOutcome.ABORTED, reason
            active.draining = set()
            active.enter(Phase.SHUTDOWN, now)
        if self._applied:
            commands.append(Dispatch(Applied((), ())))
        commands += [StopLane(lane, grace) for lane in self._workers]
        self._advance(now, commands)

    # Forward

    def _assigned(self, assigned: Assigned, now: float, commands: list[RolloutCommand]) -> None:
        active, during = self._in_phase(assigned.number, Phase.ASSIGN), self.workers_during(assigned)
        if active is None or during is None:
            return
        active.wanted = {lane.id: lane for lane in assigned.lanes}
        active.applications = assigned.applications
        active.leaving = tuple(lane for lane in self._workers if lane not in active.wanted)
        fresh = {key: lane for key, lane in active.wanted.items() if key not in self.lanes}
        short = shortages(during.values(), assigned.capacity)
        if short and self.options.memory is not MemoryPolicy.OVERSUBSCRIBE:
            never = shortages([lane for key, lane in during.items() if key in active.wanted], assigned.capacity)
            if self.options.memory is MemoryPolicy.REFUSE or never:
                reason = _too_little_memory(next(iter((never or short).values())), bool(never))
                self._roll_back(active, RolloutOutcome.REJECTED, reason, now, commands)
                return
            self._take_out(active, set(short), commands)
        active.enter(Phase.PREPARE, now)
        active.shadows = fresh
        waits = {lane.device for lane in active.taken_out.values()}
        active.held_back = {key: lane for key, lane in fresh.items() if lane.device in waits}
        self._start((lane for key, lane in fresh.items() if key not in active.held_back), commands)
        self._advance(now, commands)

    def _take_out(self, active: ActiveRollout, devices: set[DeviceId], commands: list[RolloutCommand]) -> None:
        """Drain the old lanes of devices that have no room for old and new at once."""
        active.taken_out = {key: self.lanes[key] for key in active.leaving if self.lanes[key].device in devices}
        active.draining = set(active.taken_out)
        stays = [lane for key, lane in self.lanes.items() if key not in active.taken_out]
        commands.append(Dispatch(_applied(stays, self.applications)))

    def _start(self, lanes: Iterable[PlannedLane], commands: list[RolloutCommand], *, retry: bool = False) -> None:
        """Start lanes, the largest share first, so that a backend can give them cores of their own."""
        leaving = () if self._active is None or retry else self._active.leaving
        for lane in sorted(lanes, key=lambda lane: -lane.share):
            self._workers[lane.id] = lane
            commands.append(StartLane(lane.id, lane.device, leaving, retry))

    def _advance(self, now: float, commands: list[RolloutCommand]) -> None:
        """Take the next step of the rollout in progress, unless something is still missing."""
        active = self._active
        if active is None:
            return
        match active.phase:
            case Phase.ASSIGN | Phase.SWITCH:
                pass
            case Phase.PREPARE:
                self._start_held_back(active, commands)
                if active.shadows.keys() <= self._up and not active.draining and not active.stopping:
                    self._switch(active, now, commands)
            case Phase.DRAIN:
                if not active.draining and not active.stopping:
                    self._end(active, now, commands)
            case Phase.ROLLBACK:
                self._restore(active, now, commands)
            case Phase.SHUTDOWN:
                if not self._workers:
                    self._end(active, now, commands)

    def _start_held_back(self, active: ActiveRollout, commands: list[RolloutCommand]) -> None:
        """Start what waits for memory on devices that have it now."""
        full = {lane.device for key, lane in active.taken_out.items() if key in self._workers}
        free = {key: lane for key, lane in active.held_back.items() if lane.device not in full}
        active.held_back = {key: lane for key, lane in active.held_back.items() if key not in free}
        self._start(free.values(), commands)

    def _switch(self, active: ActiveRollout, now: float, commands: list[RolloutCommand]) -> None:
        """Let the new lanes take over: for one moment the dispatcher has old and new, so that what waits can move."""
        stays = {key: lane for key, lane in self.lanes.items() if key not in active.taken_out}
        both = stays | active.shadows
        self._resize(active, commands)
        commands.append(
            Switch(
                active.revision.number,
                _applied(both.values(), active.applications),
                tuple(Ready(lane.spec.id) for lane in active.shadows.values()),
                _applied(active.wanted.values(), active.applications),
            )
        )
        active.draining = {key for key in stays if key not in active.wanted}
        self._applied = both | active.wanted
        self.applications = active.applications
        self.revision, self.lanes = active.revision, active.wanted
        active.shadows = {}
        active.enter(Phase.SWITCH, now)

    def _resize(self, active: ActiveRollout, commands: list[RolloutCommand]) -> None:
        """Change the workers that stay. Until this moment they are as the revision in force has them, so that there is
        nothing to restore where a rollout is rolled back."""
        kept = [(held, active.wanted[key]) for key, held in self._workers.items() if key in active.wanted]
        changed = {new.id: _larger(new, held) for held, new in kept if _is_other_worker(held, new)}
        self._workers |= changed
        if changed:
            commands.append(ResizeLanes(tuple(changed)))

    def _drained(self, name: str, commands: list[RolloutCommand]) -> None:
        if self._closed:
            self._applied = {key: lane for key, lane in self._applied.items() if lane.spec.id != name}
        active = self._active
        drained = [] if active is None else [key for key in active.draining if self._applied[key].spec.id == name]
        for key in drained:
            assert active is not None
            active.draining.remove(key)
            active.stopping.add(key)
            del self._applied[key]
            commands.append(StopLane(key, self.options.grace))

    # Back

    def _roll_back(
        self, active: ActiveRollout, outcome: RolloutOutcome, reason: str, now: float, commands: list[RolloutCommand]
    ) -> None:
        """Roll back to the revision in force, whose lanes still serve except on devices that could not hold both."""
        active.outcome, active.reason = outcome, reason
        active.enter(Phase.ROLLBACK, now)
        shadows = [key for key in active.shadows if key in self._workers]
        active.shadows, active.held_back = {}, {}
        active.stopping.update(shadows)
        commands += [StopLane(key, 0.0) for key in shadows]
        if active.taken_out:
            back = [lane for key, lane in self.lanes.items() if key in active.draining and key in self._up]
            active.draining = set()
            self._applied = dict(self.lanes)
            commands.append(Dispatch(_applied(self.lanes.values(), self.applications)))
            # One that had drained already is new to the dispatcher.
            commands += [Dispatch(Ready(lane.spec.id)) for lane in back]
        if self._next is not None and self._next.revision.base == active.revision.number:
            queued, self._next = self._next, None
            why = f"it builds on revision {active.revision.number}, which did not come into force: {reason}"
            self._end_unbegun(queued, RolloutOutcome.OUTDATED, why, now, commands)
        self._advance(now, commands)

    def _restore(self, active: ActiveRollout, now: float, commands: list[RolloutCommand]) -> None:
        """Restart the lanes that had left to make room, once all new lanes are gone."""
        if active.stopping:
            return
        absent = [lane for key, lane in active.taken_out.items() if key not in self._workers]
        active.returning.update(lane.id for lane in absent)
        self._start(absent, commands, retry=True)
        if not active.returning:
            self._end(active, now, commands)

    # Lanes

    def _ready(self, lane: LaneId, now: float, commands: list[RolloutCommand]) -> None:
        if lane not in self._workers:
            return
        self._up.add(lane)
        if lane in self._applied:
            commands.append(Dispatch(Ready(self._applied[lane].spec.id)))
        self._returned(lane)
        self._advance(now, commands)

    def _down(self, down: LanesDown, commands: list[RolloutCommand]) -> None:
        self._up.difference_update(down.lanes)
        names = [self._applied[lane].spec.id for lane in down.lanes if lane in self._applied]
        if names:
            back = {self._applied[lane].spec.id: time for lane, time in down.back.items() if lane in self._applied}
            commands.append(Dispatch(Died(names[0], down.reason, tuple(names[1:]), back)))

    def _gone_for_now(self, lane: LaneId, reason: str, now: float, commands: list[RolloutCommand]) -> None:
        """Handle a lane whose worker comes back late or never."""
        active = self._active
        if active is not None and active.phase is Phase.PREPARE and lane in active.shadows:
            self._roll_back(active, RolloutOutcome.ROLLED_BACK, _not_up(lane, reason), now, commands)
        self._returned(lane)
        self._advance(now, commands)

    def _start_failed(self, lane: LaneId, reason: str, now: float, commands: list[RolloutCommand]) -> None:
        active = self._active
        self._forget(lane)
        if active is not None and active.phase is Phase.PREPARE and lane in active.shadows:
            self._roll_back(active, RolloutOutcome.ROLLED_BACK, _not_up(lane, reason), now, commands)
        self._advance(now, commands)

    def _stopped(self, lane: LaneId, now: float, commands: list[RolloutCommand]) -> None:
        self._forget(lane)
        self._advance(now, commands)

    def _forget(self, lane: LaneId) -> None:
        self._workers.pop(lane, None)
        self._up.discard(lane)
        if self._active is not None:
            self._active.stopping.discard(lane)
        self._returned(lane)

    def _returned(self, lane: LaneId) -> None:
        if self._active is not None:
            self._active.returning.discard(lane)

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        active = self._active
        assert self._up <= self._workers.keys()
        if active is None:
            assert self._next is None
            if not self._closed:
                assert self.lanes.keys() == self._workers.keys() == self._applied.keys()
            return
        assert active.draining <= self._applied.keys() and active.draining <= self._workers.keys()
        assert not active.draining & active.stopping
        assert active.stopping <= self._workers.keys()
        assert not active.shadows.keys() & self._applied.keys(), "a shadow serves before its time"
        assert active.held_back.keys() <= active.shadows.keys()
        if active.phase in (Phase.ASSIGN, Phase.PREPARE):
            assert active.revision.number > (0 if self.revision is None else self.revision.number)
        if not self._closed:
            assert self.lanes.keys() - active.taken_out.keys() <= self._applied.keys()
            assert self.lanes.keys() - active.taken_out.keys() <= self._workers.keys()


def _applied(lanes: Iterable[PlannedLane], applications: tuple[ApplicationSpec, ...] | None) -> Applied:
    return Applied(tuple(lane.spec for lane in lanes), applications)


def _is_other_worker(held: PlannedLane, new: PlannedLane) -> bool:
    """Whether a worker is to have another share, or larger batches than it has."""
    batches = {model.model: len(model.latencies) for model in held.spec.models}
    return held.share != new.share or any(
        len(model.latencies) > batches.get(model.model, 0) for model in new.spec.models
    )


def _larger(lane: PlannedLane, other: PlannedLane) -> PlannedLane:
    """A lane with the memory of the one that needs more: a worker does not give back what it has had."""
    if lane.memory is None or other.memory is None:
        return lane
    return msgspec.structs.replace(lane, memory=max(lane.memory, other.memory))


def _not_up(lane: LaneId, reason: str) -> str:
    return f"the worker of {lane} did not start: {reason}"


def _too_little_memory(shortage: str, never: bool) -> str:
    if never:
        return f"{shortage}; plan for fewer or smaller workers"
    return f'{shortage}, old and new together; plan for fewer workers, or allow a gap by `rollout_memory = "gap"`'
