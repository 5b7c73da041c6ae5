"""Draw what loads need: the load that a plan sustains, the devices that growth needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.render.figure import COLOURS, FAINT, VIOLATION, figure_for, save_figure

COLUMNS = 4  # panels beside each other
LABEL = 13  # points from one label to the next above it
CHOSEN = "#0072B2"  # the line that a figure is about


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the points of a line. low, high: of the band around it, if there is one."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = []
    high: list[float] = []


def save_capacity(
    lines: Sequence[Series], path: Path, *, required: float, capacity: float, low: float, high: float, title: str
) -> None:
    """Draw attainment (in percent) over the multiple of the rates, and the capacity with its confidence interval.

    required: the highest required attainment, in percent.
    """
    columns = min(COLUMNS, max(len(lines), 1))
    rows = -(-max(len(lines), 1) // columns)
    figure = figure_for(path, 2.7 * columns + 0.6, 2.1 * rows + 0.9)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    lowest = min([required, *(y for line in lines for y in [*line.y, *_percents(line.low)])])
    for place, axes in enumerate(panels.flat):
        axes.set_visible(place < len(lines))
        if place >= len(lines):
            continue
        for other in lines:
            axes.plot(other.x, other.y, color=FAINT, lw=1, zorder=1)
        line = lines[place]
        axes.fill_between(line.x, _percents(line.low), _percents(line.high), color=CHOSEN, alpha=0.25, lw=0)
        axes.plot(line.x, line.y, marker=".", ms=4, lw=1.4, color=CHOSEN)
        axes.axhline(required, color=VIOLATION, lw=1, ls="--")
        if math.isfinite(capacity):
            axes.axvspan(low, min(high, max(max(line.x) for line in lines)), color="black", alpha=0.08, lw=0)
            axes.axvline(capacity, color="black", lw=1)
        axes.set_title(line.label, loc="left", fontsize=9, weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    panels[0][0].set_ylim(max(lowest - 0.1 * (100 - lowest) - 0.2, 0.0), 100 + 0.04 * (100.5 - lowest))
    for place in range(len(lines)):
        if place + columns >= len(lines):  # nothing is below it
            panels.flat[place].set_xlabel("times the rates", fontsize=8)
            panels.flat[place].tick_params(labelbottom=True)
    figure.supylabel("SLO attainment, %", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    legend = [
        Line2D([], [], color=CHOSEN, marker=".", label="simulated"),
        Patch(color=CHOSEN, alpha=0.25, lw=0, label="its 95 % interval"),
        Line2D([], [], color=FAINT, label="the others"),
        Line2D([], [], color=VIOLATION, ls="--", label="required"),
    ]
    if math.isfinite(capacity):
        legend.append(Line2D([], [], color="black", label="capacity, with its interval"))
    figure.legend(handles=legend, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save_figure(figure, path)


def _percents(values: Sequence[float]) -> list[float]:
    """Return percentages as far as there can be such."""
    return [min(max(value, 0.0), 100.0) for value in values]


def save_growth(
    lines: Sequence[Series],
    bars: Sequence[Series],
    path: Path,
    *,
    best: str,
    annotations: Sequence[str],
    cost: bool,
    per_multiple: float,
    title: str,
) -> None:
    """Draw devices, or their cost, over load, a line for each choice of kinds; and attainment at the largest load.

    bars: for each model one point, attained over required (in percent), with its interval. best: label of the chosen
    line; annotations: the text at each of its points. per_multiple: requests/s that one times the rates is.
    """
    figure = figure_for(path, 11, 4.8)
    from matplotlib.ticker import MaxNLocator

    growth, attained = figure.subplots(1, 2, width_ratios=(3, 2))
    others = itertools.cycle([colour for colour in COLOURS if colour != CHOSEN])
    for line in lines:
        chosen = line.label == best
        colour = CHOSEN if chosen else next(others)
        # A fleet that was sized for a load serves those below it, down to the one before.
        growth.plot(
            line.x, line.y, drawstyle="steps-pre", lw=2.6 if chosen else 1.2, color=colour, alpha=1 if chosen else 0.8
        )
        growth.plot(line.x, line.y, "o", ms=6 if chosen else 4, color=colour)
        if len(lines) > 1:
            word, weight = ("the cheapest: " if cost else "the fewest: ", "bold") if chosen else ("", "normal")
            same = [each.label for each in lines if each.x[-1:] == line.x[-1:] and each.y[-1:] == line.y[-1:]]
            # Lines that end at the same point have their labels one above the other, the chosen one's at the point.
            above = 0 if chosen else LABEL * [label for label in same if label != best].index(line.label)
            above += LABEL if not chosen and best in same else 0
            away = {"xytext": (9, above), "textcoords": "offset points", "va": "center"}
            growth.annotate(
                word + line.label, (line.x[-1], line.y[-1]), fontsize=9, color=colour, weight=weight, **away
            )
        if chosen:
            for x, y, text in zip(line.x, line.y, annotations, strict=True):
                box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "lw": 0.6}
                # Below the line, which is the lowest: nothing else is there.
                away = {"xytext": (7, -7), "textcoords": "offset points", "ha": "left", "va": "top"}
                growth.annotate(text, (x, y), fontsize=8, bbox=box, **away)
    growth.set_ylim(0, max((y for line in lines for y in line.y), default=1.0) * 1.3)
    growth.grid(axis="y", color=FAINT, lw=0.6)
    growth.set_axisbelow(True)
    loads = [x for line in lines for x in line.x] or [1.0]
    span = (max(loads) - min(loads)) or 1.0
    growth.set_xlim(min(loads) - 0.12 * span, max(loads) + (0.62 if len(lines) > 1 else 0.16) * span)
    growth.yaxis.set_major_locator(MaxNLocator(integer=not cost))
    growth.set_xlabel("times the rates")
    growth.set_ylabel("cost per hour" if cost else "devices")
    growth.set_title(title, loc="left", fontsize=11)
    above = growth.secondary_xaxis("top", functions=(lambda x: x * per_multiple, lambda x: x / per_multiple))
    above.set_xlabel("requests/s", fontsize=9)
    for at, bar in enumerate(bars):
        (x,), (required,) = bar.x, bar.y
        kept = x >= required
        attained.plot(_percents([bar.low[0], bar.high[0]]), [at, at], color="#9A8C98", lw=3, solid_capstyle="butt")
        attained.plot([x], [at], "o", color="#009E73" if kept else VIOLATION)
        attained.plot([required, required], [at - 0.35, at + 0.35], color=VIOLATION, lw=1.5)
    attained.set_yticks(range(len(bars)), [bar.label for bar in bars])
    attained.set_ylim(len(bars) - 0.4, -0.6)
    attained.set_xlabel("simulated SLO attainment, %")
    attained.set_title("each model, on these devices", loc="left", fontsize=11)
    for axes in (growth, attained):
        axes.spines["right"].set_visible(False)
        axes.tick_params(labelsize=9)
    attained.spines["top"].set_visible(False)
    save_figure(figure, path)
