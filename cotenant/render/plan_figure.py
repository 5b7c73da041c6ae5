"""Draw a plan as a figure in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.core.device_groups import group_devices
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.units import show_rate, show_seconds, show_share
from cotenant.render.figure import VIOLATION, figure_for, save_figure
from cotenant.render.plan_layout import (
    FREE,
    MAX_GROUPS,
    model_colours,
    more_devices,
    plan_summary,
    spans,
    truncate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Heights in inches.
HEAD = 0.22  # share and duty cycle of a partition
BAND = 0.2  # a model of it
STRIP = 0.16  # its time
GAP = 0.22  # between two devices
WIDTH = 11.0
AXIS = 9.6  # of the width, what the axes take, about
LEAST = 5  # letters to which a name may be shortened
LETTER = 0.0625  # width of a letter
LEGEND_COLUMNS = 6


def save_plan(plan: Plan, path: Path | str) -> None:
    """Draw a plan as SVG, PNG or PDF, by the path's suffix. Raises ConfigError where it cannot be drawn.

    Across, a device is divided into its partitions, and each has a band for each of its models, in that model's colour;
    the strip at its bottom is one duty cycle, and each model's part of it.
    """
    path, colours = Path(path), model_colours(plan)
    groups = group_devices(plan)
    shown = groups[:MAX_GROUPS]
    heights = [_height(group.device) for group in shown] or [HEAD]
    entries = len(colours)  # the models, and what is free
    legend = 0.22 * (-(-entries // LEGEND_COLUMNS) + 1)
    figure = figure_for(path, WIDTH, sum(heights) + GAP * len(heights) + 1.15 + legend)
    axes = figure.subplots()
    top, middles = GAP / 2, []
    for group, height in zip(shown, heights, strict=False):
        middles.append(top + height / 2)
        for start, end, partition in spans(group.device):
            if partition is None:
                _box(axes, start, end, top, height, FREE)
                _write(axes, start, end, top + height / 2, f"free {show_share(end - start)}", "free")
            else:
                _draw(axes, start, end, top, height, partition, colours)
        top += height + GAP
    axes.set_yticks(middles, [group.name for group in shown])
    axes.set_ylim(top, 0)
    axes.set_xlim(0, 100)
    below = ["share of the device, %"]
    if len(groups) > MAX_GROUPS:
        below.append(more_devices(groups))
    axes.set_xlabel("\n".join(below), fontsize=9)
    axes.set_title(f"{plan.planner}: {plan_summary(plan)}", loc="left", fontsize=11)
    if plan.unserved:
        names = ", ".join(f"{model} {show_rate(rate)}/s" for model, rate in plan.unserved.items())
        figure.text(
            0.995, 0.008, truncate(f"unserved: {names}", 150), ha="right", va="bottom", fontsize=8, color=VIOLATION
        )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=9)
    _add_legend(axes, plan, colours)
    save_figure(figure, path)


def _height(device: Device) -> float:
    """Return the height of a device: there is room for all models of the partition that has most of them."""
    return HEAD + BAND * max((len(cut.placements) for cut in device.partitions), default=1) + STRIP


def _draw(
    axes: Axes, start: int, end: int, top: float, height: float, partition: Partition, colours: Mapping[str, str]
) -> None:
    """Draw one partition: its share, a band for each model, and at the bottom one duty cycle."""
    _box(axes, start, end, top, height, FREE)
    share, cycle = show_share(partition.share), show_seconds(_duty_cycle(partition))
    _write(axes, start, end, top + HEAD / 2, f"{share} · duty cycle {cycle}", f"{share} · {cycle}", share, bold=True)
    placements = partition.placements
    band = (height - HEAD - STRIP) / max(len(placements), 1)
    for number, placement in enumerate(placements):
        at = top + HEAD + number * band
        _box(axes, start, end, at, band, colours[placement.model])
        _write(axes, start, end, at + band / 2, *_texts(placement))
    _draw_time(axes, start, end, top + height - STRIP, placements, colours)


def _draw_time(
    axes: Axes, start: int, end: int, top: float, placements: Sequence[Placement], colours: Mapping[str, str]
) -> None:
    """Draw one duty cycle, from left to right: a batch of each model, each as long as it takes."""
    total = sum(placement.latency for placement in placements)
    left: float = start
    for placement in placements:
        width = (end - start) * placement.latency / total
        _box(axes, left, left + width, top, STRIP, colours[placement.model], hatch="////")
        _write(axes, left, left + width, top + STRIP / 2, show_seconds(placement.latency), "", size=6.5)
        left += width


def _texts(placement: Placement) -> tuple[str, ...]:
    """Return what a band says, from the longest variant to the shortest."""
    name, batch = placement.model, f"batch {placement.batch}"
    if placement.procs != 1:
        batch += f" x {placement.procs}"
    return f"{name} · {batch} · {show_rate(placement.rate)}/s", f"{name} · {batch}", name


def _box(axes: Axes, start: float, end: float, top: float, height: float, colour: str, *, hatch: str = "") -> None:
    from matplotlib.patches import Rectangle

    box = Rectangle((start / 10, top), (end - start) / 10, height, facecolor=colour, edgecolor="white", lw=1.2)
    if hatch:
        box.set(hatch=hatch, hatch_linewidth=0.6)
    axes.add_patch(box)


def _write(axes: Axes, start: float, end: float, at: float, *texts: str, bold: bool = False, size: float = 7.5) -> None:
    """Write the first text that fits into a box, else the ends of the last; nothing where that says nothing."""
    letters = int((end - start) / 1000 * AXIS / (LETTER * size / 7.5 * (1.08 if bold else 1.0)) - 1.2)
    text = next((text for text in texts if len(text) <= letters), "")
    if not text and texts[-1] and letters >= LEAST:
        text = f"{texts[-1][: letters - 4]}…{texts[-1][-3:]}"  # ends tell names apart
    if not text:
        return
    halo = (
        {"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.75} if size < 7 else None
    )
    axes.annotate(
        text,
        (start / 10, at),
        xytext=(3, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=size,
        weight="bold" if bold else "normal",
        bbox=halo,
    )


def _add_legend(axes: Axes, plan: Plan, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items() if name]
    if any(device.free for device in plan.devices):
        handles.append(Patch(facecolor=FREE, label="free"))
    handles.append(
        Patch(facecolor="white", edgecolor="#888888", hatch="////", label="one duty cycle: a batch of each model")
    )
    axes.figure.legend(
        handles=handles, loc="outside lower left", ncols=LEGEND_COLUMNS, fontsize=8, frameon=False, handlelength=1.2
    )


def _duty_cycle(partition: Partition) -> float:
    return max((placement.duty for placement in partition.placements), default=0.0)
