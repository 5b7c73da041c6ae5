"""Reproduce Figures 16 and 18: throughput over time, and the batches that are decided on and those that run.

The paper: InSS stays above its baselines as rates change, and its batches of ResNet50 are those that it decided on,
while gpulet's are smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.inss.evaluation import GPULET, GSLICE, IGNITER, INSS, System, evaluate
from experiments.parallel import Options, run_tasks

TITLE = "throughput over time, batches decided and run (InSS, Figures 16 and 18)"
MODEL = "resnet50"
PAPER = {INSS: "highest; batches as decided", GPULET: "batches smaller than decided"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one system at one moment. offered, sustained: requests/s; decided, ran: ResNet50's batch."""

    system: str
    moment: int
    offered: float
    sustained: float
    decided: int
    ran: float | None
    paper: str | None


def run(options: Options) -> list[Row]:
    systems = [System(name=name, seed=options.seed) for name in (INSS, GPULET, GSLICE, IGNITER)]
    results = run_tasks(evaluate, systems, options, "systems")
    return [
        Row(
            system=system.name,
            moment=number,
            offered=moment.offered,
            sustained=moment.sustained,
            decided=moment.batches.get(MODEL, 0),
            ran=moment.models[MODEL].batch,
            paper=PAPER.get(system.name),
        )
        for system, moments in zip(systems, results, strict=True)
        for number, moment in enumerate(moments)
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    figure = figure_for(path, 7.5, 5.5)
    above, below = figure.subplots(2, 1, sharex=True)
    for colour, name in zip(COLOURS, dict.fromkeys(row.system for row in rows), strict=False):
        own = [row for row in rows if row.system == name]
        moments = [row.moment for row in own]
        above.plot(moments, [row.sustained for row in own], color=colour, label=name)
        below.plot(moments, [row.decided for row in own], color=colour, linestyle="--")
        below.plot(moments, [row.ran or 0 for row in own], color=colour)
    above.set_ylabel("sustained, requests/s", fontsize=8)
    below.set_ylabel(f"{MODEL}'s batch: decided (dashed), mean run", fontsize=8)
    below.set_xlabel("moment", fontsize=8)
    below.set_xticks(sorted({row.moment for row in rows}))
    above.legend(fontsize=7, frameon=False)
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("InSS, Figures 16 and 18", fontsize=11)
    save_figure(figure, path)
