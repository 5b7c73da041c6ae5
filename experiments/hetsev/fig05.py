"""Figure 5: low load and a spike, on GPUs with one instance each and on GPUs that instances share.

Section 6.1. The spike is as high as geometry can serve, less a tenth for chance; the low load is a fifth of it, as
200 and 1,000 requests/s are in the paper, and the curve is `workload.shapes`' reading of the text. Without `full`, it
is run from 3,300 s to 4,300 s.
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
from experiments.autoscaled_runs import Span, Story, scaled, span
from experiments.hetsev import paper
from experiments.hetsev.cluster import K8S, POLICY, STARTUP, WAYS, Way, cluster, problem, served
from experiments.parallel import Options, spread
from experiments.plotting import Bar, grouped

TITLE = "low load and a spike, instances alone on a GPU and together (HetSev, Figure 5)"

ROOM = 0.9
FROM, UNTIL = 3_305.0, 4_310.0  # seconds
SPIKE = "spike"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in requests/s. missed: late or dropped, in percent. gpus, instances: in use, on average. mean_ms: from
    arrival to answer, over the whole run. of_k8s: answers in time over K8S's; paper: the most it says of that."""

    way: str
    load: str
    offered: float
    in_time: float
    missed: float
    gpus: float
    instances: float
    mean_ms: float | None
    of_k8s: float
    paper_of_k8s: float | None


class Run(msgspec.Struct, frozen=True):
    """top: requests/s in the spike."""

    way: Way
    top: float
    start: float
    end: float
    seed: int


def run(options: Options) -> list[Row]:
    top = ROOM * served(paper.FIG05_MIX)
    start, end = (0.0, paper.FIG05_SECONDS) if options.full else (FROM, UNTIL)
    runs = [Run(way, top, start, end, options.seed) for way in WAYS]
    return rows_of(runs, spread(played, runs, options, "runs"))


def played(run: Run) -> Story:
    valley = run.top * paper.FIG05_LOW / paper.FIG05_HIGH
    whole = hetsev_production(valley, paper.FIG05_HIGH / paper.FIG05_LOW)
    later = [(time - run.start, rate) for time, rate in whole.points if time > run.start]
    curve = Curve(((0.0, whole.at(run.start)), *later))
    start = {name: part * curve.at(0) * POLICY.room for name, part in paper.FIG05_MIX.items()}
    return scaled(
        problem(start, alone=run.way.alone),
        cluster(start),
        choose_planner(run.way.planner).plan,
        POLICY,
        Workload({name: curve.scaled(part) for name, part in paper.FIG05_MIX.items()}),
        seconds=run.end - run.start,
        startup=STARTUP,
        seed=run.seed,
    )


def rows_of(runs: Sequence[Run], stories: Sequence[Story]) -> list[Row]:
    """Of each, the time before the spike, and from it on."""
    parts: dict[tuple[str, str], Span] = {}
    for each, story in zip(runs, stories, strict=True):
        edge, end = paper.FIG05_SPIKE - each.start, each.end - each.start
        parts[each.way.name, "low"] = span(story, 0.0, edge)
        parts[each.way.name, SPIKE] = span(story, edge, end)
    reports = {each.way.name: story.report for each, story in zip(runs, stories, strict=True)}
    return [
        Row(
            way=way,
            load=when,
            offered=part.offered,
            in_time=part.in_time,
            missed=100 * part.missed,
            gpus=part.devices,
            instances=part.partitions,
            mean_ms=_mean_ms(reports[way]) if when == SPIKE else None,
            of_k8s=part.in_time / parts[K8S.name, when].in_time,
            paper_of_k8s=paper.FIG05_MORE if when == SPIKE and way != K8S.name else None,
        )
        for (way, when), part in parts.items()
    ]


def _mean_ms(report: Report) -> float:
    """Of all answers."""
    answers = math.fsum(row.served for row in report.models)
    return 1e3 * math.fsum((row.mean or 0.0) * row.served for row in report.models) / answers


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.load, "", row.way, "simulated", row.of_k8s) for row in rows]
    lines = [("HetSev, paper, at most", paper.FIG05_MORE)]
    grouped(path, bars, lines=lines, ylabel="answers in time over K8S's", title="HetSev, Figure 5")
