"""Draw grouped bars, with the paper's numbers as horizontal lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cotenant.render.figure import COLOURS, figure_for, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # of numbers, so that no line crosses them


class Bar(msgspec.Struct, frozen=True):
    """Describe one bar.

    group: bars drawn next to each other; origin: "published" bars are hatched; system: selects the colour.
    """

    panel: str
    group: str
    system: str
    origin: str
    height: float

    @property
    def series(self) -> str:
        return f"{self.system} ({self.origin})"


def grouped(
    path: Path,
    bars: Sequence[Bar],
    *,
    lines: Sequence[tuple[str, float]],
    ylabel: str,
    title: str,
    columns: int = COLUMNS,
) -> None:
    """Draw a panel of grouped bars for each `panel`.

    lines: label and height of the paper's numbers; columns: largest number of panels side by side. Raises ConfigError
    as `save_plan` does.
    """
    panels = list(dict.fromkeys(bar.panel for bar in bars))
    widest = max((len({bar.group for bar in bars if bar.panel == panel}) for panel in panels), default=1)
    columns = min(columns, max(len(panels), 1))
    rows = -(-len(panels) // columns) or 1
    figure = figure_for(path, 2.5 + columns * (1 + 1.6 * widest), 0.7 + 3.1 * rows)
    spots = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    series = {bar.series: bar for bar in bars}
    top = 1.18 * max([bar.height for bar in bars] + [height for _, height in lines], default=1.0)
    for panel, axes in zip(panels, spots, strict=False):
        _panel(axes, [bar for bar in bars if bar.panel == panel], list(series), list({bar.system: 0 for bar in bars}))
        for dash, (name, height) in zip(("--", ":", "-."), lines, strict=False):
            axes.axhline(height, color="#444444", linestyle=dash, linewidth=1, label=name, zorder=0)
        axes.set_ylim(0, top)
        axes.set_xlim(-0.5, widest - 0.5)
        axes.set_title(panel, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_subplotspec() is not None and axes.get_subplotspec().is_first_col():
            axes.set_ylabel(ylabel, fontsize=8)
    for axes in spots:
        axes.set_visible(False)
    named = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), fontsize=7, loc="outside right upper", frameon=False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _panel(axes: Axes, bars: Sequence[Bar], series: Sequence[str], systems: Sequence[str]) -> None:
    """Draw one panel. series, systems: those of the whole figure, so that places and colours agree in all panels."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    width = 0.86 / len(series)
    for i, name in enumerate(series):
        own = [bar for bar in bars if bar.series == name]
        if not own:
            continue
        made = axes.bar(
            [groups.index(bar.group) + (i - (len(series) - 1) / 2) * width for bar in own],
            [bar.height for bar in own],
            width * 0.92,
            label=name,
            color=COLOURS[systems.index(own[0].system) % len(COLOURS)],
            hatch="////" if own[0].origin == "published" else None,
            edgecolor="white",
            linewidth=0,
        )
        axes.bar_label(made, [f"{bar.height:.3g}" for bar in own], fontsize=6, rotation=90, padding=2, bbox=BEHIND)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
