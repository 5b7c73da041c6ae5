"""Reproduce Figure 6: three models and two waves of requests on autoscaled, shared GPUs.

Section 6.2. The waves start at 5 % and peak at 40 % and 70 % of what geometry serves with all GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.workload.shapes import hetsev_fluctuating
from experiments.autoscaled_runs import AutoscaledRun, summarize_intervals
from experiments.hetsev import paper
from experiments.hetsev.cluster import SYSTEMS, Run, System, served, simulate_run
from experiments.parallel import Options, run_tasks

TITLE = "two waves on shared GPUs, with autoscaling (HetSev, Figure 6)"

LOW, FIRST, SECOND = 0.05, 0.4, 0.7  # of what geometry feasible
ROW = 105.0  # seconds of one row, a multiple of the scaling period
WHOLE_RUN = "all"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a 105 s interval from `seconds` on; "all" is the whole run. Rates are in requests/s.

    missed: percentage late or dropped; worst_missed: the same of the model and the 15 s that missed most; instances,
    gpus: in use on average.
    """

    system: str
    seconds: str
    offered: float
    goodput: float
    missed: float
    worst_missed: float
    instances: float
    gpus: float
    paper_missed: float | None


def run(options: Options) -> list[Row]:
    peak = served(dict.fromkeys(paper.FIG06_MODELS, 1.0))
    runs = [run_to(system, peak, options.seed) for system in SYSTEMS if not system.alone]
    results = run_tasks(simulate_run, runs, options, "runs")
    return [row for each, result in zip(runs, results, strict=True) for row in rows_of(each.system, result)]


def run_to(system: System, peak: float, seed: int, seconds: float = paper.FIG06_SECONDS) -> Run:
    """Return the run of a system. peak: requests/s of each model that geometry serves."""
    waves = hetsev_fluctuating(LOW * peak, FIRST * peak, SECOND * peak)
    return Run(system=system, curves=dict.fromkeys(paper.FIG06_MODELS, waves), seconds=seconds, seed=seed)


def rows_of(system: System, result: AutoscaledRun) -> list[Row]:
    """Return a row for every ROW seconds, and one for the whole run."""
    return [
        Row(
            system=system.name,
            seconds=f"{start:.0f}" if start < math.inf else WHOLE_RUN,
            offered=interval.offered,
            goodput=interval.goodput,
            missed=100 * interval.missed,
            worst_missed=100 * interval.worst_missed,
            instances=interval.partitions,
            gpus=interval.devices,
            paper_missed=None if start < math.inf else paper.FIG06_MISSED_PERCENT,
        )
        for start, interval in summarize_intervals(result, ROW)
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw goodput, instances and misses over time, as in the paper."""
    figure = figure_for(path, 8, 6)
    panels = figure.subplots(3, 1, sharex=True)
    for colour, system in zip(COLOURS, dict.fromkeys(row.system for row in rows), strict=False):
        own = [row for row in rows if row.system == system and row.seconds != WHOLE_RUN]
        times = [float(row.seconds) for row in own] + [float(own[-1].seconds) + ROW]
        for axes, column in zip(panels, ("goodput", "instances", "missed"), strict=True):
            axes.stairs([getattr(row, column) for row in own], times, color=colour, linewidth=1.5, label=system)
    average = paper.FIG06_MISSED_PERCENT
    panels[2].axhline(average, color="#444444", linestyle="--", linewidth=1, label="HetSev, paper, on average")
    labels = ("goodput, requests/s", "instances", "late or dropped, %")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, loc="upper left")
    panels[2].set_xlabel("seconds", fontsize=8)
    figure.suptitle("HetSev, Figure 6", fontsize=11)
    save_figure(figure, path)
