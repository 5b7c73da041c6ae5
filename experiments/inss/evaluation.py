"""Evaluate InSS and its baselines at the same rates: plans, and what the simulator makes of them.

Rates begin as in InSS' evaluation and move by a tenth of their range from one moment to the next, every other model's
up and the others' down, turning at the ends. At each moment every system plans, InSS with its plan of the moment before
in force, and the simulator serves Poisson arrivals by that plan for some seconds. Latencies under co-location are those
of InSS' model fitted to the V100, for all systems alike.

*Throughput* is h of equation 1, what the batches of a plan sustain: InSS' figures exceed what its program ever asks for
(BDA-Gpulet's 4,188 requests/s, where its ranges add up to 2,150 at most), so they cannot be answered requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from cotenant.core.plan import Plan
from cotenant.measure.report import ModelReport
from cotenant.planners import Problem, load_planner
from cotenant.planners.rates import at_rates
from cotenant.sim.run import simulate
from experiments.inss import cluster
from experiments.inss.bda_gpulet import with_decided_batches
from experiments.inss.trained import Training, problem_of, trained

MOMENTS, STEP = 5, 0.1  # STEP: of a rate's range
SECONDS = 5.0  # simulated at each moment

INSS, INSS_NI, GPULET, GSLICE, IGNITER, OURS = "InSS", "InSS-ni", "gpulet", "GSLICE", "iGniter", "geometry"
BDA_GPULET = "BDA-Gpulet"  # gpulet with the batches of InSS' Algorithm 1
PLANNERS = {GPULET: "elastic", GSLICE: "gslice", IGNITER: "igniter", OURS: "geometry"}


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a system. name: one of those above; seed: of the training and of arrivals; devices: at most."""

    name: str
    seed: int
    models: tuple[str, ...] = cluster.SIX
    devices: int = cluster.DEVICES


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Report one moment.

    offered, sustained: requests/s of all models; unserved: of these, what the plan leaves out. late, dropped: fraction
    of requests. devices: in use; shares: the sum of all, in devices. same_shares: whether only batches changed. models:
    what was simulated; batches: the largest that were planned, by model.
    """

    offered: float
    sustained: float
    unserved: float
    late: float
    dropped: float
    devices: int
    shares: float
    same_shares: bool
    models: dict[str, ModelReport]
    batches: dict[str, int]


def rates_at(problem: Problem, moment: int) -> dict[str, float]:
    low, high = (cluster.scaled(problem, which) for which in ("low", "high"))
    rates = {}
    for n, (name, least, most) in enumerate(zip(problem.rates, low, high, strict=True)):
        position = (problem.rates[name] - least) / (most - least) + (STEP if n % 2 else -STEP) * moment
        position = abs(position) % 2
        rates[name] = least + (most - least) * min(position, 2 - position)
    return rates


def evaluate(system: System) -> list[Moment]:
    """Plan and simulate at every moment."""
    truth = cluster.problem(system.models, system.devices)
    asked = _asked(system)
    planner = load_planner(PLANNERS.get(GPULET if system.name == BDA_GPULET else system.name, "inss"))
    moments: list[Moment] = []
    current: Plan | None = None
    for number in range(MOMENTS):
        rates = rates_at(truth, number)
        problem = at_rates(asked, rates)
        plan = planner(msgspec.structs.replace(problem, current=current))
        if system.name == BDA_GPULET:
            plan = with_decided_batches(problem, plan)
        moments.append(_moment(at_rates(truth, rates), plan, current, system.seed + number))
        current = plan
    return moments


def _asked(system: System) -> Problem:
    """Return the problem as a system sees it."""
    if system.name in (INSS, INSS_NI):
        training = Training(
            seed=system.seed, models=system.models, devices=system.devices, interference=system.name == INSS
        )
        return msgspec.structs.replace(problem_of(training), policy=trained(training).policy)
    asked = cluster.problem(system.models, system.devices)
    if system.name in (GPULET, BDA_GPULET):
        asked = msgspec.structs.replace(asked, fleet=(msgspec.structs.replace(asked.fleet[0], max_partitions=2),))
    return asked


def _moment(problem: Problem, plan: Plan, before: Plan | None, seed: int) -> Moment:
    report = simulate(plan, problem, seconds=SECONDS, seed=seed)
    offered = sum(model.offered for model in report.models)
    answered = sum(model.served for model in report.models)
    in_time = sum(model.goodput for model in report.models)
    placements = [p for device in plan.devices for partition in device.partitions for p in partition.placements]
    return Moment(
        offered=offered,
        sustained=sum(p.procs * p.batch / p.duty for p in placements),
        unserved=sum(plan.unserved.values()),
        late=(answered - in_time) / offered,
        dropped=1 - answered / offered,
        devices=plan.devices_used,
        shares=sum(partition.share for device in plan.devices for partition in device.partitions) / 1000,
        same_shares=before is not None and _shares(plan) == _shares(before),
        models={model.model: model for model in report.models},
        batches={name: max(p.batch for p in placements if p.model == name) for name in {p.model for p in placements}},
    )


def _shares(plan: Plan) -> list[tuple[str, int, tuple[str, ...]]]:
    return sorted(
        (str(device.id), partition.share, tuple(p.model for p in partition.placements))
        for device in plan.devices
        for partition in device.partitions
    )


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half; the values at its ends count by the part that lies within it."""
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = len(ordered) / 4
    edges = np.arange(len(ordered) + 1)
    within = np.minimum(edges[1:], len(ordered) - cut) - np.maximum(edges[:-1], cut)
    weights = np.clip(within, 0.0, 1.0)
    return float((ordered * weights).sum() / weights.sum())


def interval(values: Sequence[float], *, samples: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the interquartile mean over runs, by the percentile bootstrap over runs."""
    if len(values) == 1:
        return values[0], values[0]
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.asarray(values, dtype=float), (samples, len(values)))
    low, high = np.quantile([interquartile_mean(row) for row in drawn.tolist()], (0.025, 0.975))
    return float(low), float(high)
