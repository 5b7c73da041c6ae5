"""Run InSS' two cases of adaptation over a day: batches first, and partitions only where that does not do.

Section 5.5: when rates change, InSS decides on batches anew (case 1), which costs nothing; where no batches serve the
rates, it allocates shares anew (case 2), which starts workers beside the old ones. It never says how often either
happens. Here rates are those of a day, Azure Functions' of 2019, striped over the models of InSS that were measured on
a V100, with its targets; the busiest minute is `HIGH` of what two V100s serve. Latencies and targets are `SLOWER` times
as long, so that a day is some million requests. InSS' learner is not among the planners: `elastic-plus`, after gpulet's
and geometry decide on shares, and batches are ours (`planners.local_search.rebatched_plan`), which serve as many rates
as the largest ones that meet the targets do.

Compared are both cases, case 2 alone, and the plan for the busiest minute all day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.control.adaptation import Solve, Solved, SolveStep
from cotenant.control.periodic import PeriodicController, PeriodicOptions
from cotenant.control.scaling.rates import TargetRateOptions
from cotenant.control.scaling.static import StaticScaling
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.plan_diff import Verb, diff_plans
from cotenant.core.profile import Profile, slowed_profiles
from cotenant.planners import Problem
from cotenant.planners.rates import at_rates
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import Replanner
from cotenant.predictors.linear import Linear, Utilisation, least_squares
from cotenant.published import FOLDER, v100
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.workload import Workload
from cotenant.workload.sources import Curve
from cotenant.workload.traces import read_minutes
from experiments.autoscaled_runs import AutoscaledRun, run_controlled, summarize_intervals
from experiments.parallel import Options, run_tasks

TITLE = "both cases of adaptation over a day (InSS, section 5.5)"

TRACE = FOLDER / "traces" / "azure_functions_2019_100.csv"
TARGETS = {"alexnet": 0.025, "resnet50": 0.08, "vgg19": 0.2}  # seconds; section 6.1
DEVICES = 2
HIGH = 0.7  # of what the GPUs serve
SLOWER = 100.0
STARTUP, PERIOD, HOUR, DAY = 15.0, 60.0, 3_600.0, 86_400.0  # seconds
WHOLE_DAY = "all"
BOTH, SHARES, FIXED = "batches, then shares", "shares each time", "plan of the busiest minute"
SAME_SHARES: tuple[Verb, ...] = ("keep", "tune", "reload")
# 20 % above what is observed, and anew when that has changed by a tenth.
RATES = TargetRateOptions(headroom=1.2, low_headroom=1.2, rise=0.1, rise_by=math.inf, fall=0.1)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one hour, from 0; "all" is the whole day.

    offered: requests/s; missed: percentage late or dropped; batches, shares: how often only batches changed (case 1),
    and how often shares did (case 2); workers: started for that; gpus: sum of all shares, on average. paper: its
    violations.
    """

    planner: str
    system: str
    hour: str
    offered: float
    missed: float
    batches: int
    shares: int
    workers: int
    gpus: float
    paper: str | None


class System(msgspec.Struct, frozen=True):
    """name: one of BOTH, SHARES, FIXED. planner: of shares."""

    name: str
    planner: str
    seed: int
    seconds: float = DAY


class StepSolver(msgspec.Struct, frozen=True):
    """Answer every `Solve` from a given step on."""

    replanner: Replanner
    step: SolveStep

    def __call__(self, solve: Solve) -> Solved:
        return self.replanner(msgspec.structs.replace(solve, step=self.step))


def run(options: Options) -> list[Row]:
    systems = [System(name, "elastic-plus", options.seed) for name in (BOTH, SHARES, FIXED)]
    systems += [System(name, "geometry", options.seed) for name in (BOTH, SHARES)]
    results = run_tasks(simulate_day, systems, options, "days")
    return [row for system, result in zip(systems, results, strict=True) for row in rows_of(system, result)]


def simulate_day(system: System) -> AutoscaledRun:
    """Simulate one day, or the beginning of one."""
    asked, rates = problem_of_a_day()
    busiest = plan_problem(asked, system.planner, validate=False)
    first = {name: RATES.headroom * curve.at(0.0) for name, curve in rates.items()}
    start = at_rates(asked, asked.rates if system.name == FIXED else first)
    options = PeriodicOptions(period=DAY if system.name == FIXED else PERIOD, rates=RATES)
    policy = StaticScaling(devices={v100.KIND: DEVICES})
    replanner = Replanner(asked, system.planner)
    return run_controlled(
        start,
        start,
        busiest if system.name == FIXED else plan_problem(start, system.planner, validate=False),
        PeriodicController(policy, start, options),
        StepSolver(replanner, SolveStep.RETUNE if system.name == BOTH else SolveStep.REPLAN),
        Workload(dict(rates)),
        seconds=system.seconds,
        startup=STARTUP,
        seed=system.seed,
        period=PERIOD,
        solve_seconds=0.0,
    )


def problem_of_a_day() -> tuple[Problem, dict[str, Curve]]:
    """Return the problem, with the rates of the busiest minute, and the rates of a day."""
    minutes = [np.asarray(rates) for _, rates in read_minutes(TRACE)]
    striped = [sum(minutes[n :: len(TARGETS)], np.zeros_like(minutes[0])) for n in range(len(TARGETS))]
    busiest = int(np.argmax(sum(striped, np.zeros_like(minutes[0]))))
    mix = {name: max(float(rates[busiest]), 1e-3) for name, rates in zip(TARGETS, striped, strict=True)}
    asked = msgspec.structs.replace(_problem(mix), objective="rate")
    factor = HIGH * plan_problem(asked, validate=False).scale
    day = {
        name: Curve.steps([factor * float(rate) for rate in rates], PERIOD)
        for name, rates in zip(TARGETS, striped, strict=True)
    }
    return at_rates(_problem(mix), {name: factor * rate for name, rate in mix.items()}), day


def _problem(rates: dict[str, float]) -> Problem:
    measured = v100.profiles()
    profiles = {(name, v100.KIND): Profile(name, v100.KIND, measured[name, v100.KIND].points) for name in TARGETS}
    used = {name: Utilisation.of(profile) for (name, _), profile in measured.items()}
    return Problem(
        models=tuple(Model(name=name, slo=SLOWER * target) for name, target in TARGETS.items()),
        rates=rates,
        fleet=(Kind(name=v100.KIND, count=DEVICES, cuts=(200, 400, 500, 600, 800, 1000)),),
        profiles=slowed_profiles(profiles, dict.fromkeys(TARGETS, SLOWER)),
        interference=Linear(least_squares(v100.pairs(), used), used),
    )


def rows_of(system: System, result: AutoscaledRun) -> list[Row]:
    """Return a row for each hour, and one for the whole day."""
    changes = [
        (time, *_kind_of_change(before, after))
        for (_, before), (time, after) in zip(result.plans, result.plans[1:], strict=False)
    ]
    rows = []
    for start, interval in summarize_intervals(result, HOUR):
        end = start + HOUR if math.isfinite(start) else math.inf
        begin = start if math.isfinite(start) else 0.0
        during = [(case, workers) for time, case, workers in changes if begin <= time < end]
        rows.append(
            Row(
                planner=system.planner,
                system=system.name,
                hour=f"{start / HOUR:.0f}" if math.isfinite(start) else WHOLE_DAY,
                offered=interval.offered,
                missed=100 * interval.missed,
                batches=sum(case == 1 for case, _ in during),
                shares=sum(case == 2 for case, _ in during),
                workers=sum(workers for case, workers in during if case == 2),
                gpus=interval.shares,
                paper=None if math.isfinite(start) else "under 1 %",
            )
        )
    return rows


def _kind_of_change(before: Plan, after: Plan) -> tuple[int, int]:
    """Return InSS' case, and how many workers start."""
    diff = diff_plans(before, after)
    return 1 if all(change.verb in SAME_SHARES for change in diff.changes) else 2, diff.workers_started


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw load, changes of both cases, shares and misses by hour."""
    figure = figure_for(path, 8, 8)
    panels = figure.subplots(4, 1, sharex=True)
    keys = dict.fromkeys((row.planner, row.system) for row in rows)
    for colour, key in zip(COLOURS, keys, strict=False):
        own = [row for row in rows if (row.planner, row.system) == key and row.hour != WHOLE_DAY]
        edges = [float(row.hour) for row in own] + [float(own[-1].hour) + 1]
        label = f"{key[1]} ({key[0]})"
        for axes, column in zip(panels, ("offered", "shares", "gpus", "missed"), strict=True):
            axes.stairs([getattr(row, column) for row in own], edges, color=colour, linewidth=1.3, label=label)
        if key[1] == BOTH:
            panels[1].stairs(
                [row.batches for row in own], edges, color=colour, linestyle=":", label=f"{label}, batches only"
            )
    panels[3].axhline(1, color="#444444", linestyle="--", linewidth=1, label="InSS, paper: less than this")
    labels = ("offered, requests/s", "changes an hour", "shares, GPUs", "late or dropped, %")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[3].set_xlabel("hour of the day", fontsize=8)
    panels[1].legend(fontsize=6, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle("InSS, both cases over a day", fontsize=11)
    save_figure(figure, path)
