"""What an autoscaling policy is told: the world at one moment, and as much of its past as the policy needs."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Problem


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen in an interval that ended at `time`.

    seconds: its length. rates: requests/s offered, by model or application. utilisation: part of all ready devices
    during which batches ran, from 0 to 1. concurrency: requests waiting or being executed at its end, by model or
    application; over many intervals their mean is that over time. ready: devices by kind. wanted: what the policy
    answered at its end, by kind; empty where it was not asked.
    """

    time: float
    seconds: float
    rates: dict[str, float] = {}
    utilisation: float = 0.0
    concurrency: dict[str, float] = {}
    ready: dict[str, int] = {}
    wanted: dict[str, int] = {}


class ScalingContext(msgspec.Struct, frozen=True, kw_only=True):
    """All that a policy may decide by.

    problem: with the rates to plan for; its fleet has the price of each kind, and how many there are at most. ready,
    launching: devices by kind, those on their way in the second. launch_seconds: by kind, from the request for a device
    until it can be used; 0 where a kind is missing. plan: in force. history: observations, the oldest first and that
    of now last, as far back as the policy's `horizon`.
    """

    now: float
    problem: Problem
    plan: Plan
    ready: dict[str, int]
    launching: dict[str, int] = {}
    launch_seconds: dict[str, float] = {}
    history: tuple[Observation, ...] = ()

    @property
    def utilisation(self) -> float:
        """The utilisation of all ready devices in the latest interval; 0 where nothing was observed."""
        return self.history[-1].utilisation if self.history else 0.0

    @property
    def concurrency(self) -> float:
        """The mean number of requests in the system in the latest interval, over all models."""
        return sum(self.history[-1].concurrency.values()) if self.history else 0.0

    def since(self, seconds: float) -> tuple[Observation, ...]:
        """Return the observations of the last so many seconds, at least the latest; none where there is none."""
        start = self.now - seconds
        recent = tuple(seen for seen in self.history if seen.time > start)
        return recent or self.history[-1:]

    def allocated(self, kind: str) -> int:
        """Return how many devices of a kind are ready or on their way."""
        return self.ready.get(kind, 0) + self.launching.get(kind, 0)

    def limit(self, kind: str) -> float:
        """Return how many devices of a kind there may be at most; `inf` where there is no limit."""
        count = self.problem.kind(kind).count
        return math.inf if count is None else count


class ScalingPolicy(Protocol):
    """Say how many devices of each kind are wanted, ready or on their way; a kind that is missing is to stay as it is.

    horizon: seconds of history that it needs.
    """

    @property
    def horizon(self) -> float: ...

    def __call__(self, context: ScalingContext) -> dict[str, int]: ...
