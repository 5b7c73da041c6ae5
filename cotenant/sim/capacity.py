"""How much a plan bears: the largest multiple of the requests at which it keeps every promise, in the simulator.

At each multiple the same few seeds are simulated. What a model attains is the mean over them, and its 95 % confidence
interval that of Student's t over the seeds, which are independent, while requests within a run are not. Bisection over
multiples then finds three: where the means keep all promises, up to where they are surely kept, and from where one is
surely broken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cotenant.core.plan import Plan
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals
from cotenant.workload.sources import Curve, Gamma, MarkovModulated, Poisson, Uniform

CLOSE = 0.01  # how near multiples are found
LARGEST = 64.0  # multiple that is looked at; beyond, nothing is asked of the plan
STRIDE = 8  # steps of CLOSE at first
CONFIDENCE = 0.95
WHILES = 20  # parts of a run in which requests of a trace are counted


class Attainment(msgspec.Struct, frozen=True):
    """The fraction of a model's requests answered in time: mean over seeds, half the width of its 95 % confidence
    interval (0 for a single seed, of which nothing can be said), and what is promised."""

    mean: float
    half: float
    required: float

    @property
    def lacks(self) -> float:
        """How far it is from the promise; below 0 where there is room."""
        return self.required - self.mean


class LoadLevel(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a plan at a multiple of the requests. models: those that were asked for something."""

    multiple: float
    models: dict[str, Attainment]

    @property
    def kept(self) -> bool:
        return all(it.mean >= it.required for it in self.models.values())

    @property
    def surely_kept(self) -> bool:
        return all(it.mean - it.half >= it.required for it in self.models.values())

    @property
    def surely_broken(self) -> bool:
        return any(it.mean + it.half < it.required for it in self.models.values())

    @property
    def worst(self) -> str:
        """The model that breaks its promise most or comes nearest to it; empty where nothing was asked."""
        return max(self.models, key=lambda name: self.models[name].lacks, default="")


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """multiple: of the requests, up to which every promise is kept. low, high: its 95 % confidence interval; infinite
    where nothing was ever broken. limit: the model whose promise breaks first. levels: all that were looked at, by
    multiple."""

    multiple: float
    low: float
    high: float
    limit: str
    levels: tuple[LoadLevel, ...]


class SimulationTask(msgspec.Struct, frozen=True, kw_only=True):
    """One run to be made: a plan under a workload."""

    problem: Problem
    plan: Plan
    workload: Workload
    seconds: float
    seed: int


def run_simulation(look: SimulationTask) -> Report:
    return simulate(look.problem, look.plan, look.workload, seconds=look.seconds, seed=look.seed)


def attainment_at(multiple: float, reports: Sequence[Report]) -> LoadLevel:
    """What models attain over runs that differ in their seeds."""
    models = {}
    for rows in zip(*(report.models for report in reports), strict=True):
        stayed = [row.stayed for row in rows]
        parts = [row.attainment for row in rows if row.attainment is not None]
        if parts:
            mean = sum(n * (row.attainment or 0.0) for n, row in zip(stayed, rows, strict=True)) / sum(stayed)
            models[rows[0].model] = Attainment(mean, _half(parts), rows[0].required)
    return LoadLevel(multiple=multiple, models=models)


def find_capacity(at: Callable[[float], LoadLevel]) -> Capacity:
    """Bisection over multiples that are powers of 1 + CLOSE. at: what becomes of the plan at a multiple."""
    known: dict[int, LoadLevel] = {}

    def look(step: int) -> LoadLevel:
        if step not in known:
            known[step] = at((1 + CLOSE) ** step)
        return known[step]

    limit = round(math.log(LARGEST) / math.log1p(CLOSE))
    kept = _last(lambda step: look(step).kept, limit)
    low = _last(lambda step: look(step).surely_kept, limit)
    high = _last(lambda step: not look(step).surely_broken, limit)
    first = min((step for step, it in known.items() if not it.kept), default=None)
    return Capacity(
        multiple=_multiple(kept, limit),
        low=_multiple(low, limit),
        high=_multiple(high, limit),
        limit="" if first is None else known[first].worst,
        levels=tuple(known[step] for step in sorted(known)),
    )


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """The last step that holds, where all before it do: `limit` where all do, -limit where none does."""
    low = high = 0
    stride = STRIDE
    if holds(0):
        while low == high:
            high = min(low + stride, limit)
            if holds(high):
                if high == limit:
                    return limit
                low, stride = high, 2 * stride
    else:
        while low == high:
            low = max(high - stride, -limit)
            if not holds(low):
                if low == -limit:
                    return -limit
                high, stride = low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _multiple(step: int, limit: int) -> float:
    return 0.0 if step <= -limit else math.inf if step >= limit else (1 + CLOSE) ** step


def _half(values: Sequence[float]) -> float:
    """Half the width of the confidence interval of a mean."""
    if len(values) < 2:
        return 0.0
    return _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _student(freedom: int) -> float:
    """Quantile of Student's t for a two-sided interval (Abramowitz and Stegun, 26.7.5, where its first terms do)."""
    if freedom <= 3:
        return (12.706, 4.303, 3.182)[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    second, third = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + second / freedom + third / freedom**2


def peak_rates(workload: Workload, seconds: float, seed: int) -> dict[str, float]:
    """Requests/s to plan for, by name: the highest rate that a source has before `seconds`, on average over a while
    where it is not said in advance. Those that depend on how fast they are answered are left out."""
    rates = {}
    for name, source in workload.sources.items():
        if isinstance(source, Curve):
            reached = [rate for time, rate in source.points if time < seconds]
            rates[name] = max([*reached, source.at(math.nextafter(seconds, 0.0))])
        elif isinstance(source, MarkovModulated):
            rates[name] = max(source.rates)
        elif isinstance(source, Poisson | Gamma | Uniform):
            rates[name] = source.rate
        elif source.rate is not None:
            counts = np.zeros(WHILES)  # chunk by chunk: a trace may be longer than memory
            for times, _ in generate_arrivals(Workload({name: source}), seconds, seed):
                counts += np.histogram(times, bins=WHILES, range=(0.0, seconds))[0]
            rates[name] = float(counts.max()) * WHILES / seconds
    return rates
