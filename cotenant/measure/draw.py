"""Plans and profiles for people: as tables, as bars in a terminal, as pictures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE, show_seconds, show_share
from cotenant.errors import ConfigError
from cotenant.measure.table import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind eyes too, without black and the palest.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#9A8C98")
FREE = "#D8D8D8"
WIDTH = 70  # columns of a bar


def plan_table(plan: Plan, models: Iterable[Model] = ()) -> RenderableType:
    """Every placement, what it promises in the worst case against its target, what is left, what is unserved."""
    targets = {model.name: model.slo for model in models}
    numbers = (">batch", ">rate/s", ">batch takes", ">round", ">worst case", ">target")
    rows = table(f"plan by {plan.planner}: {_summary(plan)}", "partition", ">share", "model", *numbers)
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            head = (f"{device.kind}{device.id}/{slot}", show_share(partition.share))
            for placement in partition.placements:
                target = targets.get(placement.model)
                rows.add_row(
                    *head,
                    escape(placement.model),
                    f"{placement.batch}" if placement.procs == 1 else f"{placement.batch} x {placement.procs}",
                    _rate(placement.rate),
                    show_seconds(placement.latency),
                    show_seconds(placement.duty),
                    show_seconds(placement.duty + placement.latency),
                    "-" if target is None else show_seconds(target),
                )
                head = ("", "")
        if device.free > 0:
            rows.add_row(f"{device.kind}{device.id}", show_share(device.free), Text("free", style="dim"))
        rows.add_section()
    for model, rate in plan.unserved.items():
        rows.add_row("-", "-", escape(model), "-", _rate(rate), Text("unserved", style="bold red"))
    return rows


def plan_bars(plan: Plan) -> RenderableType:
    """Each device as a bar that is cut into its partitions."""
    colours = _colours(plan)
    lines: list[Text] = []
    width = max((len(f"{device.kind}{device.id}") for device in plan.devices), default=0)
    for device in plan.devices:
        line = Text(f"{device.kind}{device.id}".ljust(width + 1))
        for start, end, partition in _spans(device):
            columns = round(end * WIDTH / WHOLE) - round(start * WIDTH / WHOLE)
            if partition is None:
                line.append("·" * columns, style="dim")
                continue
            # The gap shows where one partition ends, also between two of the same model.
            label = f" {show_share(partition.share)} {', '.join(p.model for p in partition.placements)}"
            line.append(label[: columns - 1].ljust(columns - 1), style=f"black on {colours[_leader(partition)]}")
            line.append(" " * min(columns, 1))
        lines.append(line)
    return Group(*lines)


def save_plan(plan: Plan, path: Path) -> None:
    """A picture of the plan, SVG or PNG or PDF by the path's suffix. Raises ConfigError where it cannot be made."""
    colours = _colours(plan)
    figure = _figure(path, 11, 1.1 + 0.9 * min(max(len(plan.devices), 1), 40))
    axes = figure.subplots()
    for row, device in enumerate(plan.devices):
        for start, end, partition in _spans(device):
            _draw(axes, row, start, end, partition, FREE if partition is None else colours[_leader(partition)])
    axes.set_yticks(range(len(plan.devices)), [f"{device.kind}{device.id}" for device in plan.devices])
    axes.set_ylim(len(plan.devices) - 0.45, -0.55)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the device, %")
    axes.set_title(f"{plan.planner}: {_summary(plan)}", loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    _save(figure, path)


def profile_table(profile: Profile) -> Table:
    """Latency of each measured batch on each measured share."""
    batches = sorted({point.batch for point in profile.points})
    rows = table(f"{profile.model} on {profile.kind}", ">share", *(f">batch {batch}" for batch in batches))
    for share in profile.shares:
        measured = {point.batch: point.latency for point in profile.points if point.share == share}
        rows.add_row(
            show_share(share), *(show_seconds(measured[batch]) if batch in measured else "-" for batch in batches)
        )
    return rows


def save_profiles(profiles: Sequence[Profile], path: Path) -> None:
    """Latency over batch, a panel for each model and a line for each share. Raises ConfigError as `save_plan` does."""
    columns = min(3, max(1, len(profiles)))
    rows = -(-len(profiles) // columns)
    figure = _figure(path, 4 * columns, 3 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for profile, axes in zip(profiles, panels, strict=False):
        for colour, share in zip(itertools.cycle(COLOURS), profile.shares, strict=False):
            points = [point for point in profile.points if point.share == share]
            axes.plot(
                [point.batch for point in points],
                [point.latency * 1e3 for point in points],
                marker=".",
                color=colour,
                label=show_share(share),
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{profile.model} on {profile.kind}", loc="left", fontsize=10)
        axes.set_xlabel("batch, rows")
        axes.set_ylabel("latency, ms")
        axes.legend(fontsize=7, title="share", title_fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels:
        axes.set_visible(False)
    _save(figure, path)


def _figure(path: Path, width: float, height: float) -> Figure:
    """A figure, in inches, for a path whose suffix can be drawn."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"{path}: cannot draw a {path.suffix or 'file without suffix'}; take .svg, .png or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"{path}: drawing needs matplotlib; install `cotenant[plot]`") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def _draw(axes: Axes, row: int, start: int, end: int, partition: Partition | None, colour: str) -> None:
    share = end - start
    axes.barh(row, share / 10, left=start / 10, height=0.84, color=colour, alpha=0.7, edgecolor="white", linewidth=2)
    lines = [show_share(share)] if partition else [f"free {show_share(share)}"]
    placements = partition.placements if partition else ()
    lines += [f"{placement.model} b{placement.batch} {placement.rate:.3g}/s" for placement in placements]
    # Some 1.1 % of the width to a character, and room for five lines.
    letters = int(share / 10 / 0.85)
    shown = [line if len(line) <= letters else line[: max(letters - 1, 0)] + "…" for line in lines[:5]]
    if letters >= 4:
        axes.text(start / 10 + 0.6, row, "\n".join(shown), va="center", fontsize=7, linespacing=1.25, clip_on=True)


def _summary(plan: Plan) -> str:
    devices = f"{plan.devices_used} device{'' if plan.devices_used == 1 else 's'}"
    parts = [devices, f"{_rate(plan.scale)} x the rates" if plan.objective == "rate" else ""]
    parts.append("" if plan.cost_per_hour is None else f"{plan.cost_per_hour:.2f} per hour")
    free = sum(device.free for device in plan.devices)
    parts.append(f"{show_share(free)} of a device free" if free else "")
    parts.append(f"{_rate(sum(plan.unserved.values()))} requests/s unserved" if plan.unserved else "")
    return ", ".join(part for part in parts if part)


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _spans(device: Device) -> Iterable[tuple[int, int, Partition | None]]:
    """From where to where, in ‰, each partition lies on its device; None for what is free."""
    start = 0
    for partition in device.partitions:
        yield start, start + partition.share, partition
        start += partition.share
    if start < WHOLE:
        yield start, WHOLE, None


def _leader(partition: Partition) -> str:
    """The model that gives a partition its colour: the one that takes most of a round."""
    return max(partition.placements, key=lambda p: p.latency).model if partition.placements else ""


def _colours(plan: Plan) -> dict[str, str]:
    names = sorted({placement.model for _, _, placement in plan.placements()})
    return {"": FREE} | {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
