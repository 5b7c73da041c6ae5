"""Reproduce Figures 15, 17, 19 and 20: throughput, violations and latency of InSS and its baselines, six models on four
GPUs.

The paper: InSS sustains 28.1 % more than gpulet, 47.7 % more than GSLICE and 189.7 % more than iGniter; it violates
less than 1 %, the others 4.4, 4.5 and 3.8 %; its requests wait longer and run shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from experiments.inss.evaluation import (
    BDA_GPULET,
    GPULET,
    GSLICE,
    IGNITER,
    INSS,
    INSS_NI,
    OURS,
    Moment,
    System,
    evaluate,
    interquartile_mean,
    interval,
)
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "throughput, violations and latency, six models on four GPUs (InSS, Figures 15, 17, 19 and 20)"
SEEDS = 5
LEARNT = (INSS, INSS_NI)
# Percent by which InSS sustains more. BDA-Gpulet's follows from its text: 11 % more than gpulet.
GAINS = {GPULET: 28.1, BDA_GPULET: 100 * (1.281 / 1.11 - 1), GSLICE: 47.7, IGNITER: 189.7}
VIOLATED = {INSS: "under 1", GPULET: "4.4", BDA_GPULET: "similar to gpulet's", GSLICE: "4.5", IGNITER: "3.8"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one system, on average over moments; InSS' are interquartile means over seeds.

    sustained: h of equation 1, requests/s; low, high: its 95 % interval over seeds; inss_gain: percent by which InSS'
    is higher. late, dropped: percent of requests. devices, shares: in use. *_wait, *_run: mean ms of answered requests.
    same_shares: percent of changes of rates that only batches followed.
    """

    system: str
    seeds: int
    sustained: float
    low: float
    high: float
    inss_gain: float | None
    paper_gain: float | None
    late: float
    dropped: float
    paper_violated: str | None
    unserved: float
    devices: float
    shares: float
    resnet50_wait: float
    resnet50_run: float
    mnasnet_wait: float
    mnasnet_run: float
    same_shares: float


def run(options: Options) -> list[Row]:
    seeds = range(options.seed, options.seed + SEEDS, options.every)
    systems = [System(name=name, seed=seed) for name in LEARNT for seed in seeds]
    systems += [System(name=name, seed=options.seed) for name in (GPULET, BDA_GPULET, GSLICE, IGNITER, OURS)]
    results = run_tasks(evaluate, systems, options, "systems")
    by_name: dict[str, list[list[Moment]]] = {}
    for system, result in zip(systems, results, strict=True):
        by_name.setdefault(system.name, []).append(result)
    first = rows_of(INSS, by_name[INSS], None)
    return [first] + [rows_of(name, runs, first.sustained) for name, runs in by_name.items() if name != INSS]


def rows_of(name: str, runs: Sequence[Sequence[Moment]], inss: float | None) -> Row:
    """Return the row of a system. inss: what InSS sustains, requests/s."""

    def mean(what: str) -> float:
        return interquartile_mean([fmean(float(getattr(moment, what)) for moment in run) for run in runs])

    sustained = [fmean(moment.sustained for moment in run) for run in runs]
    low, high = interval(sustained)
    middle = interquartile_mean(sustained)
    return Row(
        system=name,
        seeds=len(runs),
        sustained=middle,
        low=low,
        high=high,
        inss_gain=None if inss is None else 100 * (inss / middle - 1),
        paper_gain=GAINS.get(name),
        late=100 * mean("late"),
        dropped=100 * mean("dropped"),
        paper_violated=VIOLATED.get(name),
        unserved=mean("unserved"),
        devices=mean("devices"),
        shares=mean("shares"),
        resnet50_wait=_wait(runs, "resnet50"),
        resnet50_run=_run(runs, "resnet50"),
        mnasnet_wait=_wait(runs, "mnasnet"),
        mnasnet_run=_run(runs, "mnasnet"),
        same_shares=100 * fmean(moment.same_shares for run in runs for moment in run[1:]),
    )


def _run(runs: Sequence[Sequence[Moment]], model: str) -> float:
    """Return the mean ms of a model's batches."""
    return 1e3 * fmean(moment.models[model].observed or 0.0 for run in runs for moment in run)


def _wait(runs: Sequence[Sequence[Moment]], model: str) -> float:
    """Return the mean ms of a model's requests, but for their batch."""
    return 1e3 * fmean(moment.models[model].mean or 0.0 for run in runs for moment in run) - _run(runs, model)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw throughput over InSS', and violations."""
    first = rows[0].sustained
    bars = [Bar("throughput, % of InSS'", row.system, "V100s", "cotenant", 100 * row.sustained / first) for row in rows]
    bars += [
        Bar("throughput, % of InSS'", name, "paper", "published", 100 / (1 + gain / 100))
        for name, gain in GAINS.items()
    ]
    grouped(path, bars, lines=[], ylabel="%", title="InSS, Figure 15", columns=1)
