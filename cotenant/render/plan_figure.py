"""Draw a plan as a figure in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cotenant.core.device_groups import group_devices
from cotenant.core.plan import Partition, Plan
from cotenant.core.units import show_rate, show_seconds, show_share
from cotenant.render.figure import VIOLATION, figure_for, save_figure
from cotenant.render.plan_layout import (
    FREE,
    MAX_GROUPS,
    dominant_model,
    model_colours,
    more_devices,
    plan_summary,
    spans,
    truncate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 8  # of text in a bar


class BarText(msgspec.Struct, frozen=True):
    """Hold a line of text in a bar: the longest variant that fits, or the beginning of the last."""

    texts: tuple[str, ...]
    bold: bool = False


def save_plan(plan: Plan, path: Path | str) -> None:
    """Draw a plan as SVG, PNG or PDF, by the path's suffix. Raises ConfigError where it cannot be drawn.

    Across, a device is divided into its partitions; the strip under each shows each model's part of a duty cycle.
    """
    path, colours = Path(path), model_colours(plan)
    groups = group_devices(plan)
    shown = groups[:MAX_GROUPS]
    # Room for all models of the partition that has most of them.
    lines = max((len(cut.placements) for group in shown for cut in group.device.partitions), default=1) + 1
    row = min(max(0.17 * lines + 0.34, 0.75), 1.7)
    figure = figure_for(path, 11, 1.15 + row * max(len(shown), 1))
    axes = figure.subplots()
    for at, group in enumerate(shown):
        for start, end, partition in spans(group.device):
            if partition is None:
                axes.barh(at, (end - start) / 10, left=start / 10, height=0.84, color=FREE, edgecolor="white", lw=2)
                _write(axes, at, start, end, [BarText((f"free {show_share(end - start)}", "free"))])
            else:
                _draw(axes, at, start, end, partition, colours)
    axes.set_yticks(range(len(shown)), [group.name for group in shown])
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)
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
    save_figure(figure, path)


def _draw(axes: Axes, row: int, start: int, end: int, partition: Partition, colours: Mapping[str, str]) -> None:
    """Draw one partition: its models, and below them each model's part of a duty cycle."""
    strip, left, width = 0.1, start / 10, (end - start) / 10
    colour = colours[dominant_model(partition)]
    axes.barh(row - strip / 2, width, left=left, height=0.84 - strip, color=colour, edgecolor="white", lw=2)
    total = sum(placement.latency for placement in partition.placements)
    for placement in partition.placements:
        part = width * placement.latency / total
        axes.barh(
            row + 0.42 - strip / 2,
            part,
            left=left,
            height=strip,
            color=colours[placement.model],
            edgecolor="white",
            lw=1,
        )
        left += part
    share = show_share(partition.share)
    lines = [BarText((f"{share}  cycle {show_seconds(_duty_cycle(partition))}", share))]
    for placement in partition.placements:
        name, batch = placement.model, f"batch {placement.batch}"
        if placement.procs != 1:
            batch += f" x {placement.procs}"
        whole = f"{name}  {batch}  {show_rate(placement.rate)}/s"
        lines.append(BarText((whole, f"{name}  {batch}", name), bold=True))
    _write(axes, row - strip / 2, start, end, lines)


def _write(axes: Axes, row: float, start: int, end: int, lines: Sequence[BarText]) -> None:
    """Write lines into a bar, each as long as there is room for; none where there is too little."""
    percent = (end - start) / 10
    if percent < 2.5:
        return
    rest = len(lines) - MAX_LINES + 1
    shown = lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], BarText((f"and {rest} more", f"+{rest}"))]
    for i, line in enumerate(shown):
        letters = int((percent - 1) / (0.76 if line.bold else 0.66))  # percent of the width per letter
        axes.annotate(
            next((text for text in line.texts if len(text) <= letters), truncate(line.texts[-1], letters)),
            (start / 10 + 0.6, row),
            xytext=(0, ((len(shown) - 1) / 2 - i) * 10.5),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            weight="bold" if line.bold else "normal",
        )


def _duty_cycle(partition: Partition) -> float:
    return max((placement.duty for placement in partition.placements), default=0.0)
