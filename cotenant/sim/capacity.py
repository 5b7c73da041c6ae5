"""Find the capacity of a plan by simulation: the largest multiple of the load at which all SLOs hold.

The same few seeds are simulated at each multiple. A model's attainment is the mean over them, with a 95 % confidence
interval by Student's t over the seeds, which are independent while requests within a run are not. Bisection finds three
multiples: up to which the means meet all SLOs, up to which they surely do, and from which one is surely violated.
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

PRECISION = 0.01  # relative, of the multiples
MAX_MULTIPLE = 64.0  # beyond, the load is negligible for the plan
STRIDE = 8  # first stride of the search, in steps of PRECISION
CONFIDENCE = 0.95
TRACE_BINS = 20  # of a run, in which requests of a trace are counted


class Attainment(msgspec.Struct, frozen=True):
    """Estimate the SLO attainment of a model. mean: over seeds. half: half the width of the 95 % confidence interval, 0
    for a single seed, which has none. required: by the SLO."""

    mean: float
    half: float
    required: float

    @property
    def lacks(self) -> float:
        """Return the shortfall from the required attainment; negative if there is headroom."""
        return self.required - self.mean


class LoadLevel(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a plan attains at a multiple of the load. models: those with requests."""

    multiple: float
    models: dict[str, Attainment]

    @property
    def slos_met(self) -> bool:
        return all(model.mean >= model.required for model in self.models.values())

    @property
    def surely_met(self) -> bool:
        return all(model.mean - model.half >= model.required for model in self.models.values())

    @property
    def surely_violated(self) -> bool:
        return any(model.mean + model.half < model.required for model in self.models.values())

    @property
    def worst(self) -> str:
        """Return the model that violates its SLO most or comes nearest to it; empty without requests."""
        return max(self.models, key=lambda name: self.models[name].lacks, default="")


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the capacity of a plan. multiple: of the load, up to which all SLOs hold. low, high: its 95 % confidence
    interval; infinite if no SLO was ever violated. limit: the model whose SLO is violated first. levels: all simulated
    ones, by multiple."""

    multiple: float
    low: float
    high: float
    limit: str
    levels: tuple[LoadLevel, ...]


class SimulationTask(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a run to simulate: a plan under a workload. lend: idle share of processors."""

    problem: Problem
    plan: Plan
    workload: Workload
    seconds: float
    seed: int
    lend: bool = False


def run_simulation(task: SimulationTask) -> Report:
    """Simulate a task."""
    return simulate(task.plan, task.problem, task.workload, seconds=task.seconds, seed=task.seed, lend=task.lend)


def attainment_at(multiple: float, reports: Sequence[Report]) -> LoadLevel:
    """Summarise runs that differ in their seeds."""
    models = {}
    for rows in zip(*(report.models for report in reports), strict=True):
        stayed = [row.stayed for row in rows]
        parts = [row.attainment for row in rows if row.attainment is not None]
        if parts:
            mean = sum(n * (row.attainment or 0.0) for n, row in zip(stayed, rows, strict=True)) / sum(stayed)
            models[rows[0].model] = Attainment(mean, interval_half_width(parts), rows[0].required)
    return LoadLevel(multiple=multiple, models=models)


def find_capacity(at: Callable[[float], LoadLevel]) -> Capacity:
    """Bisect over multiples that are powers of 1 + PRECISION. at: simulates the plan at a multiple."""
    levels: dict[int, LoadLevel] = {}

    def level(step: int) -> LoadLevel:
        if step not in levels:
            levels[step] = at((1 + PRECISION) ** step)
        return levels[step]

    limit = round(math.log(MAX_MULTIPLE) / math.log1p(PRECISION))
    met = _last(lambda step: level(step).slos_met, limit)
    low = _last(lambda step: level(step).surely_met, limit)
    high = _last(lambda step: not level(step).surely_violated, limit)
    first = min((step for step, each in levels.items() if not each.slos_met), default=None)
    return Capacity(
        multiple=_multiple(met, limit),
        low=_multiple(low, limit),
        high=_multiple(high, limit),
        limit="" if first is None else levels[first].worst,
        levels=tuple(levels[step] for step in sorted(levels)),
    )


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """Return the last step that holds, given that all before it do: `limit` if all do, -limit if none does."""
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
    return 0.0 if step <= -limit else math.inf if step >= limit else (1 + PRECISION) ** step


def interval_half_width(values: Sequence[float]) -> float:
    """Return half the width of the confidence interval of a mean."""
    if len(values) < 2:
        return 0.0
    return _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _student(freedom: int) -> float:
    """Return the quantile of Student's t for a two-sided interval (Abramowitz and Stegun, 26.7.5, first terms)."""
    if freedom <= 3:
        return (12.706, 4.303, 3.182)[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    second, third = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + second / freedom + third / freedom**2


def peak_rates(workload: Workload, seconds: float, seed: int) -> dict[str, float]:
    """Return the requests/s to plan for, by name: the highest rate of a source before `seconds`, averaged over a
    twentieth of it for traces. Closed-loop sources, whose rate depends on the answers, are left out."""
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
            counts = np.zeros(TRACE_BINS)  # chunk by chunk: a trace may be longer than memory
            for times, _ in generate_arrivals(Workload({name: source}), seconds, seed):
                counts += np.histogram(times, bins=TRACE_BINS, range=(0.0, seconds))[0]
            rates[name] = float(counts.max()) * TRACE_BINS / seconds
    return rates
