"""Ask at which loads sharing serves at least as many requests in time as one instance a GPU (HetSev, section 6.1).

Figure 5 has one low load and one spike. Here the load is steady, from a tenth of what geometry can serve to more than
that; both systems begin with the plan for it and scale by HetSev's heuristic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.workload.sources import Curve
from experiments.autoscaled_runs import IntervalSummary, summarize
from experiments.hetsev import paper
from experiments.hetsev.cluster import HETSEV, K8S, Run, System, served, simulate_run
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "requests in time by load, one and two instances a GPU (HetSev, Figure 5)"

LOADS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)  # of what geometry can serve
SECONDS = 120.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one load, a part of what geometry can serve; offered, k8s, hetsev: requests/s, of both those in time.
    *_gpus: in use on average."""

    load: float
    offered: float
    k8s: float
    hetsev: float
    of_k8s: float
    k8s_gpus: float
    hetsev_gpus: float


def run(options: Options) -> list[Row]:
    most = served(paper.FIG05_MIX)
    runs = [run_at(system, load * most, options.seed) for load in LOADS for system in (K8S, HETSEV)]
    results = run_tasks(simulate_run, runs, options, "runs")
    summaries = [summarize(result, 0.0, SECONDS) for result in results]
    return [row_of(load, *summaries[2 * n : 2 * n + 2]) for n, load in enumerate(LOADS)]


def run_at(system: System, rate: float, seed: int) -> Run:
    """Return the run of a system at a steady rate, requests/s of all models."""
    curves = {name: Curve(((0.0, part * rate),)) for name, part in paper.FIG05_MIX.items()}
    return Run(system=system, curves=curves, seconds=SECONDS, seed=seed)


def row_of(load: float, k8s: IntervalSummary, hetsev: IntervalSummary) -> Row:
    return Row(
        load=load,
        offered=k8s.offered,
        k8s=k8s.goodput,
        hetsev=hetsev.goodput,
        of_k8s=hetsev.goodput / k8s.goodput,
        k8s_gpus=k8s.devices,
        hetsev_gpus=hetsev.devices,
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar("", f"{row.load:.0%} of what can be served", system, "simulated", goodput / row.offered)
        for row in rows
        for system, goodput in ((K8S.name, row.k8s), (HETSEV.name, row.hetsev))
    ]
    grouped(path, bars, lines=[], ylabel="in time, part of all requests", title="HetSev, Figure 5, by load")
