"""Reproduce Table 5.1: how busy the seven models keep a V100 and the memory that they take, averaged over batches.

From the published data of the 21 workloads. The paper has one decimal, rounded in some cells and cut off in others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.published import kace
from experiments.kace import paper
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "the workloads' features (KACE, Table 5.1)"

GIGABYTE = 1e9
LAST_DIGIT = 0.1  # of what the paper prints


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the features of a model, percentages and GB, beside the paper's. alike: all are within its last digit."""

    workload: str
    batches: str
    sm_busy: float
    sm_busy_paper: float
    memory_busy: float
    memory_busy_paper: float
    memory_gb: float
    memory_gb_paper: float
    alike: bool


def run(options: Options) -> list[Row]:
    """Average the features of each model. The result is deterministic."""
    profiles = kace.profiles()
    rows = []
    for name, (model, *printed) in paper.TABLE51.items():
        points = sorted(profiles[model, kace.KIND].points, key=lambda point: point.batch)
        found = [
            float(np.mean([point.features["sm_util_pct"] for point in points])),
            float(np.mean([point.features["dram_util_pct"] for point in points])),
            float(np.mean([point.memory / GIGABYTE for point in points])),
        ]
        rows.append(
            Row(
                workload=name,
                batches=", ".join(str(point.batch) for point in points),
                sm_busy=found[0],
                sm_busy_paper=printed[0],
                memory_busy=found[1],
                memory_busy_paper=printed[1],
                memory_gb=found[2],
                memory_gb_paper=printed[2],
                alike=all(abs(own - theirs) < LAST_DIGIT for own, theirs in zip(found, printed, strict=True)),
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(panel, row.workload, *series, height)
        for row in rows
        for panel, heights in (
            ("SM busy, %", (row.sm_busy, row.sm_busy_paper)),
            ("memory busy, %", (row.memory_busy, row.memory_busy_paper)),
            ("memory, GB", (row.memory_gb, row.memory_gb_paper)),
        )
        for series, height in zip((("data", "measured"), ("table", "published")), heights, strict=True)
    ]
    grouped(path, bars, lines=[], ylabel="", title="KACE, Table 5.1", columns=1)
