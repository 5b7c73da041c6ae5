"""Hold and draw what InSS' section 2 and 4 measure: a quantity over batch, share or number of models, a line for each
model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.render.figure import COLOURS, figure_for, save_figure

# Roles of InSS' figures 1 to 4 that were measured on the V100; MnasNet was not.
MODELS = ("alexnet", "resnet50", "vgg19", "ssd")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one point. what: the quantity, with its unit; line: model, and batch where they differ; fitted: by the
    paper's formula, where it has one. paper: what its text says of the quantity."""

    what: str
    line: str
    x: float
    measured: float
    fitted: float | None = None
    paper: str | None = None


def plot(rows: Sequence[Row], path: Path, *, xlabel: str, title: str) -> None:
    """Draw a panel for each quantity: rings measured, joined by lines, or by the formula where there is one."""
    quantities = list(dict.fromkeys(row.what for row in rows))
    figure = figure_for(path, 4.6 * len(quantities), 3.6)
    for axes, what in zip(figure.subplots(1, len(quantities), squeeze=False).flat, quantities, strict=True):
        own = [row for row in rows if row.what == what]
        for colour, name in zip(COLOURS, dict.fromkeys(row.line for row in own), strict=False):
            points = [row for row in own if row.line == name]
            x = [row.x for row in points]
            lines = [row.measured if row.fitted is None else row.fitted for row in points]
            axes.plot(x, lines, color=colour, label=name, linewidth=1.2)
            axes.scatter(x, [row.measured for row in points], facecolors="none", edgecolors=colour, s=26)
        axes.set_xlabel(xlabel, fontsize=8)
        axes.set_ylabel(what, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
