"""Reproduce Figure 8.1: the scores of a workload by its error, of one below its objective and of one that meets it.

Section 8.3: score_1 = 1 / (1 + (error + 1)²) falls faster than score_2 = 1 / (1 + error), and both lie between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.planners.score import met_score, violated_score
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.parallel import Options

TITLE = "scores by relative error of the throughput (NTUA thesis, Figure 8.1)"
ERRORS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


class Row(msgspec.Struct, frozen=True):
    """Hold both scores at a relative error, as `score` computes them and by the thesis' formulas."""

    error: float
    score_1: float
    paper_1: float
    score_2: float
    paper_2: float


def run(options: Options) -> list[Row]:
    return [Row(x, violated_score(x), 1 / (1 + (x + 1) ** 2), met_score(x), 1 / (1 + x)) for x in ERRORS]


def plot(rows: Sequence[Row], path: Path) -> None:
    figure = figure_for(path, 5, 3.4)
    axes = figure.subplots()
    errors = np.linspace(0, max(row.error for row in rows), 200)
    for name, score, colour in (("score_1", violated_score, COLOURS[0]), ("score_2", met_score, COLOURS[1])):
        axes.plot(errors, [score(float(error)) for error in errors], color=colour, label=name)
    axes.set_xlabel("relative error", fontsize=8)
    axes.set_ylim(0, 1.05)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("NTUA thesis, Figure 8.1", fontsize=11)
    save_figure(figure, path)
