"""Define a plan revision, the lanes that it wants, and how its rollout ended. Values only."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Plan
from cotenant.core.provenance import Validation
from cotenant.planners import Problem
from cotenant.planners.capacity import footprint
from cotenant.runtime.events import LaneSpec
from cotenant.runtime.lane_assignment import LaneAssignment


class PlanRevision(msgspec.Struct, frozen=True, kw_only=True):
    """Identify a plan, with its origin.

    number: larger than that of every revision before it. problem: what the plan solves; None where unknown. reason: why
    it was made, for people. base: the number of the revision that it changes by one step, such as one more model; it is
    void if that one never comes into force. None: it is independent.
    """

    number: int
    plan: Plan
    problem: Problem | None = None
    reason: str = ""
    base: int | None = None

    @property
    def validation(self) -> Validation | None:
        """Return the result of the validation by simulation; None where there was none, or it is unknown."""
        provenance = self.plan.provenance
        return None if provenance is None else provenance.validation


class PlannedLane(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a lane as a revision wants it: one worker of one partition.

    spec: for the dispatcher. share: ‰ of its device. memory: bytes of the device that its worker needs; None where that
    is not known. rate: requests/s that it is to carry.
    """

    id: LaneId
    device: DeviceId
    share: int
    spec: LaneSpec
    memory: int | None = None
    rate: float = 0.0


def planned_lane(lane: LaneAssignment, problem: Problem) -> PlannedLane:
    """Return a matched lane as a rollout sees it, with the memory of its worker by the problem's profiles."""
    kind = lane.device.kind
    return PlannedLane(
        id=lane.spec.id,
        device=lane.device.id,
        share=lane.partition.share,
        spec=lane.spec,
        memory=sum(footprint(problem, kind, placement.model, placement.batch) for placement in lane.placements),
        rate=sum(placement.rate / placement.procs for placement in lane.placements),
    )


def memory_capacity(plan: Plan, problem: Problem) -> dict[DeviceId, int]:
    """Return the bytes of memory of each device of a plan, except MIG devices: there each instance has its own."""
    kinds = {device.id: problem.kind(device.kind) for device in plan.devices}
    return {name: kind.memory for name, kind in kinds.items() if kind.geometry is None}


class Phase(StrEnum):
    """Name the phase that a rollout is in.

    assign: its lanes are being named. prepare: new workers start and warm up. switch: they take over. drain: the old
    lanes finish and stop. rollback: what was new stops, and what left to make room returns. shutdown: all lanes stop.
    """

    ASSIGN = "assign"
    PREPARE = "prepare"
    SWITCH = "switch"
    DRAIN = "drain"
    ROLLBACK = "rollback"
    SHUTDOWN = "shutdown"


class RolloutOutcome(StrEnum):
    """Name how a rollout ended: `COMPLETED` in the new revision, every other in the one before.

    rolled-back: a worker did not come up. rejected: it was never begun, for want of memory or of a device. superseded:
    a later revision was requested before it began. outdated: the revision that it builds on did not come into force.
    aborted: by the operator.
    """

    COMPLETED = "completed"
    ROLLED_BACK = "rolled-back"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    OUTDATED = "outdated"
    ABORTED = "aborted"


class RolloutDurations(msgspec.Struct, frozen=True, kw_only=True):
    """Measure the seconds in each phase, 0 for one that was not reached.

    queued: behind earlier rollouts. prepare: until all new workers were ready, or one failed. switch: until the
    dispatcher had the new lanes. drain: until the old workers had stopped. rollback: from the failure until only the
    old revision was left.
    """

    queued: float = 0.0
    prepare: float = 0.0
    switch: float = 0.0
    drain: float = 0.0
    rollback: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds from the request of the rollout to its end."""
        return self.queued + self.prepare + self.switch + self.drain + self.rollback


class MemoryPolicy(StrEnum):
    """Choose what to do where a device cannot hold the old and the new workers at once.

    refuse: stay in the old revision. gap: drain and stop the old workers of that device before the new ones start; its
    models are not served from there meanwhile. oversubscribe: start them anyway.
    """

    REFUSE = "refuse"
    GAP = "gap"
    OVERSUBSCRIBE = "oversubscribe"
