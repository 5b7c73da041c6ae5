"""Figure 14: requests that are late or dropped at the largest rate that is taken for schedulable, where the planner
reckons with neighbours and where it does not.

Section 5.2. Rates rise until neither of two planners, which differ in that alone, has a plan for them; the last one
that had is put on the machines. Here it is simulated, in a world where neighbours do what `world` says. The published
program plans for about the 99th percentile of a Poisson rate; planners here make room for chance by the forecast, so
that what breaks targets is what they do not know of neighbours.
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
from experiments.gpulet.fig13 import QUICK
from experiments.gpulet.ground_truth import world
from experiments.gpulet.max_rates import players
from experiments.gpulet.model_sets import cast
from experiments.gpulet.schedulability import LOOK, Trial, in_time, largest_plan
from experiments.gpulet.systems import Way, asked
from experiments.parallel import Options, spread
from experiments.plotting import Bar, grouped

TITLE = "requests not in time, with and without prediction of interference (gpulet, Figure 14)"

# Each with the one that knows nothing of neighbours first.
PAIRS = tuple(
    (
        Way(name=name, who=who, planner=planner, interference=False),
        Way(name=f"{name}+int", who=who, planner=planner),
    )
    for name, who, planner in (
        ("gpulet", "published", "elastic"),
        ("gpulet", "cotenant", "elastic"),
        ("geometry", "cotenant", "geometry"),
    )
)
NOT_SCHEDULABLE = "not schedulable"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """rate: the largest that either of the pair takes for schedulable, in requests/s of the group in all; missed: what
    is then late or dropped, in percent, None where the way has no plan. own: the same for the largest rate that the
    way itself has a plan for. paper: what it says of missed."""

    profiles: str
    group: str
    way: str
    who: str
    rate: float
    verdict: str
    missed: float | None
    own_rate: float
    own_missed: float | None
    paper: str | None


class Claim(msgspec.Struct, frozen=True):
    """The largest rate for which a way has a plan, in requests/s in all, and what is missed then, as a fraction."""

    rate: float
    missed: float | None


def run(options: Options) -> list[Row]:
    trials = [
        Trial(group=group, look=LOOK * (9 if options.full else 3), seed=options.seed)
        for name in options.profiles or QUICK
        for pair in PAIRS
        for way in pair
        for group in fig17.groups(name, way)[:: options.every]
    ]
    for name in {trial.group.cast for trial in trials}:
        cast(name)  # what is absent is an error here, before processes start
    claims = spread(claim, trials, options, "largest rates")
    by_trial = {
        (trial.group.cast, trial.group.name, trial.group.way): found
        for trial, found in zip(trials, claims, strict=True)
    }
    rows = []
    for (name, group, way), found in by_trial.items():
        pair = next(pair for pair in PAIRS if way in pair)
        rate = max(by_trial[name, group, other].rate for other in pair)
        missed = found.missed if found.rate == rate else None
        rows.append(
            Row(
                profiles=name,
                group=group,
                way=way.name,
                who=way.who,
                rate=rate,
                verdict=_verdict(missed),
                missed=_percent(missed),
                own_rate=found.rate,
                own_missed=_percent(found.missed),
                paper=paper.FIG14.get((group, way.name)),
            )
        )
    return rows


def claim(trial: Trial) -> Claim:
    group = trial.group
    scale, plan = _claimed(trial)
    if plan is None:
        return Claim(0.0, None)
    machines = world(players(group), group.devices, trial.seed)
    return Claim(scale * math.fsum(group.mix.values()), 1 - in_time(plan, machines, trial, scale))


def _claimed(trial: Trial) -> tuple[float, Plan | None]:
    """The largest multiple of the mix for which the way has a plan, with room for chance."""
    group = trial.group
    its = players(group)
    if group.way.who == "published":
        return largest_plan(group.way, its, group.mix, group.devices, its.units[0])
    problem = msgspec.structs.replace(asked(group.way, its, group.devices), rates=group.mix, objective="rate")
    choice = choose_planner(group.way.planner)
    plan = largest_scale(choice.plan, problem, quick=choice.quick)
    return (plan.scale, plan) if plan.scale else (0.0, None)


def _verdict(missed: float | None) -> str:
    if missed is None:
        return NOT_SCHEDULABLE
    return "over 1 %" if missed > 1 - paper.KEPT else "under 1 %"


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def plot(rows: Sequence[Row], path: Path) -> None:
    """At each way's own largest rate, so that nobody has no bar."""
    bars = [
        Bar(row.profiles, row.group, row.way, row.who, row.own_missed) for row in rows if row.own_missed is not None
    ]
    lines = [("promised", 100 * (1 - paper.KEPT))]
    grouped(
        path,
        bars,
        lines=lines,
        ylabel="late or dropped at its own largest rate, %",
        title="gpulet, Figure 14",
        columns=1,
    )
