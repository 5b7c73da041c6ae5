"""Reproduce Figure 9.2: duration, violated objectives and GPU utilisation of each experiment, by scheduler (simulated).

Utilisation is the mean over both GPUs of the part of time in which they run something; it was not published by
workload, and `Matrices.busy` derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from experiments.parallel import Options
from experiments.plotting import Bar, grouped
from experiments.thesis import evaluation, paper
from experiments.thesis.evaluation import LABELS, PODS, SCORE
from experiments.thesis.schedulers import SCHEDULERS

TITLE = "duration, violations and utilisation (NTUA thesis, Figure 9.2)"

ALL = "all"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold means over seeds; of all experiments, violations are the sum of the four, of 120 pods.

    of_score: duration over that with the thesis' scheduler, the mean over experiments, and the paper's.
    """

    pods: str
    scheduler: str
    seconds: float
    violated: float
    utilisation_percent: float
    of_score: float
    paper_of_score: float | None = None
    paper_violated: int | None = None


def run(options: Options) -> list[Row]:
    """Simulate all experiments. every: of the 20 seeds, take one in so many."""
    found = evaluation.experiments(options)
    rows = []
    for case, results in found.items():
        score = found[evaluation.Case(SCORE, case.objectives, case.pods)]
        seconds = float(np.mean([each.seconds for each in results]))
        rows.append(
            Row(
                pods=f"{case.pods}, {case.objectives}",
                scheduler=case.scheduler,
                seconds=seconds,
                violated=float(np.mean([each.violations for each in results])),
                utilisation_percent=100 * float(np.mean([each.busy for each in results])),
                of_score=seconds / float(np.mean([each.seconds for each in score])),
            )
        )
    return [*rows, *(_total(rows, scheduler) for scheduler in SCHEDULERS)]


def _total(rows: Sequence[Row], scheduler: str) -> Row:
    mine = [row for row in rows if row.scheduler == scheduler]
    return Row(
        pods=ALL,
        scheduler=scheduler,
        seconds=float(np.mean([row.seconds for row in mine])),
        violated=float(sum(row.violated for row in mine)),
        utilisation_percent=float(np.mean([row.utilisation_percent for row in mine])),
        of_score=float(np.mean([row.of_score for row in mine])),
        paper_of_score=paper.FIG92_DURATION.get(scheduler),
        paper_violated=paper.FIG92_VIOLATIONS if scheduler == SCORE else None,
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(panel, row.pods, LABELS.get(row.scheduler, row.scheduler), "simulated", height)
        for row in rows
        if row.pods != ALL
        for panel, height in (
            ("duration, min", row.seconds / 60),
            ("violated, pods", row.violated),
            ("utilisation, %", row.utilisation_percent),
        )
    ]
    title = f"NTUA thesis, Figure 9.2 ({PODS} pods in four experiments)"
    grouped(path, bars, lines=[], ylabel="", title=title, columns=1)
