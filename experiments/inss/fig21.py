"""Reproduce Figures 21 to 23: eight models, InSS on four and five GPUs, its baselines on as many as they need.

The paper: gpulet and GSLICE take five to six GPUs and iGniter three; InSS sustains as much with four, and up to 180 %
more with five, and violates less than 1 %. InSS' rows are interquartile means over five seeds, `--every N` takes every
N-th of them, with 95 % intervals by the percentile bootstrap over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from experiments.inss import cluster
from experiments.inss.evaluation import (
    GPULET,
    GSLICE,
    IGNITER,
    INSS,
    OURS,
    Moment,
    System,
    evaluate,
    interquartile_mean,
    interval,
)
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "eight models: throughput, violations, GPUs (InSS, Figures 21 to 23)"
SEEDS = 5
MANY = 8  # GPUs that baselines may take
PAPER = {f"{INSS}_4": "4", f"{INSS}_5": "5", GPULET: "5 to 6", GSLICE: "5 to 6", IGNITER: "3"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one system, on average over moments. sustained, unserved: requests/s; violated: percent; *_low, *_high:
    intervals over seeds; gpus: in use, at most; shares: the sum of all, in GPUs."""

    system: str
    seeds: int
    sustained: float
    sustained_low: float
    sustained_high: float
    unserved: float
    violated: float
    violated_low: float
    violated_high: float
    gpus: int
    shares: float
    paper_gpus: str | None


def run(options: Options) -> list[Row]:
    seeds = range(options.seed, options.seed + SEEDS, options.every)
    systems = [
        (f"{INSS}_{devices}", System(name=INSS, seed=seed, models=cluster.EIGHT, devices=devices))
        for devices in (4, 5)
        for seed in seeds
    ]
    systems += [
        (name, System(name=name, seed=options.seed, models=cluster.EIGHT, devices=MANY))
        for name in (GPULET, GSLICE, IGNITER, OURS)
    ]
    results = run_tasks(evaluate, [system for _, system in systems], options, "systems")
    runs: dict[str, list[list[Moment]]] = {}
    for (name, _), moments in zip(systems, results, strict=True):
        runs.setdefault(name, []).append(moments)
    return [row_of(name, each) for name, each in runs.items()]


def row_of(name: str, runs: Sequence[Sequence[Moment]]) -> Row:
    """Return the row of a system. runs: one for each seed."""

    def means(value: Callable[[Moment], float]) -> list[float]:
        return [fmean(value(moment) for moment in run) for run in runs]

    sustained = means(lambda moment: moment.sustained)
    violated = means(lambda moment: 100 * (moment.late + moment.dropped))
    sustained_low, sustained_high = interval(sustained)
    violated_low, violated_high = interval(violated)
    return Row(
        system=name,
        seeds=len(runs),
        sustained=interquartile_mean(sustained),
        sustained_low=sustained_low,
        sustained_high=sustained_high,
        unserved=interquartile_mean(means(lambda moment: moment.unserved)),
        violated=interquartile_mean(violated),
        violated_low=violated_low,
        violated_high=violated_high,
        gpus=max(moment.devices for run in runs for moment in run),
        shares=interquartile_mean(means(lambda moment: moment.shares)),
        paper_gpus=PAPER.get(name),
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(panel, row.system, "V100s", "cotenant", value)
        for panel, field in (
            ("sustained, thousand requests/s", "sustained"),
            ("late or dropped, %", "violated"),
            ("shares in use, GPUs", "shares"),
        )
        for row in rows
        for value in [getattr(row, field) / (1e3 if field == "sustained" else 1)]
    ]
    grouped(path, bars, lines=[], ylabel="", title="InSS, Figures 21 to 23", columns=1)
