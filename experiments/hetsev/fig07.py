"""Figure 7: what it costs to serve four models through low load and a spike.

Section 6.3. HetSev counts the memory of a GPU that an instance uses, and all of it where the instance is alone there.
Memory was not measured on the V100, so here shares are counted as HetSev counts memory; and whole GPUs in use as well,
which is what a cloud sends bills for. K8S's fleet is large enough for the spike, as the paper has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.planners.portfolio import choose_planner
from cotenant.workload import Workload
from cotenant.workload.shapes import hetsev_production
from experiments.autoscaled_runs import Story, scaled, span
from experiments.hetsev import paper
from experiments.hetsev.cluster import K8S, MODELS, POLICY, STARTUP, WAYS, Way, cluster, problem, served
from experiments.parallel import Options, spread
from experiments.plotting import Bar, grouped

TITLE = "cost of four models through low load and a spike (HetSev, Figure 7)"

HIGH = 0.7  # of what geometry serves with four GPUs
FLEET = 12  # enough for one instance on each
SPIKE = 4.0  # times the low load
FROM = 3_000.0  # of the production day, so that low load and the spike have their part in 3,000 s


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """gpu_hours: of whole GPUs in use; share_hours: of the shares that instances have, in GPUs. saving: K8S's GPU hours
    over those; saving_by_share: the same where a way pays for shares, and K8S for GPUs. missed: in percent."""

    way: str
    gpu_hours: float
    share_hours: float
    missed: float
    saving: float
    saving_by_share: float
    paper_mean: float | None
    paper_most: float | None


class Run(msgspec.Struct, frozen=True):
    """peak: requests/s of each model in the spike."""

    way: Way
    peak: float
    seed: int
    seconds: float = paper.FIG07_SECONDS


def run(options: Options) -> list[Row]:
    peak = HIGH * served(dict.fromkeys(MODELS, 1.0))
    runs = [Run(way, peak, options.seed) for way in WAYS]
    return rows_of(runs, spread(played, runs, options, "runs"))


def played(run: Run) -> Story:
    day = hetsev_production(run.peak / SPIKE, SPIKE)
    points = [(max(0.0, time - FROM), rate) for time, rate in day.points if time >= FROM]
    curve = msgspec.structs.replace(day, points=((0.0, day.at(FROM)), *points))
    start = dict.fromkeys(MODELS, curve.at(0) * POLICY.room)
    return scaled(
        problem(start, alone=run.way.alone, devices=FLEET),
        cluster(start, FLEET),
        choose_planner(run.way.planner).plan,
        POLICY,
        Workload(dict.fromkeys(start, curve)),
        seconds=run.seconds,
        startup=STARTUP,
        seed=run.seed,
    )


def rows_of(runs: Sequence[Run], stories: Sequence[Story]) -> list[Row]:
    wholes = {each.way.name: span(story, 0.0, each.seconds) for each, story in zip(runs, stories, strict=True)}
    hours = {each.way.name: each.seconds / 3600 for each in runs}
    k8s = wholes[K8S.name].devices
    return [
        Row(
            way=name,
            gpu_hours=whole.devices * hours[name],
            share_hours=whole.shares * hours[name],
            missed=100 * whole.missed,
            saving=k8s / whole.devices,
            saving_by_share=k8s / whole.shares,
            paper_mean=None if name == K8S.name else paper.FIG07_SAVING["mean"],
            paper_most=None if name == K8S.name else paper.FIG07_SAVING["most"],
        )
        for name, whole in wholes.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar("", group, row.way, "simulated", height)
        for row in rows
        for group, height in (("whole GPUs", row.saving), ("shares", row.saving_by_share))
    ]
    lines = [(f"HetSev, paper, {what}", value) for what, value in paper.FIG07_SAVING.items()]
    grouped(path, bars, lines=lines, ylabel="times less cost than K8S", title="HetSev, Figure 7")
