"""Draw simulations: a run over time, the load that a plan sustains, the devices that growth needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cotenant.core.units import show_seconds
from cotenant.measure.report import Report
from cotenant.render.figure import COLOURS, STYLES, VIOLATION, figure_for, save_figure


def save_timeline(report: Report, path: Path, targets: Mapping[str, float]) -> None:
    """Draw rates, latency relative to targets, queue lengths, utilisation and cost over the time of a recorded run.

    targets: seconds by model. Raises ConfigError where it cannot be drawn.
    """
    line = report.timeline
    assert line is not None, "the run was not recorded"
    unit, word = _unit(line.step * len(line.times))
    times = [time / unit for time in line.times]
    figure = figure_for(path, 10, 9.5)
    rates, latency, queue, busy = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 1.6, 1.8))
    names = [name for name, offered in line.offered.items() if any(offered)]
    line_styles = dict(zip(names, itertools.cycle(itertools.product(STYLES, COLOURS)), strict=False))

    good = [math.fsum(line.goodput[name][n] for name in names) for n in range(len(times))]
    missed = [math.fsum(line.missed[name][n] for name in names) for n in range(len(times))]
    rates.plot(times, good, color="black", lw=1.2, label="goodput, all models")
    ended = [a + b for a, b in zip(good, missed, strict=True)]
    rates.fill_between(times, good, ended, color="#D55E00", alpha=0.7, lw=0, label="missed: late, rejected or failed")
    for name in names:
        style, colour = line_styles[name]
        rates.plot(times, line.goodput[name], style, color=colour, lw=1)
    rates.set_ylabel("requests/s")
    rates.set_ylim(0, max(ended, default=1.0) * 1.2 or 1.0)
    rates.legend(fontsize=8, loc="upper left", ncols=2, frameon=False)

    for name in names:
        style, colour = line_styles[name]
        parts = [math.nan if p99 is None else p99 / targets[name] for p99 in line.p99[name]]
        latency.plot(times, parts, style, color=colour, lw=1, label=name)
    latency.axhline(1.0, color=VIOLATION, lw=1)
    latency.set_ylabel("p99 / target")
    latency.set_ylim(bottom=0)
    figure.legend(*latency.get_legend_handles_labels(), fontsize=8, loc="outside right upper", frameon=False)

    queue.fill_between(times, line.waiting, color="#56B4E9", lw=0)
    queue.set_ylabel("queued")
    queue.set_ylim(bottom=0)

    busy.fill_between(times, [part * 100 for part in line.busy], color="#009E73", alpha=0.6, lw=0)
    busy.set_ylim(0, 100)
    busy.set_ylabel("utilisation, %")
    other = busy.twinx()
    if line.cost is not None:
        other.step(times, line.cost, where="mid", color="black", lw=1.2)
        other.set_ylabel("cost per hour")
    else:
        other.step(times, line.devices, where="mid", color="black", lw=1.2)
        other.set_ylabel("devices")
    other.set_ylim(0, max(max(line.cost or line.devices, default=0.0) * 1.25, 1e-9))
    busy.set_xlabel(word)
    busy.set_xlim(0, line.step * len(times) / unit)
    for axes in (rates, latency, queue, busy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    other.spines["top"].set_visible(False)
    figure.suptitle(f"{report.source}, {show_seconds(report.seconds)}", x=0.01, ha="left", fontsize=11)
    save_figure(figure, path)


def _unit(seconds: float) -> tuple[float, str]:
    """Return the unit of time that suits a run of that length: its seconds, and its name."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next((unit for unit in units if seconds > 3 * unit[0]), (1.0, "seconds"))


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
    figure = figure_for(path, 9, 5)
    axes = figure.subplots()
    line_styles = itertools.cycle(itertools.product(STYLES, COLOURS))
    for line, (style, colour) in zip(lines, line_styles, strict=False):
        axes.plot(line.x, line.y, style, marker=".", ms=4, lw=1.2, color=colour, label=line.label)
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, lw=0)
    axes.axhline(required, color=VIOLATION, lw=1)
    if math.isfinite(capacity):
        axes.axvspan(low, min(high, max(max(line.x) for line in lines)), color="black", alpha=0.08, lw=0)
        axes.axvline(capacity, color="black", lw=1.2)
    axes.set_ylim(min([required, *(y for line in lines for y in line.y)]) - 0.5, 100.2)
    axes.set_xlabel("times the rates")
    axes.set_ylabel("SLO attainment, %")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(fontsize=8, loc="lower left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


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
    growth, attained = figure.subplots(1, 2, width_ratios=(3, 2))
    for line, colour in zip(lines, itertools.cycle(COLOURS), strict=False):
        chosen = line.label == best
        growth.plot(line.x, line.y, marker="o", ms=5, lw=2.4 if chosen else 1.2, color=colour, label=line.label)
        if chosen:
            # On white, since the line passes through it.
            for x, y, text in zip(line.x, line.y, annotations, strict=True):
                box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
                away = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "va": "bottom"}
                growth.annotate(text, (x, y), fontsize=8.5, bbox=box, **away)
    growth.set_ylim(0, max((y for line in lines for y in line.y), default=1.0) * 1.3)
    growth.margins(x=0.09)
    growth.set_xlabel("times the rates")
    growth.set_ylabel("cost per hour" if cost else "devices")
    if len(lines) > 1:
        growth.legend(fontsize=9, loc="lower right", frameon=False)
    growth.set_title(title, loc="left", fontsize=11)
    above = growth.secondary_xaxis("top", functions=(lambda x: x * per_multiple, lambda x: x / per_multiple))
    above.set_xlabel("requests/s", fontsize=9)
    for at, bar in enumerate(bars):
        (x,), (required,) = bar.x, bar.y
        kept = x >= required
        attained.plot([bar.low[0], min(bar.high[0], 100)], [at, at], color="#9A8C98", lw=3, solid_capstyle="butt")
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
