"""Figure 15: 3,200 seconds of scen3 with two waves of requests, on up to eight GPUs, and a scaler that follows them.

Section 5.2 and section 4.5: rates are looked at every 20 s, which is also the time that the paper allows for new
workers to start; here they take 15. The paper's peaks are in no text. Here the first wave goes to 40 % and the second
to 70 % of what geometry serves with eight GPUs, from a twentieth. Neighbours do what `world` says. Each way is scaled
by the paper's rules, and then by those with a look ahead, and with room for chance by the forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from cotenant.control.scaling import ScalingOptions
from cotenant.planners.portfolio import choose_planner
from cotenant.planning import plan as plan_problem
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.workload import Workload
from cotenant.workload.shapes import gpulet_waves
from experiments.autoscaled_runs import Story, scaled, spans
from experiments.gpulet import paper
from experiments.gpulet.ground_truth import world
from experiments.gpulet.model_sets import cast
from experiments.gpulet.schedulability import largest_plan
from experiments.gpulet.systems import Way, asked
from experiments.parallel import Options, spread

TITLE = "two waves on up to eight GPUs, with scaling (gpulet, Figure 15)"

WAYS = (
    Way(name="gpulet+int", who="cotenant", planner="elastic"),
    Way(name="geometry", who="cotenant", planner="geometry"),
)
GEOMETRY = WAYS[1]
QUICK = ("v100",)
LOW, FIRST, SECOND = 0.05, 0.4, 0.7  # of what eight GPUs serve
STARTUP = 15.0  # seconds; the paper's period is a conservative estimate of it
AHEAD = ScalingOptions(
    ahead=ScalingOptions().period * 2.5 + STARTUP
)  # how old what is seen, and how long a plan must do
FIRST_WAVE = 1_200.0  # seconds
TRIED = tuple((way, policy) for policy in (ScalingOptions(), AHEAD) for way in WAYS)
ROW = 100.0  # seconds of one row
WHOLE_RUN = "all"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: from when on, for 100 s; "all" is the whole run. offered, in_time: requests/s. missed: late or dropped,
    in percent; worst: the same of the model and the 20 s that missed most. gpus: in use, on average; shares: of all
    partitions, in percent of one GPU. plans: how many were gone over to."""

    profiles: str
    way: str
    seconds: str
    offered: float
    in_time: float
    missed: float
    worst: float
    gpus: float
    shares: float
    plans: int
    paper_worst: str | None = None


class Run(msgspec.Struct, frozen=True):
    """policy: of the scaler; one that looks ahead makes room for chance, too. peak: requests/s of each model that eight
    GPUs serve. seconds: how much of the waves is run."""

    cast: str
    way: Way
    policy: ScalingOptions
    peak: float
    seed: int
    seconds: float = paper.FIG15_SECONDS


def run(options: Options) -> list[Row]:
    """Without `full`, the first wave: both are 8 million requests for each way."""
    runs = []
    seconds = paper.FIG15_SECONDS if options.full else FIRST_WAVE
    for name in options.profiles or QUICK:
        its = cast(name)
        mix = dict.fromkeys(paper.GROUPS["scen3"], 1.0)
        peak, _ = largest_plan(GEOMETRY, its, mix, paper.FIG15_DEVICES, its.units[0])
        runs += [Run(name, way, policy, peak, options.seed, seconds) for way, policy in TRIED]
    stories = spread(played, runs, options, "runs")
    return [row for each, story in zip(runs, stories, strict=True) for row in rows_of(each, story)]


def played(run: Run) -> Story:
    its, models = cast(run.cast), paper.GROUPS["scen3"]
    waves = gpulet_waves(LOW * run.peak, FIRST * run.peak, SECOND * run.peak)
    rates = dict.fromkeys(models, waves.at(0) * run.policy.room)
    return scaled(
        msgspec.structs.replace(asked(run.way, its, paper.FIG15_DEVICES), rates=rates),
        world(its, paper.FIG15_DEVICES, run.seed),
        partial(plan_problem, planner=run.way.planner, validate=False)
        if run.policy.ahead
        else choose_planner(run.way.planner).plan,
        run.policy,
        Workload(dict.fromkeys(models, waves)),
        seconds=run.seconds,
        startup=STARTUP,
        seed=run.seed,
    )


def rows_of(run: Run, story: Story) -> list[Row]:
    """One for every ROW seconds, and one for the whole run."""
    return [
        Row(
            profiles=run.cast,
            way=run.way.name + (", ahead" if run.policy.ahead else ""),
            seconds=f"{start:.0f}" if start < math.inf else WHOLE_RUN,
            offered=span.offered,
            in_time=span.in_time,
            missed=100 * span.missed,
            worst=100 * span.worst,
            gpus=span.devices,
            shares=100 * span.shares,
            plans=span.begun,
            paper_worst=None if start < math.inf else "under 1 %",
        )
        for start, span in spans(story, ROW)
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """As the paper's: requests, GPUs, shares, and what was missed, over time."""
    names = list(dict.fromkeys((row.profiles, row.way) for row in rows))
    figure = figure_for(path, 8, 8)
    panels = figure.subplots(4, 1, sharex=True)
    for colour, key in zip(COLOURS, names, strict=False):
        own = [row for row in rows if (row.profiles, row.way) == key and row.seconds != WHOLE_RUN]
        times = [float(row.seconds) for row in own] + [float(own[-1].seconds) + ROW]
        columns = ("in_time", "gpus", "shares", "missed")
        for axes, column in zip(panels, columns, strict=True):
            heights = [getattr(row, column) for row in own]
            axes.stairs(heights, times, color=colour, linewidth=1.5, label=" ".join(key))
    first = [row for row in rows if (row.profiles, row.way) == names[0] and row.seconds != WHOLE_RUN]
    middles = [float(row.seconds) + ROW / 2 for row in first]
    panels[0].plot(
        middles, [row.offered for row in first], color="#444444", linestyle=":", linewidth=1, label="offered"
    )
    panels[3].axhline(1, color="#444444", linestyle="--", linewidth=1, label="paper: less than this")
    labels = ("answers in time /s", "GPUs", "shares, % of one GPU", "late or dropped, %")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[3].set_xlabel("seconds", fontsize=8)
    panels[0].legend(fontsize=7, frameon=False, loc="upper left")
    panels[3].legend(fontsize=7, frameon=False, loc="upper right")
    figure.suptitle("gpulet, Figure 15", fontsize=11)
    save_figure(figure, path)
