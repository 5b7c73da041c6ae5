"""Reproduce Figure 5: low load and a spike, on GPUs with one instance each and on shared GPUs.

Section 6.1. The spike is 90 % of what geometry can serve; the low load is a fifth of it, as 200 and 1,000 requests/s
are in the paper; the curve is `workload.shapes`' interpretation of the text. Without `full`, only 3,300 s to 4,300 s
are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.workload.shapes import hetsev_production
from cotenant.workload.sources import Curve
from experiments.autoscaled_runs import AutoscaledRun, IntervalSummary, summarize
from experiments.hetsev import paper
from experiments.hetsev.cluster import HETSEV, K8S, SYSTEMS, Run, System, served, simulate_run
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "low load and a spike, dedicated and shared GPUs (HetSev, Figure 5)"

ROOM = 0.9
FROM, UNTIL = 3_305.0, 4_310.0  # seconds
SPIKE = "spike"
PAPER = (
    f"{paper.FIG05_THROUGHPUT_RATIO} × goodput, {paper.FIG05_UTILISATION_RATIO} × utilisation,"
    f" {paper.FIG05_RESPONSE_TIME_RATIO} × quicker"
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one phase; rates in requests/s.

    missed: percentage late or dropped; gpus, instances: in use on average; utilisation: percentage of all GPUs that ran
    batches, by share; response_ms: mean time from arrival to answer. of_k8s: goodput over K8S's; utilisation_of_k8s:
    the same; k8s_response: K8S's response time over the system's. paper: the paper's largest of each.
    """

    system: str
    load: str
    offered: float
    goodput: float
    missed: float
    gpus: float
    instances: float
    utilisation: float
    response_ms: float
    of_k8s: float
    utilisation_of_k8s: float
    k8s_response: float
    paper: str | None


def run(options: Options) -> list[Row]:
    top = ROOM * served(paper.FIG05_MIX)
    start, end = (0.0, paper.FIG05_SECONDS) if options.full else (FROM, UNTIL)
    runs = runs_of(SYSTEMS, top, start, end, options.seed)
    return rows_of(runs, run_tasks(simulate_run, runs, options, "runs"), start)


def runs_of(systems: Sequence[System], top: float, start: float, end: float, seed: int) -> list[Run]:
    """Return the runs of systems. top: requests/s in the spike; start, end: seconds of the paper's curve."""
    valley = top * paper.FIG05_LOW / paper.FIG05_HIGH
    whole = hetsev_production(valley, paper.FIG05_HIGH / paper.FIG05_LOW)
    later = [(time - start, rate) for time, rate in whole.points if time > start]
    curve = Curve(((0.0, whole.at(start)), *later))
    curves = {name: curve.scaled(part) for name, part in paper.FIG05_MIX.items()}
    return [Run(system=system, curves=curves, seconds=end - start, seed=seed) for system in systems]


def rows_of(runs: Sequence[Run], results: Sequence[AutoscaledRun], start: float) -> list[Row]:
    """Return a row for the time before the spike and one from the spike on, for each run. start: seconds of the
    paper's curve."""
    parts: dict[tuple[str, str], IntervalSummary] = {}
    edge = paper.FIG05_SPIKE - start
    for each, result in zip(runs, results, strict=True):
        parts[each.system.name, "low"] = summarize(result, 0.0, edge)
        parts[each.system.name, SPIKE] = summarize(result, edge, each.seconds)
    return [
        Row(
            system=system,
            load=when,
            offered=part.offered,
            goodput=part.goodput,
            missed=100 * part.missed,
            gpus=part.devices,
            instances=part.partitions,
            utilisation=100 * part.utilisation,
            response_ms=1e3 * part.response_time,
            of_k8s=part.goodput / parts[K8S.name, when].goodput,
            utilisation_of_k8s=part.utilisation / parts[K8S.name, when].utilisation,
            k8s_response=parts[K8S.name, when].response_time / part.response_time,
            paper=PAPER if when == SPIKE and system == HETSEV.name else None,
        )
        for (system, when), part in parts.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw what the spike does to goodput, utilisation and response time, over those of K8S."""
    bars = [
        Bar("", group, row.system, "simulated", height)
        for row in rows
        if row.load == SPIKE
        for group, height in (
            ("goodput", row.of_k8s),
            ("utilisation", row.utilisation_of_k8s),
            ("1 / response time", row.k8s_response),
        )
    ]
    ratios = (
        ("goodput", paper.FIG05_THROUGHPUT_RATIO),
        ("utilisation", paper.FIG05_UTILISATION_RATIO),
        ("1 / response time", paper.FIG05_RESPONSE_TIME_RATIO),
    )
    lines = [(f"HetSev, paper, {what}, at most", ratio) for what, ratio in ratios]
    grouped(path, bars, lines=lines, ylabel="over K8S's, in the spike", title="HetSev, Figure 5")
