"""Draw a simulated run over time: all models together, then each by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.core.units import show_seconds
from cotenant.measure.report import ModelReport, Report
from cotenant.render.figure import COLOURS, FAINT, VIOLATION, figure_for, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

    from cotenant.measure.timeline import Timeline

GOOD = "#009E73"
MANY = 5  # models from which on two stand side by side
ROW = 1.25  # inches


def save_timeline(report: Report, path: Path, targets: Mapping[str, float]) -> None:
    """Draw rates, queue and utilisation of a recorded run, and for each model its requests and its p99 latency against
    its target.

    targets: seconds by model. Raises ConfigError where it cannot be drawn.
    """
    line = report.timeline
    assert line is not None, "the run was not recorded"
    unit, word = _unit(line.step * len(line.times))
    times = [time / unit for time in line.times]
    names = [name for name, offered in line.offered.items() if any(offered)]
    blocks = 2 if len(names) > MANY else 1
    rows = -(-len(names) // blocks)
    figure = figure_for(path, 11, 3.4 + ROW * rows)
    heights = (3.0, 0.4 + ROW * max(rows, 1))
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_all(above, line, names, times)
    reports = {row.model: row for row in report.models}
    panels = below.subplots(max(rows, 1), 2 * blocks, sharex=True, squeeze=False)
    for place, name in enumerate(names):
        row, block = place % rows, place // rows
        rates, latency = panels[row][2 * block : 2 * block + 2]
        _draw_requests(rates, line, name, times, reports.get(name))
        _draw_latency(latency, line, name, times, targets[name])
    for place in range(len(names), rows * blocks):
        for axes in panels[place % rows][2 * (place // rows) : 2 * (place // rows) + 2]:
            axes.set_visible(False)
    for axes in (*above.axes, *below.axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, line.step * len(times) / unit)
    for axes in panels[-1]:
        axes.set_xlabel(word, fontsize=8)
    figure.suptitle(f"{report.source}, {show_seconds(report.seconds)}", x=0.01, ha="left", fontsize=11)
    save_figure(figure, path)


def _draw_all(figure: SubFigure, line: Timeline, names: Sequence[str], times: Sequence[float]) -> None:
    rates, queue, busy, fleet = figure.subplots(1, 4, width_ratios=(1.4, 1, 1, 1))
    good = [math.fsum(line.goodput[name][n] for name in names) for n in range(len(times))]
    missed = [math.fsum(line.missed[name][n] for name in names) for n in range(len(times))]
    _stack(rates, times, good, missed)
    rates.set_title("requests/s, all models", loc="left", fontsize=9)
    rates.legend(fontsize=8, loc="lower left", frameon=False)
    queue.fill_between(times, line.waiting, color=COLOURS[0], lw=0)
    queue.set_ylim(0, max([*line.waiting, 1.0]) * 1.15)
    queue.set_title("queued requests", loc="left", fontsize=9)
    busy.fill_between(times, [part * 100 for part in line.busy], color=COLOURS[4], alpha=0.5, lw=0)
    busy.set_ylim(0, 100)
    busy.set_title("utilisation, %", loc="left", fontsize=9)
    heights = line.devices if line.cost is None else line.cost
    fleet.step(times, heights, where="mid", color="black", lw=1.2)
    fleet.set_ylim(0, max([*heights, 1e-9]) * 1.25)
    fleet.set_title("devices" if line.cost is None else "cost per hour", loc="left", fontsize=9)


def _draw_requests(axes: Axes, line: Timeline, name: str, times: Sequence[float], report: ModelReport | None) -> None:
    _stack(axes, times, line.goodput[name], line.missed[name])
    axes.set_ylabel("requests/s", fontsize=8)
    axes.set_title(name, loc="left", fontsize=9, weight="bold")
    if report is not None and report.attainment is not None:
        colour = VIOLATION if not report.slo_met else GOOD if report.attainment >= report.required else "#A66B00"
        text = f"{math.floor(report.attainment * 1e4) / 100:.2f} % of {report.required * 100:g} %"
        axes.set_title(text, loc="right", fontsize=8, color=colour)


def _draw_latency(axes: Axes, line: Timeline, name: str, times: Sequence[float], target: float) -> None:
    p99 = [math.nan if seconds is None else seconds * 1e3 for seconds in line.p99[name]]
    limit = target * 1e3
    axes.plot(times, p99, color=COLOURS[4], lw=1.1)
    axes.fill_between(
        times, limit, p99, where=[value > limit for value in p99], color=VIOLATION, alpha=0.35, lw=0, interpolate=True
    )
    axes.axhline(limit, color=VIOLATION, lw=1, ls="--")
    axes.set_ylim(0, max([limit * 1.25, *(value * 1.1 for value in p99 if not math.isnan(value))]))
    axes.set_ylabel("p99, ms", fontsize=8)
    axes.set_title(f"target {show_seconds(target)}", loc="right", fontsize=8, color=VIOLATION)


def _stack(axes: Axes, times: Sequence[float], good: Sequence[float], missed: Sequence[float]) -> None:
    """Draw what met its target, and on it what did not."""
    ended = [a + b for a, b in zip(good, missed, strict=True)]
    axes.fill_between(times, good, color=GOOD, alpha=0.35, lw=0, label="in time")
    axes.plot(times, good, color=GOOD, lw=0.9)
    axes.fill_between(times, good, ended, color=VIOLATION, alpha=0.75, lw=0, label="late, rejected or failed")
    axes.set_ylim(0, max(ended, default=1.0) * 1.15 or 1.0)
    axes.grid(axis="y", color=FAINT, lw=0.5)


def _unit(seconds: float) -> tuple[float, str]:
    """Return the unit of time that suits a run of that length: its seconds, and its name."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next((unit for unit in units if seconds > 3 * unit[0]), (1.0, "seconds"))
