"""Reproduce Figure 11: the running time of a batch by share and batch, and InSS' locally weighted regression of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.predictors import analytic
from cotenant.predictors.analytic import Alone
from cotenant.published import v100
from experiments.data import igniter
from experiments.inss import lines
from experiments.inss.lines import Row
from experiments.parallel import Options

TITLE = "running time by share and batch, and its regression (InSS, Figure 11)"
MODEL = "resnet50"
BATCHES = (2, 4, 8, 16, 32)
PAPER = "falls with the share, grows with the batch"


def run(options: Options) -> list[Row]:
    """Predict each point from the others of the model."""
    profile = igniter.profiles()[MODEL, v100.KIND]
    alone = analytic.measured(profile)
    rows = []
    for batch, share, seconds in alone.points:
        if batch in BATCHES:
            others = tuple(point for point in alone.points if point[:2] != (batch, share))
            rows.append(
                Row(
                    what="running time, ms",
                    line=f"{MODEL}, batch {batch}",
                    x=share / 10,
                    measured=1e3 * seconds,
                    fitted=1e3 * _without(alone, others).running(batch, share),
                    paper=PAPER,
                )
            )
    return sorted(rows, key=lambda row: (int(row.line.split()[-1]), row.x))


def _without(alone: Alone, points: tuple[tuple[int, int, float], ...]) -> Alone:
    return Alone(alone.transfer, alone.kernels, alone.scheduling, alone.l2_slope, alone.l2_constant, points)


def plot(rows: Sequence[Row], path: Path) -> None:
    lines.plot(rows, path, xlabel="share, %", title="InSS, Figure 11 (lines: regression on the other points)")
