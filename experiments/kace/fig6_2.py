"""Reproduce Figure 6.2: throughput sum with the chosen co-located model over Oracle's, by training set size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.published import kace
from cotenant.render.figure import figure_for, save_figure
from experiments.kace import line_plots, paper
from experiments.kace.fig6_1 import PUBLISHED_AT, mean, trained
from experiments.parallel import Options

TITLE = "throughput sums over Oracle's, by technique (KACE, Figure 6.2)"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a result. percent: of 181 pairs used for training; relative: averaged over targets and seeds."""

    technique: str
    percent: float
    relative: float
    published: float | None


def run(options: Options) -> list[Row]:
    return [
        Row(
            technique=paper.TECHNIQUES[technique],
            percent=100 * mean([each.trained_on for each in found]) / len(kace.runs()),
            relative=mean([each.mean for each in found]),
            published=published(kace.RUNS[technique]) if occurrences == PUBLISHED_AT else None,
        )
        for (technique, occurrences), found in trained(options).items()
    ]


def published(model: str, column: str = "prediction") -> float:
    """Average the values of their run over seeds and targets."""
    return mean([each[column] for seed in kace.SEEDS for each in kace.published(model, seed).values()])


def plot(rows: Sequence[Row], path: Path) -> None:
    figure = figure_for(path, 6, 3.6)
    axes = figure.subplots()
    line_plots.draw(
        axes, rows, "relative", x="training pairs, %", y="throughput sum over Oracle's", published="published"
    )
    axes.set_ylim(0.7, 1)
    axes.legend(fontsize=7, frameon=False)
    figure.suptitle("KACE, Figure 6.2 (x: published run)", fontsize=11)
    save_figure(figure, path)
