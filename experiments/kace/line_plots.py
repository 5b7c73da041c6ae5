"""Draw a metric over training set size, with a line for each technique (Figures 6.1 and 7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotenant.render.figure import COLOURS
from experiments.kace import paper


def draw(axes: Any, rows: Sequence[Any], field: str, *, x: str, y: str, published: str = "") -> None:
    """Draw `field` of rows with `technique` and `percent`.

    x, y: labels; published: a field that some rows have, drawn as crosses.
    """
    for colour, technique in zip(COLOURS, paper.TECHNIQUES.values(), strict=False):
        mine = [row for row in rows if row.technique == technique]
        percents, values = [row.percent for row in mine], [getattr(row, field) for row in mine]
        axes.plot(percents, values, color=colour, marker="o", markersize=4, label=technique)
        reported = [(row.percent, getattr(row, published)) for row in mine if published]
        known = [(percent, value) for percent, value in reported if value is not None]
        if known:
            axes.scatter(*zip(*known, strict=True), color=colour, marker="x", s=60, zorder=3)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
