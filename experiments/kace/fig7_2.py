"""Figure 7.2: sets of three around a target whose model was never trained on, mean over 14 targets.

Beside KACE's four techniques stands a line with a penalty, which is ours. Of the report's 560 sets 400 were published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from experiments.data import kace
from experiments.kace import paper, protocol
from experiments.kace.fig6_1 import mean
from experiments.kace.runs import Unseen, effort, unseen
from experiments.parallel import Options, spread
from experiments.plotting import Bar, grouped

TITLE = "three models together, of which one was never seen (KACE, Figure 7.2)"
TECHNIQUES = paper.TECHNIQUES | {"ridge": "ridge"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """relative: mean over targets; least: of the worst."""

    technique: str
    scaled_by: str
    relative: float
    least: float
    text: float | None


def run(options: Options) -> list[Row]:
    targets = protocol.workloads(kace.runs(kace.TRIPLES))
    ways = [(technique, proper) for technique in TECHNIQUES for proper in (False, True)]
    tasks = [
        Unseen(technique, effort(technique, options), target, three=True, proper=proper)
        for technique, proper in ways
        for target in targets
    ]
    found = dict(zip(tasks, spread(unseen, tasks, options, "trainings"), strict=True))
    rows = []
    for technique, proper in ways:
        values = [found[task] for task in tasks if (task.technique, task.proper) == (technique, proper)]
        rows.append(
            Row(
                technique=TECHNIQUES[technique],
                scaled_by="training" if proper else "own",
                relative=mean(values),
                least=float(np.min(values)),
                text=None if proper else paper.FIG72.get(technique),
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(
            panel="mean over 14 targets",
            group=row.technique,
            way=f"scaled by {row.scaled_by}",
            who="cotenant",
            height=row.relative,
        )
        for row in rows
    ]
    lines = [("LR, report", paper.FIG72["lr"])]
    grouped(path, bars, lines=lines, ylabel="throughput sum over Oracle's", title="KACE, Figure 7.2")
