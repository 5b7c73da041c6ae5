"""Reproduce Figure 14: SLO violations at the largest schedulable rate, with and without interference prediction.

Section 5.2. The rate rises until neither of two planners, which differ only in that prediction, has a plan; the last
plan is run. Here it is simulated with the true interference of `ground_truth`. The published program plans for about
the 99th percentile of a Poisson rate; our planners add headroom by the forecast, so that violations are due to
interference they do not predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners.largest_rate import largest_scale
from cotenant.planners.portfolio import choose_planner
from experiments.gpulet import fig17, paper
from experiments.gpulet.fig13 import DEFAULT_SETS
from experiments.gpulet.ground_truth import true_environment
from experiments.gpulet.max_rates import group_model_set
from experiments.gpulet.model_sets import model_set
from experiments.gpulet.schedulability import REQUESTS, Trial, attainment, largest_plan
from experiments.gpulet.systems import System, planner_problem
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "SLO violations with and without interference prediction (gpulet, Figure 14)"

# Each pair: without and with interference prediction.
PAIRS = tuple(
    (
        System(name=name, origin=origin, planner=planner, interference=False),
        System(name=f"{name}+int", origin=origin, planner=planner),
    )
    for name, origin, planner in (
        ("gpulet", "published", "elastic"),
        ("gpulet", "cotenant", "elastic"),
        ("elastic-plus", "cotenant", "elastic-plus"),
        ("geometry", "cotenant", "geometry"),
    )
)
NOT_SCHEDULABLE = "not schedulable"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold SLO violations at a rate in requests/s over the whole group.

    rate: the largest that either planner of the pair considers schedulable; missed: percentage late or dropped at that
    rate, None if the system has no plan. own_rate, own_missed: the same at the largest rate for which the system itself
    has a plan. paper: its statement on missed.
    """

    profiles: str
    group: str
    system: str
    origin: str
    rate: float
    verdict: str
    missed: float | None
    own_rate: float
    own_missed: float | None
    paper: str | None


class SchedulableRate(msgspec.Struct, frozen=True):
    """Hold the largest rate with a plan, in requests/s over all models, and the fraction missed at that rate."""

    rate: float
    missed: float | None


def run(options: Options) -> list[Row]:
    trials = [
        Trial(group=group, requests=REQUESTS * (9 if options.full else 3), seed=options.seed)
        for name in options.profiles or DEFAULT_SETS
        for pair in PAIRS
        for system in pair
        for group in fig17.groups(name, system)[:: options.every]
    ]
    for name in {trial.group.model_set for trial in trials}:
        model_set(name)  # missing data is an error here, before processes start
    rates = run_tasks(schedulable_rate, trials, options, "largest rates")
    by_trial = {
        (trial.group.model_set, trial.group.name, trial.group.system): found
        for trial, found in zip(trials, rates, strict=True)
    }
    rows = []
    for (name, group, system), found in by_trial.items():
        pair = next(pair for pair in PAIRS if system in pair)
        rate = max(by_trial[name, group, other].rate for other in pair)
        missed = found.missed if found.rate == rate else None
        rows.append(
            Row(
                profiles=name,
                group=group,
                system=system.name,
                origin=system.origin,
                rate=rate,
                verdict=_verdict(missed),
                missed=_percent(missed),
                own_rate=found.rate,
                own_missed=_percent(found.missed),
                paper=paper.FIG14.get((group, system.name)),
            )
        )
    return rows


def schedulable_rate(trial: Trial) -> SchedulableRate:
    """Find and simulate the largest schedulable rate."""
    group = trial.group
    scale, plan = _schedulable_plan(trial)
    if plan is None:
        return SchedulableRate(0.0, None)
    environment = true_environment(group_model_set(group), group.devices, trial.seed)
    return SchedulableRate(scale * math.fsum(group.mix.values()), 1 - attainment(plan, environment, trial, scale))


def _schedulable_plan(trial: Trial) -> tuple[float, Plan | None]:
    """Return the largest multiple of the mix for which the system has a plan with headroom, and the plan."""
    group = trial.group
    profiled_set = group_model_set(group)
    if group.system.origin == "published":
        return largest_plan(group.system, profiled_set, group.mix, group.devices, profiled_set.units[0])
    problem = msgspec.structs.replace(
        planner_problem(group.system, profiled_set, group.devices), rates=group.mix, objective="rate"
    )
    choice = choose_planner(group.system.planner)
    plan = largest_scale(choice.plan, problem, quick=choice.quick)
    return (plan.scale, plan) if plan.scale else (0.0, None)


def _verdict(missed: float | None) -> str:
    if missed is None:
        return NOT_SCHEDULABLE
    return "over 1 %" if missed > 1 - paper.ATTAINMENT else "under 1 %"


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw violations at each system's own largest rate, so that every system has a bar."""
    bars = [
        Bar(row.profiles, row.group, row.system, row.origin, row.own_missed)
        for row in rows
        if row.own_missed is not None
    ]
    lines = [("SLO", 100 * (1 - paper.ATTAINMENT))]
    grouped(
        path,
        bars,
        lines=lines,
        ylabel="late or dropped at its own largest rate, %",
        title="gpulet, Figure 14",
        columns=1,
    )
