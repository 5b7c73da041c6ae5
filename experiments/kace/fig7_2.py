"""Reproduce Figure 7.2: sets of three with a target whose model is absent from training, mean over 14 targets.

Ridge regression is ours, next to KACE's four techniques. 400 of the report's 560 sets were published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.published import kace
from experiments.kace import paper, protocol
from experiments.kace.fig6_1 import mean
from experiments.kace.runs import Unseen, effort, unseen
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "three co-located models, one of them unseen (KACE, Figure 7.2)"
TECHNIQUES = paper.TECHNIQUES | {"ridge": "ridge"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a result. relative: mean over targets; worst: of the worst target."""

    technique: str
    scaled_by: str
    relative: float
    worst: float
    reported: float | None


def run(options: Options) -> list[Row]:
    targets = protocol.workloads(kace.runs(kace.TRIPLES))
    variants = [(technique, scaled_by_training) for technique in TECHNIQUES for scaled_by_training in (False, True)]
    tasks = [
        Unseen(technique, effort(technique, options), target, three=True, scaled_by_training=scaled_by_training)
        for technique, scaled_by_training in variants
        for target in targets
    ]
    found = dict(zip(tasks, run_tasks(unseen, tasks, options, "trainings"), strict=True))
    rows = []
    for technique, scaled_by_training in variants:
        values = [
            found[task]
            for task in tasks
            if (task.technique, task.scaled_by_training) == (technique, scaled_by_training)
        ]
        rows.append(
            Row(
                technique=TECHNIQUES[technique],
                scaled_by="training" if scaled_by_training else "own",
                relative=mean(values),
                worst=float(np.min(values)),
                reported=None if scaled_by_training else paper.FIG72.get(technique),
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(
            panel="mean over 14 targets",
            group=row.technique,
            system=f"scaled by {row.scaled_by}",
            origin="cotenant",
            height=row.relative,
        )
        for row in rows
    ]
    lines = [("LR, report", paper.FIG72["lr"])]
    grouped(path, bars, lines=lines, ylabel="throughput sum over Oracle's", title="KACE, Figure 7.2")
