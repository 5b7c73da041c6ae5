"""Reproduce Figure 9.4: energy and power of both GPUs, by scheduler (simulated).

Power was not published. A GPU draws here what an A100 was measured to draw at the same utilisation (`miso`), in
proportion to what NVIDIA rates it at; idle, 15 % of that (assumed: the measurements begin at 36 % utilisation).
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

TITLE = "energy and power (NTUA thesis, Figure 9.4)"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the mean over experiments and seeds. of_score: energy over that with the thesis' scheduler, and the
    paper's."""

    scheduler: str
    kilojoules: float
    watts: float
    of_score: float
    paper: float | None


def run(options: Options) -> list[Row]:
    """Simulate all experiments. every: of the 20 seeds, take one in so many."""
    found = evaluation.experiments(options)
    joules = {name: evaluation.over_cases(found, name, lambda each: each.joules) for name in SCHEDULERS}
    return [
        Row(
            scheduler=name,
            kilojoules=joules[name] / 1e3,
            watts=evaluation.over_cases(found, name, lambda each: each.joules / each.seconds),
            of_score=joules[name] / joules[SCORE],
            paper=paper.FIG94_ENERGY.get(name),
        )
        for name in SCHEDULERS
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(panel, "", LABELS.get(row.scheduler, row.scheduler), "simulated", height)
        for row in rows
        for panel, height in (("energy, kJ", row.kilojoules), ("power, W", row.watts))
    ]
    grouped(path, bars, lines=[], ylabel="", title="NTUA thesis, Figure 9.4")
