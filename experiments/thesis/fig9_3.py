"""Reproduce Figure 9.3: pods that failed, with the thesis' scheduler and with round robin (simulated).

A pod fails where it is put beside one with which it did not run when losses were measured. Its memory, and limits on
that, were not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from experiments.parallel import Options
from experiments.plotting import Bar, grouped
from experiments.thesis import evaluation, paper
from experiments.thesis.evaluation import LABELS, PODS
from experiments.thesis.schedulers import SCHEDULERS

TITLE = "pods that failed (NTUA thesis, Figure 9.3)"

ALL = f"all {PODS}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold failed pods, the mean over seeds; paper: of all four experiments."""

    pods: str
    scheduler: str
    failed: float
    paper: int | None = None


def run(options: Options) -> list[Row]:
    """Simulate all experiments. every: of the 20 seeds, take one in so many."""
    rows = [
        Row(
            pods=f"{case.pods}, {case.objectives}",
            scheduler=case.scheduler,
            failed=float(np.mean([each.errors for each in results])),
        )
        for case, results in evaluation.experiments(options).items()
    ]
    totals = [
        Row(
            pods=ALL,
            scheduler=scheduler,
            failed=float(sum(row.failed for row in rows if row.scheduler == scheduler)),
            paper=paper.FIG93_ERRORS.get(scheduler),
        )
        for scheduler in SCHEDULERS
    ]
    return [*rows, *totals]


def plot(rows: Sequence[Row], path: Path) -> None:
    shown = [row for row in rows if row.scheduler in paper.FIG93_ERRORS]
    bars = [Bar("", row.pods, LABELS.get(row.scheduler, row.scheduler), "simulated", row.failed) for row in shown]
    lines = [(f"{name}, paper, of all", float(count)) for name, count in paper.FIG93_ERRORS.items()]
    grouped(path, bars, lines=lines, ylabel="pods that failed", title="NTUA thesis, Figure 9.3")
