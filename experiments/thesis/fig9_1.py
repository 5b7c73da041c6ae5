"""Reproduce Figure 9.1: the distance of achieved queries/s from the objective, by scheduler.

Simulated (`cluster`). Beside the text's reading (`evaluation.TEXT`) two others are tried, in total: losses relative to
what a workload reaches, and objectives that do not exceed it. "nearest alone" is no scheduler: each pod has, without
others, that of the six measured configurations which comes nearest to its objective, or comes nearest and meets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.parallel import Options
from experiments.plotting import Bar, grouped
from experiments.thesis import evaluation, paper
from experiments.thesis.evaluation import LABELS, SCORE
from experiments.thesis.schedulers import SCHEDULERS

TITLE = "distance of queries/s from the objective (NTUA thesis, Figure 9.1)"

ALL = "all"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the mean of |achieved - objective| / objective, in percent.

    pods: those of the experiment, and their objectives; of_score: over that of the thesis' scheduler, and the paper's.
    """

    reading: str
    pods: str
    scheduler: str
    distance_percent: float
    of_score: float
    paper: float | None = None


def run(options: Options) -> list[Row]:
    """Simulate all experiments. every: of the 20 seeds, take one in so many."""
    found = evaluation.experiments(options)
    rows = []
    for case, results in found.items():
        score = evaluation.distance(found[evaluation.Case(SCORE, case.objectives, case.pods)])
        mine = evaluation.distance(results)
        rows.append(
            Row(
                reading=evaluation.TEXT.name,
                pods=f"{case.pods}, {case.objectives}",
                scheduler=case.scheduler,
                distance_percent=100 * mine,
                of_score=mine / score,
            )
        )
    for setting in (evaluation.TEXT, evaluation.RELATIVE, evaluation.IN_REACH):
        rows += _total(evaluation.experiments(options, setting), setting)
    return rows


def _total(found: evaluation.Experiments, setting: evaluation.Setting) -> list[Row]:
    distances = {scheduler: evaluation.mean_distance(found, scheduler) for scheduler in SCHEDULERS}
    distances["nearest alone"] = evaluation.nearest_alone(found, met=False)
    distances["nearest alone, met"] = evaluation.nearest_alone(found, met=True)
    return [
        Row(
            reading=setting.name,
            pods=ALL,
            scheduler=name,
            distance_percent=100 * value,
            of_score=value / distances[SCORE],
            paper=paper.FIG91_NEARER.get(name),
        )
        for name, value in distances.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar("", f"{row.pods} objectives" if row.pods != ALL else ALL, _label(row), "simulated", row.distance_percent)
        for row in rows
        if row.reading == evaluation.TEXT.name and row.scheduler in SCHEDULERS
    ]
    nearest = [
        ("nearest of six configurations, alone", row.distance_percent)
        for row in rows
        if row.reading == evaluation.TEXT.name and row.scheduler == "nearest alone"
    ]
    grouped(path, bars, lines=nearest, ylabel="|achieved - objective|, % of it", title="NTUA thesis, Figure 9.1")


def _label(row: Row) -> str:
    return LABELS.get(row.scheduler, row.scheduler)
