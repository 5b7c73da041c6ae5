"""Simulate the best-effort jobs of one device: lanes without a duty cycle, which run steps on what partitions leave.

Jobs come last at every moment: as processes that the system schedules when nobody else computes, and as clients of low
priority on a GPU. So steps go on faster and slower with what lanes leave. On a GPU a step has at most the share that it
was given when it began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cotenant.core.background_job import BackgroundJob, legal_share, step_rate
from cotenant.core.identity import LaneId
from cotenant.core.model import Kind
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import slowdown
from cotenant.predictors import Load
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.runtime.lane_specs import workers_per_partition

STEP = 50  # ‰ to which shares are rounded when a slowdown is predicted: each costs a call of the predictor
_EPSILON = 1e-9  # steps that rounding may leave


@dataclass(slots=True)
class JobRun:
    """A job that runs.

    granted: its claim (‰) on what is idle, of all that are granted; 0: it must not go on. most: on a GPU, the share
    that the step in progress began with; 0: none is. share: that it runs on now. speed: steps per second. steps: done.
    part: of the next step that is done. share_seconds: taken.
    """

    job: BackgroundJob
    granted: int = 0
    most: int = 0
    share: float = 0.0
    speed: float = 0.0
    steps: int = 0
    part: float = 0.0
    share_seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.job.steps is not None and self.steps >= self.job.steps


@dataclass(slots=True)
class _Seat:
    """A lane of the device. share: of its worker, in ‰. loads: by model. beside: of the other partitions."""

    share: float
    loads: dict[str, Load]
    beside: list[list[Load]]


class BackgroundLane:
    """Run the jobs of one device.

    lent: tells the share (‰) with which nobody computes, where shares of processors are lent; otherwise that is what
    lanes that run a batch do not have. until: when jobs end. Call `advance` before anything changes, and `reschedule`
    afterwards.
    """

    def __init__(
        self, problem: Problem, kind: Kind, lent: Callable[[], float] | None, now: float, until: float = math.inf
    ) -> None:
        self.runs: dict[str, JobRun] = {}  # by the job's id
        self.idle_seconds = 0.0  # share-seconds that lanes have left, whether jobs took them or not
        self.capacity = kind.processors or 1.0  # share-seconds in a second
        self.due = math.inf
        self._problem = problem
        self._kind = kind
        self._lent = lent if kind.processors else None
        self._seats: dict[LaneId, _Seat] = {}
        self._busy: dict[LaneId, str] = {}  # lanes that run a batch, and of which model
        self._idle = float(WHOLE)
        self._starting = 0.0  # ‰ of a lane whose batch the processors do not know of yet
        self._at = now
        self._until = until
        self._on_lanes: dict[object, float] = {}  # slowdowns
        self._on_jobs: dict[object, float] = {}

    # What the device serves

    def open(self, lanes: Mapping[LaneId, LaneAssignment]) -> None:
        """Add lanes of the device, or change them."""
        self._on_lanes.clear()
        self._on_jobs.clear()
        for name, lane in lanes.items():
            others = [other for other in lane.device.partitions if other is not lane.partition]
            self._seats[name] = _Seat(
                lane.partition.share / workers_per_partition(lane.partition),
                {
                    each.model: Load(each.model, self._kind.name, each.batch, lane.partition.share)
                    for each in lane.placements
                },
                [
                    [Load(each.model, self._kind.name, each.batch, other.share) for each in other.placements]
                    for other in others
                ],
            )

    def close(self, lane: LaneId) -> None:
        """Take a lane away that runs nothing any more."""
        self._seats.pop(lane, None)
        self._busy.pop(lane, None)

    @property
    def serves(self) -> bool:
        """Whether the device has any lane."""
        return bool(self._seats)

    def begin(self, lane: LaneId, model: str) -> None:
        """Hear that a batch begins; where shares are lent, call `settle` when the processors know of it."""
        self._busy[lane] = model
        self._starting = self._seats[lane].share if self._lent is not None else 0.0

    def settle(self) -> None:
        """Hear that what was said of the processors is in what they tell."""
        self._starting = 0.0

    def end(self, lane: LaneId) -> None:
        self._busy.pop(lane, None)

    def slowdown_of(self, lane: LaneId, model: str) -> float:
        """Return how many times as long a batch takes that begins beside the jobs as they run now."""
        running = [run for run in self.runs.values() if run.share]
        if not running or model not in self._seats[lane].loads:
            return 1.0
        return self._interference(lane, model, running)

    # Its jobs

    def start(self, id: str, run: JobRun) -> None:
        self.runs[id] = run

    def stop(self, id: str) -> None:
        """Take a job away; a step in progress is lost."""
        run = self.runs.pop(id)
        run.granted, run.most, run.share, run.speed, run.part = 0, 0, 0.0, 0.0, 0.0

    # Time

    def advance(self, now: float) -> None:
        """Account for the time until now."""
        now = min(now, self._until)
        seconds = now - self._at
        if seconds > 0:
            self.idle_seconds += seconds * self._idle / WHOLE * self.capacity
            for run in self.runs.values():
                if run.speed:
                    run.share_seconds += seconds * run.share / WHOLE * self.capacity
                    self._progress(run, seconds * run.speed)
            self._at = now

    def _progress(self, run: JobRun, steps: float) -> None:
        run.part += steps
        whole = math.floor(run.part + _EPSILON)
        if whole:
            run.steps += whole
            run.part = max(run.part - whole, 0.0)
            run.most = 0

    def reschedule(self) -> None:
        """Divide what is idle now among the jobs that are granted something."""
        self._idle = max((WHOLE - self._served if self._lent is None else self._lent()) - self._starting, 0.0)
        if self._kind.processors:
            self._share_time()
        else:
            self._begin_steps()
        busy = tuple(sorted(self._busy.items()))
        self.due = math.inf
        for run in self.runs.values():
            run.speed = self._speed(run, busy) if run.share else 0.0
            if run.speed:
                self.due = min(self.due, self._at + self._left(run) / run.speed)

    @property
    def _served(self) -> float:
        """Return the share, in ‰, of lanes that run a batch."""
        return sum(self._seats[lane].share for lane in self._busy)

    def _share_time(self) -> None:
        granted = sum(run.granted for run in self.runs.values() if not run.is_done)
        for run in self.runs.values():
            run.share = self._idle * run.granted / granted if granted and not run.is_done else 0.0

    def _begin_steps(self) -> None:
        """Give steps that begin the largest legal share within their job's part of what is idle, and divide what lanes
        leave among those in progress."""
        starting = [run for run in self.runs.values() if run.granted and not run.most and not run.is_done]
        granted = sum(run.granted for run in self.runs.values() if run.most or run in starting)
        free = self._idle - sum(run.most for run in self.runs.values())
        for run in starting:
            share = legal_share(self._kind, min(self._idle * run.granted / granted, free))
            if step_rate(self._profile(run), run.job.batch, share, 0.0):
                run.most = share
                free -= share
        taken = sum(run.most for run in self.runs.values())
        left = min(1.0, self._idle / taken) if taken else 0.0
        for run in self.runs.values():
            run.share = run.most * left

    def _left(self, run: JobRun) -> float:
        """Return the steps until something must be decided: on processors until the job is done."""
        if not self._kind.processors:
            return 1 - run.part
        return math.inf if run.job.steps is None else run.job.steps - run.steps - run.part

    def _speed(self, run: JobRun, busy: tuple[tuple[LaneId, str], ...]) -> float:
        rate = step_rate(self._profile(run), run.job.batch, run.most or round(run.share), self._kind.processors)
        if run.most:
            rate *= run.share / run.most
        if not busy or not self._problem.interference.interferes:
            return rate
        share = _rounded(run.share)
        key = run.job.name, share, busy
        if key not in self._on_jobs:
            beside = [[self._seats[lane].loads[model]] for lane, model in busy if model in self._seats[lane].loads]
            load = Load(run.job.model, self._kind.name, run.job.batch, share)
            self._on_jobs[key] = slowdown(self._problem, load, beside)
        return rate / self._on_jobs[key]

    def _interference(self, lane: LaneId, model: str, running: list[JobRun]) -> float:
        if not self._problem.interference.interferes:
            return 1.0
        shares = tuple((run.job.name, _rounded(run.share)) for run in running)
        key = lane, model, shares
        if key not in self._on_lanes:
            seat = self._seats[lane]
            jobs = [
                [Load(run.job.model, self._kind.name, run.job.batch, share)]
                for run, (_, share) in zip(running, shares, strict=True)
            ]
            victim = seat.loads[model]
            beside = slowdown(self._problem, victim, [*seat.beside, *jobs])
            self._on_lanes[key] = max(1.0, beside / slowdown(self._problem, victim, seat.beside))
        return self._on_lanes[key]

    def _profile(self, run: JobRun) -> Profile:
        return self._problem.profiles[run.job.model, self._kind.name]


def _rounded(share: float) -> int:
    return min(max(STEP, round(share / STEP) * STEP), WHOLE)
