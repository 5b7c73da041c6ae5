"""Applications: several models that one request goes through, with one target for the whole.

A stage is a model, what it comes after, and its fan-out: how many requests of it there are. A stage that comes after
one other makes that many for each finished request of the other, at once: the objects found in a picture are looked at
one by one. One that comes after several waits until all their requests are done, and is then made once, that many
times; so is one that comes after none, when the application's request arrives.
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

MOST = 10_000  # requests that one may become at most: more is a slip of the pen
SLACK = 1e-9  # chances are written in decimals


class Fixed(msgspec.Struct, frozen=True, tag=True):
    """Always so many."""

    count: int = 1

    @property
    def mean(self) -> float:
        return float(self.count)

    @property
    def burst(self) -> float:
        """How many are made together, as one of them finds it: itself and the others, on average."""
        return float(self.count)

    def chance(self, each: float) -> float:
        """How likely all succeed where each does with that chance (the generating function)."""
        return each**self.count

    def draw(self, rng: np.random.Generator, times: int) -> NDArray[np.int64]:
        return np.full(times, self.count)


class Poisson(msgspec.Struct, frozen=True, tag=True):
    """A random number with this mean, as many as things that turn up independently."""

    mean: float

    @property
    def burst(self) -> float:
        return self.mean + 1

    def chance(self, each: float) -> float:
        return math.exp(self.mean * (each - 1))

    def draw(self, rng: np.random.Generator, times: int) -> NDArray[np.int64]:
        return rng.poisson(self.mean, times)


class Choice(msgspec.Struct, frozen=True, tag=True):
    """One of these counts, each with its chance; the chances add up to 1."""

    counts: tuple[int, ...]
    chances: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(count * chance for count, chance in zip(self.counts, self.chances, strict=True))

    @property
    def burst(self) -> float:
        return sum(count**2 * chance for count, chance in zip(self.counts, self.chances, strict=True)) / self.mean

    def chance(self, each: float) -> float:
        return sum(chance * each**count for count, chance in zip(self.counts, self.chances, strict=True))

    def draw(self, rng: np.random.Generator, times: int) -> NDArray[np.int64]:
        return rng.choice(self.counts, times, p=self.chances)


Fanout = Fixed | Poisson | Choice


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One model of an application. name: of the stage, within its application. after: names of stages.

    counted: how many requests there are is what the stage before it finds, where models really run; the fan-out is what
    to plan for. Such a stage comes after one whose requests are not counted themselves, and before none.
    """

    name: str
    model: str
    after: tuple[str, ...] = ()
    fanout: Fanout = Fixed()
    counted: bool = False


class Application(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A graph of models. slo: seconds from the arrival to the last answer; attainment: the fraction in time."""

    name: str
    slo: float
    attainment: float = 0.99
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        """Raises PlanError for what is no graph of stages, or no promise."""
        where = f"application {self.name!r}"
        if not 0 < self.slo < math.inf:
            raise PlanError(f"{where}: a target of {self.slo:g} s must lie above 0 and be finite")
        if not 0 < self.attainment <= 1:
            raise PlanError(f"{where}: attainment {self.attainment:g} must lie above 0 and at most at 1")
        if not self.stages:
            raise PlanError(f"{where}: no stages; give at least one, with its model")
        names = [stage.name for stage in self.stages]
        for i, stage in enumerate(self.stages):
            here = f"{where}: stage {stage.name!r}"
            if stage.name in names[:i]:
                raise PlanError(f"{here} stands twice; give each a name of its own")
            for other in stage.after:
                if other not in names:
                    raise PlanError(f"{here}: after {other!r}, which is none of its stages {', '.join(names)}")
            if len(set(stage.after)) < len(stage.after):
                raise PlanError(f"{here}: after one stage twice; name each once")
            _check(stage.fanout, here)
        try:
            TopologicalSorter({stage.name: stage.after for stage in self.stages}).prepare()
        except CycleError as error:
            raise PlanError(
                f"{where}: its stages go round in a circle: {' after '.join(error.args[1][::-1])}"
            ) from None
        for name, requests in self.visits.items():
            if not requests:
                raise PlanError(f"{where}: stage {name!r} is never reached, as fan-outs before it or its own are 0")
            if requests > MOST:
                raise PlanError(
                    f"{where}: stage {name!r} gets {requests:g} requests for each; at most {MOST} make sense"
                )

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """The stages, each behind those it comes after; as they stand where that is so already."""
        found: dict[str, Stage] = {}
        while len(found) < len(self.stages):
            ready = (stage for stage in self.stages if stage.name not in found and found.keys() >= set(stage.after))
            stage = next(ready)
            found[stage.name] = stage
        return tuple(found.values())

    @cached_property
    def visits(self) -> dict[str, float]:
        """Requests of each stage for one of the application, on average."""
        found: dict[str, float] = {}
        for stage in self.order:
            before = found[stage.after[0]] if len(stage.after) == 1 else 1.0
            found[stage.name] = before * stage.fanout.mean
        return found

    def models(self) -> set[str]:
        return {stage.model for stage in self.stages}

    def uses(self, model: str) -> float:
        """Requests of a model for one of the application, on average."""
        return sum(self.visits[stage.name] for stage in self.stages if stage.model == model)

    def burst(self, model: str) -> float:
        """Requests of a model that are made together, as one of them finds it on average; 0 of one that is not used."""
        most = 0.0
        for stage in self.stages:
            if stage.model == model:
                beside = [it for it in self.stages if it is not stage and (it.model, it.after) == (model, stage.after)]
                most = max(most, stage.fanout.burst + sum(it.fanout.mean for it in beside))
        return most

    def finish_times(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """When each stage ends at the latest, in seconds from the arrival, if each takes so long."""
        found: dict[str, float] = {}
        for stage in self.order:
            found[stage.name] = max((found[other] for other in stage.after), default=0.0) + seconds[stage.name]
        return found

    def remainder(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """What comes after each stage on the longest way to the end, in seconds."""
        found = dict.fromkeys((stage.name for stage in self.stages), 0.0)
        for stage in reversed(self.order):
            for other in stage.after:
                found[other] = max(found[other], found[stage.name] + seconds[stage.name])
        return found

    def length(self, seconds: Mapping[str, float]) -> float:
        """The longest way through the graph, in seconds."""
        return max(self.finish_times(seconds).values())

    def success(self, each: Mapping[str, float]) -> float:
        """How likely all requests of one succeed, where those of each model do with that chance, independently."""
        whole = 1.0
        branch = dict.fromkeys((stage.name for stage in self.stages), 1.0)  # what follows from one request of it
        for stage in reversed(self.order):
            chance = stage.fanout.chance(each[stage.model] * branch[stage.name])
            if len(stage.after) == 1:
                branch[stage.after[0]] *= chance
            else:
                whole *= chance
        return whole


def _check(fanout: Fanout, here: str) -> None:
    """Raises PlanError for what is no number of requests."""
    match fanout:
        case Fixed(count):
            if not 0 <= count <= MOST:
                raise PlanError(f"{here}: a fan-out of {count} must be 0 to {MOST}")
        case Poisson(mean):
            if not 0 <= mean <= MOST:
                raise PlanError(f"{here}: a fan-out of {mean:g} on average must be 0 to {MOST}")
        case Choice(counts, chances):
            if len(counts) != len(chances) or not counts:
                raise PlanError(f"{here}: {len(counts)} fan-outs with {len(chances)} chances; give each its own")
            if not all(0 <= count <= MOST for count in counts):
                raise PlanError(f"{here}: fan-outs of {', '.join(map(str, counts))} must each be 0 to {MOST}")
            if not all(0 <= chance <= 1 for chance in chances) or abs(sum(chances) - 1) > SLACK:
                raise PlanError(
                    f"{here}: the chances {', '.join(f'{chance:g}' for chance in chances)} do not add up to 1"
                )
