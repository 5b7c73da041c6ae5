"""Reproduce Figure 5: low load and a spike, on GPUs with one instance each and on shared GPUs.

Section 6.1. The spike is 90 % of what geometry can serve; the low load is a fifth of it, as 200 and 1,000 requests/s
are in the paper; the curve is `workload.shapes`' interpretation of the text. Without `full`, only 3,300 s to 4,300 s
are run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.measure.report import Report
from cotenant.planners.portfolio import choose_planner
from cotenant.workload import Workload
from cotenant.workload.shapes import hetsev_production
from cotenant.workload.sources import Curve
from experiments.autoscaled_runs import AutoscaledRun, IntervalSummary, run_autoscaled, summarize
from experiments.hetsev import paper
from experiments.hetsev.cluster import K8S, POLICY, STARTUP, SYSTEMS, System, cluster, problem, served
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "low load and a spike, dedicated and shared GPUs (HetSev, Figure 5)"

ROOM = 0.9
FROM, UNTIL = 3_305.0, 4_310.0  # seconds
SPIKE = "spike"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one phase; rates in requests/s.

    missed: percentage late or dropped; gpus, instances: in use on average; mean_ms: response time over the whole run;
    of_k8s: goodput over K8S's; paper_of_k8s: the paper's largest.
    """

    system: str
    load: str
    offered: float
    goodput: float
    missed: float
    gpus: float
    instances: float
    mean_ms: float | None
    of_k8s: float
    paper_of_k8s: float | None


class Run(msgspec.Struct, frozen=True):
    """Describe a run. top: requests/s in the spike; start, end: seconds of the curve."""

    system: System
    top: float
    start: float
    end: float
    seed: int


def run(options: Options) -> list[Row]:
    top = ROOM * served(paper.FIG05_MIX)
    start, end = (0.0, paper.FIG05_SECONDS) if options.full else (FROM, UNTIL)
    runs = [Run(system, top, start, end, options.seed) for system in SYSTEMS]
    return rows_of(runs, run_tasks(simulate_run, runs, options, "runs"))


def simulate_run(run: Run) -> AutoscaledRun:
    """Simulate one run."""
    valley = run.top * paper.FIG05_LOW / paper.FIG05_HIGH
    whole = hetsev_production(valley, paper.FIG05_HIGH / paper.FIG05_LOW)
    later = [(time - run.start, rate) for time, rate in whole.points if time > run.start]
    curve = Curve(((0.0, whole.at(run.start)), *later))
    start = {name: part * curve.at(0) * POLICY.room for name, part in paper.FIG05_MIX.items()}
    return run_autoscaled(
        problem(start, alone=run.system.alone),
        cluster(start),
        choose_planner(run.system.planner).plan,
        POLICY,
        Workload({name: curve.scaled(part) for name, part in paper.FIG05_MIX.items()}),
        seconds=run.end - run.start,
        startup=STARTUP,
        seed=run.seed,
    )


def rows_of(runs: Sequence[Run], results: Sequence[AutoscaledRun]) -> list[Row]:
    """Return a row for the time before the spike and one from the spike on, for each run."""
    parts: dict[tuple[str, str], IntervalSummary] = {}
    for each, result in zip(runs, results, strict=True):
        edge, end = paper.FIG05_SPIKE - each.start, each.end - each.start
        parts[each.system.name, "low"] = summarize(result, 0.0, edge)
        parts[each.system.name, SPIKE] = summarize(result, edge, end)
    reports = {each.system.name: result.report for each, result in zip(runs, results, strict=True)}
    return [
        Row(
            system=system,
            load=when,
            offered=part.offered,
            goodput=part.goodput,
            missed=100 * part.missed,
            gpus=part.devices,
            instances=part.partitions,
            mean_ms=_mean_ms(reports[system]) if when == SPIKE else None,
            of_k8s=part.goodput / parts[K8S.name, when].goodput,
            paper_of_k8s=paper.FIG05_THROUGHPUT_RATIO if when == SPIKE and system != K8S.name else None,
        )
        for (system, when), part in parts.items()
    ]


def _mean_ms(report: Report) -> float:
    """Return the mean latency of all answers."""
    answers = math.fsum(row.served for row in report.models)
    return 1e3 * math.fsum((row.mean or 0.0) * row.served for row in report.models) / answers


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.load, "", row.system, "simulated", row.of_k8s) for row in rows]
    lines = [("HetSev, paper, at most", paper.FIG05_THROUGHPUT_RATIO)]
    grouped(path, bars, lines=lines, ylabel="goodput over K8S's", title="HetSev, Figure 5")
