"""Reproduce Figure 10: errors of predicted slowdowns on held-out pairs.

Section 4.4: of 2,500 slowdowns, a random 1,750 are for training. The paper's formula is `linear`; it is compared with
`gaussian-process`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.core.profile import Profiles
from cotenant.profiling.cross_validation import random_splits, relative_errors
from cotenant.published import a100, v100
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.gpulet import paper
from experiments.gpulet.fig07 import PAIRS, selected_pairs
from experiments.parallel import Options, run_tasks

TITLE = "error of predicted slowdowns, in % of the measured slowdown (gpulet, Figure 10)"

PREDICTORS = ("linear", "gaussian-process")
SPLITS = 3
MORE_SPLits = 10  # with --full
PERCENTILES = (25, 50, 75, 90, 95, 99)


class Row(msgspec.Struct, frozen=True):
    """Hold percentiles in percent. held_out: number of slowdowns over all splits."""

    pairs: str
    predictor: str
    held_out: int
    mean: float | None
    p25: float | None
    p50: float | None
    p75: float | None
    p90: float
    p95: float
    p99: float | None


class _Task(msgspec.Struct, frozen=True):
    pairs: str
    predictor: str
    splits: int
    seed: int


def run(options: Options) -> list[Row]:
    """Compute errors; the paper's row is first."""
    splits = MORE_SPLits if options.full else SPLITS
    tasks = [
        _Task(name, predictor, splits, options.seed) for name in selected_pairs(options) for predictor in PREDICTORS
    ]
    nothing = dict.fromkeys(("mean", "p25", "p50", "p75", "p99"))
    published = Row(
        pairs="paper",
        predictor="linear",
        held_out=750,
        p90=paper.FIG10_P90_PERCENT,
        p95=paper.FIG10_P95_PERCENT,
        **nothing,
    )
    return [published, *run_tasks(_row, tasks, options, "predictors")]


def _row(task: _Task) -> Row:
    samples = PAIRS[task.pairs]()
    errors = [
        error
        for split in random_splits(samples, task.splits, task.seed)
        for error in relative_errors(task.predictor, samples, _profiles(task.pairs), split)
    ]
    size = 100 * np.abs(errors)
    return Row(task.pairs, task.predictor, len(size), float(size.mean()), *np.percentile(size, PERCENTILES).tolist())


def _profiles(name: str) -> Profiles:
    return v100.profiles() if name == v100.KIND else a100.profiles()


def plot(rows: Sequence[Row], path: Path) -> None:
    figure = figure_for(path, 5.5, 3.6)
    axes = figure.subplots()
    ours = [row for row in rows if row.pairs != "paper"]
    colours = dict(zip(dict.fromkeys(row.pairs for row in ours), COLOURS, strict=False))
    for row in ours:
        at = [at for at in (row.p25, row.p50, row.p75, row.p90, row.p95, row.p99) if at is not None]
        axes.plot(
            [0.0, *at],
            [0, *PERCENTILES],
            "--" if row.predictor == "linear" else "-",
            marker="o",
            markersize=3,
            color=colours[row.pairs],
            label=f"{row.predictor}, {row.pairs}",
        )
    for row in rows:
        if row.pairs == "paper":
            axes.plot([row.p90, row.p95], [90, 95], "x", color="#444444", label="linear, paper (RTX 2080 Ti)")
    axes.set_xlabel("error, %", fontsize=8)
    axes.set_ylabel("pairs, %", fontsize=8)
    axes.set_xlim(0, 45)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_title("gpulet, Figure 10", fontsize=11)
    save_figure(figure, path)
