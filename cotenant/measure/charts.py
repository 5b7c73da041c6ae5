"""Runs as pictures: how one went over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from cotenant.measure.draw import COLOURS, figure_for, save
from cotenant.measure.report import Report

STYLES = ("-", "--", ":")  # with COLOURS, so many models have lines of their own


def save_timeline(report: Report, path: Path, targets: Mapping[str, float]) -> None:
    """Rates, latency against the targets, queues, and what is busy and costs, over the time of a recorded run.

    targets: seconds by model. Raises ConfigError where it cannot be drawn.
    """
    line = report.timeline
    assert line is not None, "the run was not recorded"
    times = line.times
    figure = figure_for(path, 10, 9.5)
    rates, latency, queue, busy = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 1.6, 1.8))
    names = [name for name, offered in line.offered.items() if any(offered)]
    looks = dict(zip(names, itertools.cycle(itertools.product(STYLES, COLOURS)), strict=False))

    good = [math.fsum(line.goodput[name][n] for name in names) for n in range(len(times))]
    missed = [math.fsum(line.missed[name][n] for name in names) for n in range(len(times))]
    rates.plot(times, good, color="black", lw=1.2, label="answered in time, all models")
    ended = [a + b for a, b in zip(good, missed, strict=True)]
    rates.fill_between(times, good, ended, color="#D55E00", alpha=0.7, lw=0, label="not in time, or not at all")
    for name in names:
        style, colour = looks[name]
        rates.plot(times, line.goodput[name], style, color=colour, lw=1)
    rates.set_ylabel("requests/s")
    rates.set_ylim(0, max(ended, default=1.0) * 1.2 or 1.0)
    rates.legend(fontsize=8, loc="upper left", ncols=2, frameon=False)

    for name in names:
        style, colour = looks[name]
        parts = [math.nan if p99 is None else p99 / targets[name] for p99 in line.p99[name]]
        latency.plot(times, parts, style, color=colour, lw=1, label=name)
    latency.axhline(1.0, color="#B00020", lw=1)
    latency.set_ylabel("p99 / target")
    latency.set_ylim(bottom=0)
    figure.legend(*latency.get_legend_handles_labels(), fontsize=8, loc="outside right upper", frameon=False)

    queue.fill_between(times, line.waiting, color="#56B4E9", lw=0)
    queue.set_ylabel("waiting")
    queue.set_ylim(bottom=0)

    busy.fill_between(times, [part * 100 for part in line.busy], color="#009E73", alpha=0.6, lw=0)
    busy.set_ylim(0, 100)
    busy.set_ylabel("devices busy, %")
    other = busy.twinx()
    if line.cost is not None:
        other.step(times, line.cost, where="mid", color="black", lw=1.2)
        other.set_ylabel("cost per hour")
    else:
        other.step(times, line.devices, where="mid", color="black", lw=1.2)
        other.set_ylabel("devices")
    other.set_ylim(0, max(max(line.cost or line.devices, default=0.0) * 1.25, 1e-9))
    busy.set_xlabel("seconds")
    busy.set_xlim(0, line.step * len(times))
    for axes in (rates, latency, queue, busy):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    other.spines["top"].set_visible(False)
    figure.suptitle(f"{report.source}, {report.seconds:.4g} s", x=0.01, ha="left", fontsize=11)
    save(figure, path)
