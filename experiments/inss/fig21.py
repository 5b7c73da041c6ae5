"""Reproduce Figures 21 to 23: eight models, InSS on four and five GPUs, its baselines on as many as they need.

The paper: gpulet and GSLICE take five to six GPUs and iGniter three; InSS sustains as much with four, and up to 180 %
more with five, and violates less than 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from experiments.inss import cluster
from experiments.inss.evaluation import GPULET, GSLICE, IGNITER, INSS, OURS, Moment, System, evaluate
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "eight models: throughput, violations, GPUs (InSS, Figures 21 to 23)"
MANY = 8  # GPUs that baselines may take
PAPER = {f"{INSS}_4": "4", f"{INSS}_5": "5", GPULET: "5 to 6", GSLICE: "5 to 6", IGNITER: "3"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one system, on average over moments. sustained, unserved: requests/s; violated: percent; gpus: in use, at
    most; shares: the sum of all, in GPUs."""

    system: str
    sustained: float
    unserved: float
    violated: float
    gpus: int
    shares: float
    paper_gpus: str | None


def run(options: Options) -> list[Row]:
    systems = {
        f"{INSS}_{devices}": System(name=INSS, seed=options.seed, models=cluster.EIGHT, devices=devices)
        for devices in (4, 5)
    }
    systems |= {
        name: System(name=name, seed=options.seed, models=cluster.EIGHT, devices=MANY)
        for name in (GPULET, GSLICE, IGNITER, OURS)
    }
    results = run_tasks(evaluate, [*systems.values()], options, "systems")
    return [row_of(name, moments) for name, moments in zip(systems, results, strict=True)]


def row_of(name: str, moments: Sequence[Moment]) -> Row:
    return Row(
        system=name,
        sustained=fmean(moment.sustained for moment in moments),
        unserved=fmean(moment.unserved for moment in moments),
        violated=100 * fmean(moment.late + moment.dropped for moment in moments),
        gpus=max(moment.devices for moment in moments),
        shares=fmean(moment.shares for moment in moments),
        paper_gpus=PAPER.get(name),
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(panel, row.system, "V100s", "cotenant", value)
        for panel, field in (("sustained, thousand requests/s", "sustained"), ("shares in use, GPUs", "shares"))
        for row in rows
        for value in [getattr(row, field) / (1e3 if field == "sustained" else 1)]
    ]
    grouped(path, bars, lines=[], ylabel="", title="InSS, Figures 21 and 23", columns=1)
