"""Figure 6: three models and two waves of requests on GPUs that instances share, with scaling.

Section 6.2. The first wave goes to 40 % and the second to 70 % of what geometry serves with all GPUs, from a twentieth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.planners.portfolio import choose_planner
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.workload import Workload
from cotenant.workload.shapes import hetsev_fluctuating
from experiments.autoscaled_runs import Story, scaled, spans
from experiments.hetsev import paper
from experiments.hetsev.cluster import POLICY, STARTUP, WAYS, Way, cluster, problem, served
from experiments.parallel import Options, spread

TITLE = "two waves on GPUs that instances share, with scaling (HetSev, Figure 6)"

LOW, FIRST, SECOND = 0.05, 0.4, 0.7  # of what geometry serves
ROW = 105.0  # seconds of one row, a whole number of looks
WHOLE_RUN = "all"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: from when on, for 105 s; "all" is the whole run. Rates in requests/s. missed: late or dropped, in
    percent; worst: of the model and the 15 s that missed most. instances, gpus: in use, on average."""

    way: str
    seconds: str
    offered: float
    in_time: float
    missed: float
    worst: float
    instances: float
    gpus: float
    paper_missed: float | None


class Run(msgspec.Struct, frozen=True):
    """peak: requests/s of each model that geometry serves."""

    way: Way
    peak: float
    seed: int
    seconds: float = paper.FIG06_SECONDS


def run(options: Options) -> list[Row]:
    peak = served(dict.fromkeys(paper.FIG06_MODELS, 1.0))
    runs = [Run(way, peak, options.seed) for way in WAYS if not way.alone]
    stories = spread(played, runs, options, "runs")
    return [row for each, story in zip(runs, stories, strict=True) for row in rows_of(each.way, story)]


def played(run: Run) -> Story:
    waves = hetsev_fluctuating(LOW * run.peak, FIRST * run.peak, SECOND * run.peak)
    start = dict.fromkeys(paper.FIG06_MODELS, waves.at(0) * POLICY.room)
    return scaled(
        problem(start),
        cluster(start),
        choose_planner(run.way.planner).plan,
        POLICY,
        Workload(dict.fromkeys(start, waves)),
        seconds=run.seconds,
        startup=STARTUP,
        seed=run.seed,
    )


def rows_of(way: Way, story: Story) -> list[Row]:
    return [
        Row(
            way=way.name,
            seconds=f"{start:.0f}" if start < math.inf else WHOLE_RUN,
            offered=span.offered,
            in_time=span.in_time,
            missed=100 * span.missed,
            worst=100 * span.worst,
            instances=span.partitions,
            gpus=span.devices,
            paper_missed=None if start < math.inf else paper.FIG06_MISSED_PERCENT,
        )
        for start, span in spans(story, ROW)
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """As the paper's: answers, instances and what was missed, over time."""
    figure = figure_for(path, 8, 6)
    panels = figure.subplots(3, 1, sharex=True)
    for colour, way in zip(COLOURS, dict.fromkeys(row.way for row in rows), strict=False):
        own = [row for row in rows if row.way == way and row.seconds != WHOLE_RUN]
        times = [float(row.seconds) for row in own] + [float(own[-1].seconds) + ROW]
        for axes, column in zip(panels, ("in_time", "instances", "missed"), strict=True):
            axes.stairs([getattr(row, column) for row in own], times, color=colour, linewidth=1.5, label=way)
    average = paper.FIG06_MISSED_PERCENT
    panels[2].axhline(average, color="#444444", linestyle="--", linewidth=1, label="HetSev, paper, on average")
    labels = ("answers in time /s", "instances", "late or dropped, %")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, loc="upper left")
    panels[2].set_xlabel("seconds", fontsize=8)
    figure.suptitle("HetSev, Figure 6", fontsize=11)
    save_figure(figure, path)
