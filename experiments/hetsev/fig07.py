"""Reproduce Figure 7: the cost of serving four models through low load and a spike.

Section 6.3. HetSev counts the GPU memory of an instance, and all of it if the instance is alone there. Memory was not
measured on the V100, so here shares are counted instead, and also whole GPUs in use, which a cloud bills. K8S's fleet
is large enough for the spike, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.workload.shapes import hetsev_production
from experiments.autoscaled_runs import AutoscaledRun, summarize
from experiments.hetsev import paper
from experiments.hetsev.cluster import K8S, MODELS, SYSTEMS, Run, System, served, simulate_run
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "cost of four models through low load and a spike (HetSev, Figure 7)"

HIGH = 0.7  # of what geometry feasible with four GPUs
FLEET = 12  # enough for one instance on each
SPIKE = 4.0  # times the low load
FROM = 3_000.0  # of the production curve, so that 3,000 s include low load and the spike


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the cost of a system.

    gpu_hours: of whole GPUs in use; share_hours: of partitions' shares, in GPUs; saving: K8S's GPU hours over the
    system's; saving_by_share: K8S's GPU hours over the system's share hours; missed: percentage late or dropped.
    """

    system: str
    gpu_hours: float
    share_hours: float
    missed: float
    saving: float
    saving_by_share: float
    paper_mean: float | None
    paper_most: float | None


def run(options: Options) -> list[Row]:
    peak = HIGH * served(dict.fromkeys(MODELS, 1.0))
    runs = [run_to(system, peak, options.seed) for system in SYSTEMS]
    return rows_of(runs, run_tasks(simulate_run, runs, options, "runs"))


def run_to(system: System, peak: float, seed: int, seconds: float = paper.FIG07_SECONDS) -> Run:
    """Return the run of a system. peak: requests/s of each model in the spike."""
    day = hetsev_production(peak / SPIKE, SPIKE)
    points = [(max(0.0, time - FROM), rate) for time, rate in day.points if time >= FROM]
    curve = msgspec.structs.replace(day, points=((0.0, day.at(FROM)), *points))
    return Run(system=system, curves=dict.fromkeys(MODELS, curve), seconds=seconds, seed=seed, devices=FLEET)


def rows_of(runs: Sequence[Run], results: Sequence[AutoscaledRun]) -> list[Row]:
    """Return a row for each run."""
    wholes = {
        each.system.name: summarize(result, 0.0, each.seconds) for each, result in zip(runs, results, strict=True)
    }
    hours = {each.system.name: each.seconds / 3600 for each in runs}
    k8s = wholes[K8S.name].devices
    return [
        Row(
            system=name,
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
        Bar("", group, row.system, "simulated", height)
        for row in rows
        for group, height in (("whole GPUs", row.saving), ("shares", row.saving_by_share))
    ]
    lines = [(f"HetSev, paper, {what}", value) for what, value in paper.FIG07_SAVING.items()]
    grouped(path, bars, lines=lines, ylabel="times less cost than K8S", title="HetSev, Figure 7")
