"""Reproduce Figure 15: 3,200 s of scen3 with two waves of requests, autoscaled on up to eight GPUs.

Sections 5.2 and 4.5: rates are observed every 20 s, which is also the paper's allowance for starting workers; here they
take 15 s. The text does not state the paper's peaks. Here the waves start at 5 % and peak at 40 % and 70 % of what
geometry serves with eight GPUs. Interference is that of `ground_truth`. gpulet+int is scaled by the paper's Algorithm
2; geometry says itself how many GPUs it needs. Rates to plan for are those of the published program; then both once
more with look-ahead and headroom by the forecast. "tracking" is our own controller, which plans by geometry when rates
have changed, or are about to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from cotenant.control.periodic import PeriodicOptions
from cotenant.control.scaling.gpulet import IncrementalScaling
from cotenant.control.scaling.rates import TargetRateOptions
from cotenant.control.scaling.static import StaticScaling
from cotenant.planners.portfolio import choose_planner
from cotenant.planning import plan as plan_problem
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.workload import Workload
from cotenant.workload.shapes import gpulet_waves
from experiments.autoscaled_runs import AutoscaledRun, run_autoscaled, run_tracked, summarize_intervals
from experiments.gpulet import paper
from experiments.gpulet.ground_truth import true_environment
from experiments.gpulet.model_sets import model_set
from experiments.gpulet.schedulability import largest_plan
from experiments.gpulet.systems import System, planner_problem
from experiments.parallel import Options, run_tasks

TITLE = "two waves on up to eight GPUs, with scaling (gpulet, Figure 15)"

SYSTEMS = (
    System(name="gpulet+int", origin="cotenant", planner="elastic"),
    System(name="elastic-plus", origin="cotenant", planner="elastic-plus"),
    System(name="geometry", origin="cotenant", planner="geometry"),
)
GEOMETRY = SYSTEMS[-1]
TRACKING = System(name="tracking", origin="cotenant", planner="geometry")
DEFAULT_SETS = ("v100",)
LOW, FIRST, SECOND = 0.05, 0.4, 0.7  # of what eight GPUs sustain
STARTUP = 15.0  # seconds; the paper's period is a conservative estimate of it
PERIOD = 20.0  # seconds
AHEAD = TargetRateOptions(ahead=PERIOD * 2.5 + STARTUP)  # age of the observed rates, and how long a plan is in force
FIRST_WAVE = 1_200.0  # seconds
VARIANTS = (
    *((system, rates) for rates in (TargetRateOptions(), AHEAD) for system in SYSTEMS),
    (TRACKING, TargetRateOptions()),
)
ROW = 100.0  # seconds of one row
WHOLE_RUN = "all"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a 100 s interval from `seconds` on; "all" is the whole run.

    offered, goodput: requests/s; missed: percentage late or dropped; worst_missed: the same of the model and the 20 s
    that missed most; gpus: in use on average; shares: sum over all partitions, in percent of one GPU; plans: plan
    changes.
    """

    profiles: str
    system: str
    seconds: str
    offered: float
    goodput: float
    missed: float
    worst_missed: float
    gpus: float
    shares: float
    plans: int
    paper_worst: str | None = None


class Run(msgspec.Struct, frozen=True):
    """Describe a run. rates: to plan for; with look-ahead it also adds headroom by the forecast.

    peak: requests/s of each model that eight GPUs serve; seconds: length of the run.
    """

    model_set: str
    system: System
    rates: TargetRateOptions
    peak: float
    seed: int
    seconds: float = paper.FIG15_SECONDS

    @property
    def algorithm_2(self) -> bool:
        """Return whether the paper's algorithm scales, rather than a planner that needs no more than it has to."""
        return self.system.planner in ("elastic", "elastic-plus") and not self.rates.ahead


def run(options: Options) -> list[Row]:
    """Run the first wave, or both with `full`: 8 million requests for each system."""
    runs = []
    seconds = paper.FIG15_SECONDS if options.full else FIRST_WAVE
    for name in options.profiles or DEFAULT_SETS:
        profiled_set = model_set(name)
        mix = dict.fromkeys(paper.GROUPS["scen3"], 1.0)
        peak, _ = largest_plan(GEOMETRY, profiled_set, mix, paper.FIG15_DEVICES, profiled_set.units[0])
        runs += [Run(name, system, rates, peak, options.seed, seconds) for system, rates in VARIANTS]
    results = run_tasks(simulate_run, runs, options, "runs")
    return [row for each, result in zip(runs, results, strict=True) for row in rows_of(each, result)]


def simulate_run(run: Run) -> AutoscaledRun:
    """Simulate one run."""
    profiled_set, models = model_set(run.model_set), paper.GROUPS["scen3"]
    waves = gpulet_waves(LOW * run.peak, FIRST * run.peak, SECOND * run.peak)
    start = dict.fromkeys(models, waves.at(0) * run.rates.headroom)
    problem = msgspec.structs.replace(planner_problem(run.system, profiled_set, paper.FIG15_DEVICES), rates=start)
    environment = true_environment(profiled_set, paper.FIG15_DEVICES, run.seed)
    workload = Workload(dict.fromkeys(models, waves))
    if run.system == TRACKING:
        return run_tracked(
            problem,
            environment,
            workload,
            seconds=run.seconds,
            startup=STARTUP,
            seed=run.seed,
            period=PERIOD,
        )
    (kind,) = problem.fleet
    planner = choose_planner(run.system.planner).plan
    everything = StaticScaling(devices={kind.name: paper.FIG15_DEVICES})
    return run_autoscaled(
        problem,
        environment,
        partial(plan_problem, planner=run.system.planner, validate=False) if run.rates.ahead else planner,
        IncrementalScaling(planner=planner) if run.algorithm_2 else everything,
        PeriodicOptions(period=PERIOD, rates=run.rates),
        workload,
        seconds=run.seconds,
        startup=STARTUP,
        seed=run.seed,
    )


def rows_of(run: Run, result: AutoscaledRun) -> list[Row]:
    """Return a row for every ROW seconds, and one for the whole run."""
    return [
        Row(
            profiles=run.model_set,
            system=run.system.name + (", ahead" if run.rates.ahead else ""),
            seconds=f"{start:.0f}" if start < math.inf else WHOLE_RUN,
            offered=interval.offered,
            goodput=interval.goodput,
            missed=100 * interval.missed,
            worst_missed=100 * interval.worst_missed,
            gpus=interval.devices,
            shares=100 * interval.shares,
            plans=interval.plan_changes,
            paper_worst=None if start < math.inf else "under 1 %",
        )
        for start, interval in summarize_intervals(result, ROW)
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw requests, GPUs, shares and misses over time, as in the paper."""
    names = list(dict.fromkeys((row.profiles, row.system) for row in rows))
    figure = figure_for(path, 8, 8)
    panels = figure.subplots(4, 1, sharex=True)
    for colour, key in zip(COLOURS, names, strict=False):
        own = [row for row in rows if (row.profiles, row.system) == key and row.seconds != WHOLE_RUN]
        times = [float(row.seconds) for row in own] + [float(own[-1].seconds) + ROW]
        columns = ("goodput", "gpus", "shares", "missed")
        for axes, column in zip(panels, columns, strict=True):
            heights = [getattr(row, column) for row in own]
            axes.stairs(heights, times, color=colour, linewidth=1.5, label=" ".join(key))
    first = [row for row in rows if (row.profiles, row.system) == names[0] and row.seconds != WHOLE_RUN]
    middles = [float(row.seconds) + ROW / 2 for row in first]
    panels[0].plot(
        middles, [row.offered for row in first], color="#444444", linestyle=":", linewidth=1, label="offered"
    )
    panels[3].axhline(1, color="#444444", linestyle="--", linewidth=1, label="paper: less than this")
    labels = ("goodput, requests/s", "GPUs", "shares, % of one GPU", "late or dropped, %")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[3].set_xlabel("seconds", fontsize=8)
    panels[0].legend(fontsize=7, frameon=False, loc="upper left")
    panels[3].legend(fontsize=7, frameon=False, loc="upper right")
    figure.suptitle("gpulet, Figure 15", fontsize=11)
    save_figure(figure, path)
