"""Describe a best-effort job as planners and the simulator see it: steps with a profile, and what it may have.

`core.job` describes the job itself: what it computes, who submitted it, how it stands.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.job import HEAVIEST
from cotenant.core.model import Kind
from cotenant.core.profile import MAX_BATCH, Profile
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError

_ROUNDING = 1e-6  # ‰


class BackgroundJob(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a job of equal steps. Raises PlanError for values out of range.

    model, batch: each step takes as long as a batch of that many rows of that profile. priority: weight of its part of
    what is idle. memory: bytes that it takes of a device; None: what its profile says. steps: until it is done; None:
    it never is. deadline: seconds after the start by which it should be done.
    """

    name: str
    model: str
    batch: int = 1
    priority: int = 1
    memory: int | None = None
    steps: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError("a job has no name; give it one")
        where = f"job {self.name!r}"
        if not 1 <= self.batch <= MAX_BATCH:
            raise PlanError(f"{where}: a batch of {self.batch} must be between 1 and {MAX_BATCH}")
        if not 1 <= self.priority <= HEAVIEST:
            raise PlanError(f"{where}: a priority of {self.priority} must be between 1 and {HEAVIEST}")
        if self.memory is not None and self.memory < 0:
            raise PlanError(f"{where}: a memory of {self.memory} bytes must be at least 0")
        if self.steps is not None and self.steps < 1:
            raise PlanError(f"{where}: {self.steps} steps must be at least 1")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise PlanError(f"{where}: a deadline of {self.deadline:g} s must be above 0 and finite")
        if self.deadline is not None and self.steps is None:
            raise PlanError(f"{where}: a deadline is for a job that ends; give it steps, or leave the deadline out")


def step_rate(profile: Profile, batch: int, share: int, processors: float) -> float:
    """Return the steps per second of a job that runs on a share (‰) all the time; 0 on a share too small for it.

    processors: of the device, whose smallest shares of time do as much less as they are smaller; 0 where it is a GPU,
    on which nothing runs on less than was profiled.
    """
    if share < 1:
        return 0.0
    latency = profile.latency(batch, min(share, WHOLE))
    if latency < math.inf:
        return 1 / latency
    if not processors:
        return 0.0
    profiled = {point.share: profile.latency(batch, point.share) for point in profile.points}
    smallest = min((known for known, seconds in profiled.items() if seconds < math.inf), default=0)
    return share / smallest / profiled[smallest] if share < smallest else 0.0


def legal_share(kind: Kind, share: float) -> int:
    """Return the largest legal share of a device within a share (‰) that is idle; 0 where there is none."""
    return max((cut for cut in kind.cuts if cut <= share + _ROUNDING), default=0)
