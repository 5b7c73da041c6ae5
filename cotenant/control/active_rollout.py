"""Hold the rollout in progress, and the revision that is next."""

from __future__ import annotations

import msgspec

from cotenant.control.revision import Phase, PlannedLane, PlanRevision, RolloutDurations, RolloutOutcome
from cotenant.core.identity import LaneId
from cotenant.runtime.events import ApplicationSpec


class QueuedRevision(msgspec.Struct, frozen=True):
    """Hold a revision that was requested. since: when, in seconds."""

    revision: PlanRevision
    since: float


class ActiveRollout:
    """Hold how far the rollout in progress has come; only `Rollout` changes it."""

    def __init__(self, queued: QueuedRevision, now: float) -> None:
        self.revision = queued.revision
        self.queued = now - queued.since
        self.phase = Phase.ASSIGN
        self.since = now  # when this phase began
        self.spent: dict[Phase, float] = {}
        self.wanted: dict[LaneId, PlannedLane] = {}
        self.applications: tuple[ApplicationSpec, ...] | None = None
        self.shadows: dict[LaneId, PlannedLane] = {}  # new lanes, until they take over
        self.held_back: dict[LaneId, PlannedLane] = {}  # those of them that wait for memory
        self.leaving: tuple[LaneId, ...] = ()
        self.taken_out: dict[LaneId, PlannedLane] = {}  # old lanes that make room for new ones
        self.draining: set[LaneId] = set()
        self.stopping: set[LaneId] = set()
        self.returning: set[LaneId] = set()  # old lanes that start again
        self.outcome = RolloutOutcome.COMPLETED
        self.reason = ""

    def enter(self, phase: Phase, now: float) -> None:
        """Begin a phase."""
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def durations(self, now: float) -> RolloutDurations:
        """Return the seconds spent in each phase so far."""
        spent = self.spent | {self.phase: self.spent.get(self.phase, 0.0) + now - self.since}
        return RolloutDurations(
            queued=self.queued,
            prepare=spent.get(Phase.ASSIGN, 0.0) + spent.get(Phase.PREPARE, 0.0),
            switch=spent.get(Phase.SWITCH, 0.0),
            drain=spent.get(Phase.DRAIN, 0.0),
            rollback=spent.get(Phase.ROLLBACK, 0.0),
        )
