"""Reproduce Figure 7: how much two co-located models on one GPU slow down.

Section 3.4. The paper measured pairs on RTX 2080 Ti and states one point of the curve; these are measurements by
others, on other GPUs and with other models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.predictors.samples import Sample
from cotenant.published import a100, v100
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.gpulet import paper
from experiments.parallel import Options

TITLE = "slowdown under co-location, in % (gpulet, Figure 7)"

PAIRS: dict[str, Callable[[], list[Sample]]] = {"v100": v100.pairs, "a100": a100.pairs}


class Row(msgspec.Struct, frozen=True):
    """Hold percentiles in percent. below_18: percentage of slowdowns below the paper's 18 %."""

    pairs: str
    slowdowns: int | None
    below_18: float
    p10: float | None
    p25: float | None
    p50: float | None
    p75: float | None
    p90: float
    p95: float | None
    p99: float | None
    max: float | None


PERCENTILES = (10, 25, 50, 75, 90, 95, 99, 100)


def run(options: Options) -> list[Row]:
    """Compute percentiles; the paper's row is first. The result is deterministic."""
    nothing = dict.fromkeys(("p10", "p25", "p50", "p75", "p95", "p99", "max"))
    rows = [Row(pairs="paper", slowdowns=None, below_18=90.0, p90=paper.FIG07_P90_PERCENT, **nothing)]
    for name in selected_pairs(options):
        more = 100 * (np.array([sample.slowdown for sample in PAIRS[name]()]) - 1)
        at = np.percentile(more, PERCENTILES).tolist()
        below = 100 * float((more < paper.FIG07_P90_PERCENT).mean())
        rows.append(Row(name, len(more), below, *at))
    return rows


def selected_pairs(options: Options) -> list[str]:
    """Return the sets of pairs to use. Raises ConfigError for unknown ones."""
    for name in options.profiles:
        if name not in PAIRS:
            raise ConfigError(f"--profiles {name}: no such set of pairs; available: {' or '.join(PAIRS)}")
    return list(options.profiles or PAIRS)


def plot(rows: Sequence[Row], path: Path) -> None:
    draw(rows, path, "gpulet, Figure 7", "paper (RTX 2080 Ti)")


def draw(rows: Sequence[Row], path: Path, title: str, label: str) -> None:
    """Draw the distributions, and the point that a paper states under a label."""
    figure = figure_for(path, 5.5, 3.6)
    axes = figure.subplots()
    for row, colour in zip((row for row in rows if row.slowdowns), COLOURS, strict=False):
        every = (row.p10, row.p25, row.p50, row.p75, row.p90, row.p95, row.p99, row.max)
        at = [number for number in every if number is not None]
        axes.plot([0.0, *at], [0, *PERCENTILES], marker="o", markersize=3, color=colour, label=row.pairs)
    axes.plot([paper.FIG07_P90_PERCENT], [90], "x", color="#444444", label=label)
    axes.set_xlabel("slowdown, %", fontsize=8)
    axes.set_ylabel("pairs, %", fontsize=8)
    axes.set_xlim(0, 120)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_title(title, fontsize=11)
    save_figure(figure, path)
