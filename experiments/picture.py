"""Bars in groups, with the paper's numbers as lines across them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.measure.draw import COLOURS, figure_for, save


def grouped(
    path: Path,
    bars: Sequence[tuple[str, str, float]],
    *,
    lines: Sequence[tuple[str, float]],
    ylabel: str,
    title: str,
) -> None:
    """bars: group, series, height. lines: what a paper says, and its height. Raises ConfigError as `save_plan` does."""
    groups = list(dict.fromkeys(group for group, _, _ in bars))
    series = list(dict.fromkeys(name for _, name, _ in bars))
    heights = {(group, name): height for group, name, height in bars}
    figure = figure_for(path, 2.5 + 2.2 * len(groups), 4)
    axes = figure.subplots()
    width = 0.86 / max(len(series), 1)
    for i, name in enumerate(series):
        # What was published is hatched, what is ours is plain; a name has its colour in both.
        way = name.partition(" (")[0]
        ways = list(dict.fromkeys(each.partition(" (")[0] for each in series))
        places = [place + (i - (len(series) - 1) / 2) * width for place in range(len(groups))]
        values = [heights.get((group, name), 0.0) for group in groups]
        made = axes.bar(
            places,
            values,
            width * 0.92,
            label=name,
            color=COLOURS[ways.index(way) % len(COLOURS)],
            hatch="///" if name.endswith("(published)") else None,
            edgecolor="white",
            linewidth=0,
        )
        texts = [
            f"{value:.3g}" if (group, name) in heights else "" for group, value in zip(groups, values, strict=True)
        ]
        axes.bar_label(made, texts, fontsize=6, rotation=90, padding=2)
    for dash, (name, height) in zip(("--", ":", "-."), lines, strict=False):
        axes.axhline(height, color="#444444", linestyle=dash, linewidth=1, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, 1.15 * max([height for _, _, height in bars] + [height for _, height in lines], default=1.0))
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save(figure, path)
