"""Model applications: graphs of models that one request passes through, with one SLO for the whole.

A stage is a model, the stages that it follows, and its fan-out, a number of requests. A stage after exactly one other
sends that many for each finished request of the other, together: the objects detected in a picture are classified one
by one. A stage after several waits until all their requests are done, and then sends its requests once; a stage after
none does so when the application's request arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.errors import PlanError

MAX_REQUESTS = 10_000  # maximum number of requests that one request may fan out to; more is taken for a typo
PROBABILITY_TOLERANCE = 1e-9  # tolerance for probabilities written as decimals


class Fixed(msgspec.Struct, frozen=True, tag=True):
    """Fan out to a constant number of requests."""

    count: int = 1

    @property
    def mean(self) -> float:
        return float(self.count)

    @property
    def burst(self) -> float:
        """The mean size of the group that a request is sent in, seen by one of its requests."""
        return float(self.count)

    def all_succeed(self, each: float) -> float:
        """Return the probability that all succeed if each does with this probability (the generating function)."""
        return each**self.count

    def draw(self, rng: np.random.Generator, times: int) -> NDArray[np.int64]:
        return np.full(times, self.count)


class Poisson(msgspec.Struct, frozen=True, tag=True):
    """Fan out to a Poisson number of requests, as of independent detections."""

    mean: float

    @property
    def burst(self) -> float:
        return self.mean + 1

    def all_succeed(self, each: float) -> float:
        return math.exp(self.mean * (each - 1))

    def draw(self, rng: np.random.Generator, times: int) -> NDArray[np.int64]:
        return rng.poisson(self.mean, times)


class Choice(msgspec.Struct, frozen=True, tag=True):
    """Fan out to one of several counts, each with its probability; these add up to 1."""

    counts: tuple[int, ...]
    chances: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(count * chance for count, chance in zip(self.counts, self.chances, strict=True))

    @property
    def burst(self) -> float:
        return sum(count**2 * chance for count, chance in zip(self.counts, self.chances, strict=True)) / self.mean

    def all_succeed(self, each: float) -> float:
        return sum(chance * each**count for count, chance in zip(self.counts, self.chances, strict=True))

    def draw(self, rng: np.random.Generator, times: int) -> NDArray[np.int64]:
        return rng.choice(self.counts, times, p=self.chances)


Fanout = Fixed | Poisson | Choice


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one model of an application.

    name: of the stage, unique in its application; after: names of stages that it follows. counted: at run time, the
    number of requests is the number of results of the stage before it; the fan-out is what to plan for. Such a stage
    follows one that is not counted itself, and none follows it.
    """

    name: str
    model: str
    after: tuple[str, ...] = ()
    fanout: Fanout = Fixed()
    counted: bool = False


class Application(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Describe a graph of models.

    slo: latency target in seconds, from the arrival to the last response; attainment: the fraction of requests that
    must meet it. priority: as of a `Model`.
    """

    name: str
    slo: float
    attainment: float = 0.99
    priority: int = 1
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        """Raise PlanError for an invalid graph of stages or an invalid SLO."""
        where = f"application {self.name!r}"
        if not 0 < self.slo < math.inf:
            raise PlanError(f"{where}: a target of {self.slo:g} s must be above 0 and finite")
        if not 0 < self.attainment <= 1:
            raise PlanError(f"{where}: attainment {self.attainment:g} must be above 0 and at most 1")
        if not self.stages:
            raise PlanError(f"{where}: no stages; give at least one, with its model")
        names = [stage.name for stage in self.stages]
        for i, stage in enumerate(self.stages):
            here = f"{where}: stage {stage.name!r}"
            if stage.name in names[:i]:
                raise PlanError(f"{here} is listed twice; give each a name of its own")
            for other in stage.after:
                if other not in names:
                    raise PlanError(f"{here} follows {other!r}, which is not one of its stages {', '.join(names)}")
            if len(set(stage.after)) < len(stage.after):
                raise PlanError(f"{here} follows one stage twice; name each once")
            _check(stage.fanout, here)
        try:
            TopologicalSorter({stage.name: stage.after for stage in self.stages}).prepare()
        except CycleError as error:
            raise PlanError(f"{where}: its stages form a cycle: {' after '.join(error.args[1][::-1])}") from None
        for name, requests in self.visits.items():
            if not requests:
                raise PlanError(f"{where}: stage {name!r} is never reached, as fan-outs before it or its own are 0")
            if requests > MAX_REQUESTS:
                raise PlanError(
                    f"{where}: stage {name!r} gets {requests:g} requests for each; at most {MAX_REQUESTS} make sense"
                )

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """The stages in topological order, otherwise as listed."""
        ordered: dict[str, Stage] = {}
        while len(ordered) < len(self.stages):
            ready = (stage for stage in self.stages if stage.name not in ordered and ordered.keys() >= set(stage.after))
            stage = next(ready)
            ordered[stage.name] = stage
        return tuple(ordered.values())

    @cached_property
    def visits(self) -> dict[str, float]:
        """The mean number of requests of each stage for one of the application."""
        visits: dict[str, float] = {}
        for stage in self.order:
            parent_visits = visits[stage.after[0]] if len(stage.after) == 1 else 1.0
            visits[stage.name] = parent_visits * stage.fanout.mean
        return visits

    def models(self) -> set[str]:
        """Return the names of the models of all stages."""
        return {stage.model for stage in self.stages}

    def uses(self, model: str) -> float:
        """Return the mean number of requests of a model for one of the application."""
        return sum(self.visits[stage.name] for stage in self.stages if stage.model == model)

    def burst(self, model: str) -> float:
        """Return the mean group size that one request of a model sees: itself and those sent with it; 0 if unused."""
        largest = 0.0
        for stage in self.stages:
            if stage.model == model:
                others = [each for each in self.stages if each is not stage and each.model == model]
                siblings = [each for each in others if each.after == stage.after]
                largest = max(largest, stage.fanout.burst + sum(each.fanout.mean for each in siblings))
        return largest

    def finish_times(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return when each stage ends, in seconds from the arrival, if each takes a given number of seconds."""
        finish: dict[str, float] = {}
        for stage in self.order:
            finish[stage.name] = max((finish[other] for other in stage.after), default=0.0) + seconds[stage.name]
        return finish

    def remainder(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds on the longest path after each stage."""
        remaining = dict.fromkeys((stage.name for stage in self.stages), 0.0)
        for stage in reversed(self.order):
            for other in stage.after:
                remaining[other] = max(remaining[other], remaining[stage.name] + seconds[stage.name])
        return remaining

    def length(self, seconds: Mapping[str, float]) -> float:
        """Return the seconds on the longest path through the graph."""
        return max(self.finish_times(seconds).values())

    def success(self, each: Mapping[str, float]) -> float:
        """Return the probability that all requests of one succeed, if those of each model do so independently.

        each: by model, the probability that one of its requests succeeds.
        """
        probability = 1.0
        branch_success = dict.fromkeys(
            (stage.name for stage in self.stages), 1.0
        )  # of everything that follows from one of its requests
        for stage in reversed(self.order):
            success = stage.fanout.all_succeed(each[stage.model] * branch_success[stage.name])
            if len(stage.after) == 1:
                branch_success[stage.after[0]] *= success
            else:
                probability *= success
        return probability


def _check(fanout: Fanout, here: str) -> None:
    """Raise PlanError for an invalid number of requests."""
    match fanout:
        case Fixed(count):
            if not 0 <= count <= MAX_REQUESTS:
                raise PlanError(f"{here}: a fan-out of {count} must be 0 to {MAX_REQUESTS}")
        case Poisson(mean):
            if not 0 <= mean <= MAX_REQUESTS:
                raise PlanError(f"{here}: a fan-out of {mean:g} on average must be 0 to {MAX_REQUESTS}")
        case Choice(counts, chances):
            if len(counts) != len(chances) or not counts:
                raise PlanError(f"{here}: {len(counts)} fan-outs with {len(chances)} chances; give each its own")
            if not all(0 <= count <= MAX_REQUESTS for count in counts):
                raise PlanError(f"{here}: fan-outs of {', '.join(map(str, counts))} must each be 0 to {MAX_REQUESTS}")
            if not all(0 <= chance <= 1 for chance in chances) or abs(sum(chances) - 1) > PROBABILITY_TOLERANCE:
                raise PlanError(
                    f"{here}: the chances {', '.join(f'{chance:g}' for chance in chances)} do not add up to 1"
                )
