"""Plans and profiles for people: as tables, as bars in a terminal, as pictures."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.core.device_groups import DeviceGroup, group_devices
from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE, show_count, show_rate, show_seconds, show_share
from cotenant.errors import ConfigError
from cotenant.measure.table import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for lines, and Tol's light scheme for what black letters stand on; both are told apart by
# colour-blind eyes too.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#9A8C98")
STYLES = ("-", "--", ":")  # with COLOURS, so many lines are told apart
FILLS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#44BB99", "#99DDFF", "#BBCC33", "#AAAA00")
FREE = "#ECECEC"
SCREEN = 80  # columns
WIDTH = 70  # columns of a bar, where the devices' names leave so many
LONGEST = 24  # name in a table
LINES = 8  # of text in a bar of a picture
GROUPS = 40  # devices, or groups of alike ones, that are shown; a plan file has them all
CRUMB = 10  # ‰; what is free below that is what is left over of sevenths


class BarText(msgspec.Struct, frozen=True):
    """A line in a bar: the longest text that there is room for, or the beginning of the last."""

    texts: tuple[str, ...]
    bold: bool = False


def plan_table(plan: Plan, models: Iterable[Model] = ()) -> RenderableType:
    """Every placement, what it promises in the worst case against its target, what is left, what is unserved."""
    targets = {model.name: model.slo for model in models}
    numbers = (">batch", ">rate /s", ">batch takes", ">round", ">worst case", ">target")
    title = f"plan by {plan.planner}: {_summary(plan)}"
    rows = table(title, "partition", ">share", "model", *numbers)
    rows.title = None  # above it instead, where it may fold
    rows.columns[0].no_wrap = True
    groups = group_devices(plan)
    for group in groups[:GROUPS]:
        for slot, partition in enumerate(group.device.partitions):
            head = (f"{group.name}/{slot}", show_share(partition.share))
            for placement in partition.placements:
                target = targets.get(placement.model)
                rows.add_row(
                    *head,
                    escape(_middle(placement.model)),
                    f"{placement.batch}" if placement.procs == 1 else f"{placement.batch} x {placement.procs}",
                    show_rate(placement.rate),
                    show_seconds(placement.latency),
                    show_seconds(placement.duty),
                    show_seconds(placement.duty + placement.latency),
                    "-" if target is None else show_seconds(target),
                )
                head = ("", "")
        if group.device.free >= CRUMB:
            rows.add_row(group.name, show_share(group.device.free), Text("free", style="dim"))
        rows.add_section()
    if len(groups) > GROUPS:
        rows.add_row(Text(_more(groups), style="dim"))
    for model, rate in plan.unserved.items():
        rows.add_row(Text("unserved", style="bold red"), "", escape(_middle(model)), "", show_rate(rate))
    if any(group.count > 1 for group in groups):
        rows.caption = "N x: so many devices are alike; the figures are those of one"
    return Group(Text(title), rows)


class Bars(msgspec.Struct, frozen=True):
    """Bars of a plan's devices, as wide as the terminal lets them be."""

    plan: Plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from _bars(self.plan, options.max_width)


def plan_bars(plan: Plan) -> RenderableType:
    """Each device as a bar that is cut into its partitions."""
    return Bars(plan)


def _bars(plan: Plan, columns: int) -> list[Text]:
    colours = _colours(plan)
    lines: list[Text] = []
    groups = group_devices(plan)
    margin = max((len(group.name) for group in groups[:GROUPS]), default=0) + 1
    width = max(min(WIDTH, min(SCREEN, columns) - margin), WIDTH // 4)
    for group in groups[:GROUPS]:
        line = Text(group.name.ljust(margin))
        for start, end, partition in _spans(group.device):
            columns = round(end * width / WHOLE) - round(start * width / WHOLE)
            if partition is None:
                line.append("·" * columns, style="dim")
                continue
            # The gap shows where one partition ends, also between two of the same model.
            label = f" {show_share(partition.share)} {', '.join(p.model for p in partition.placements)}"
            line.append(_cut(label, columns - 1).ljust(columns - 1), style=f"black on {colours[_leader(partition)]}")
            line.append(" " * min(columns, 1))
        lines.append(line)
    if len(groups) > GROUPS:
        lines.append(Text(_more(groups), style="dim"))
    return lines


def save_plan(plan: Plan, path: Path | str) -> None:
    """A picture of the plan, SVG or PNG or PDF by the path's suffix. Raises ConfigError where it cannot be made.

    Across, a device is cut into its partitions; the strip under each shows how its models divide a round among them.
    """
    path, colours = Path(path), _colours(plan)
    groups = group_devices(plan)
    shown = groups[:GROUPS]
    # Room for all models of the partition that has most of them.
    lines = max((len(cut.placements) for group in shown for cut in group.device.partitions), default=1) + 1
    row = min(max(0.17 * lines + 0.34, 0.75), 1.7)
    figure = figure_for(path, 11, 1.15 + row * max(len(shown), 1))
    axes = figure.subplots()
    for at, group in enumerate(shown):
        for start, end, partition in _spans(group.device):
            if partition is None:
                axes.barh(at, (end - start) / 10, left=start / 10, height=0.84, color=FREE, edgecolor="white", lw=2)
                _write(axes, at, start, end, [BarText((f"free {show_share(end - start)}", "free"))])
            else:
                _draw(axes, at, start, end, partition, colours)
    axes.set_yticks(range(len(shown)), [group.name for group in shown])
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    below = ["share of the device, %"]
    if len(groups) > GROUPS:
        below.append(_more(groups))
    axes.set_xlabel("\n".join(below), fontsize=9)
    axes.set_title(f"{plan.planner}: {_summary(plan)}", loc="left", fontsize=11)
    if plan.unserved:
        names = ", ".join(f"{model} {show_rate(rate)}/s" for model, rate in plan.unserved.items())
        figure.text(0.995, 0.008, _cut(f"unserved: {names}", 150), ha="right", va="bottom", fontsize=8, color="#B00020")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=9)
    save_figure(figure, path)


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


def save_profiles(profiles: Sequence[Profile], path: Path | str) -> None:
    """Latency over batch, a panel for each model and a line for each share. Raises ConfigError as `save_plan` does."""
    path = Path(path)
    columns = min(3, max(1, len(profiles)))
    rows = -(-len(profiles) // columns)
    figure = figure_for(path, 4 * columns + 1, 3 * rows)
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = figure.subplots(rows, columns, squeeze=False).flat
    shares = sorted({share for profile in profiles for share in profile.shares})
    looks = dict(zip(shares, itertools.cycle(itertools.product(STYLES, COLOURS)), strict=False))
    lines = {}
    for profile, axes in zip(profiles, panels, strict=False):
        for share in profile.shares:
            style, colour = looks[share]
            points = [point for point in profile.points if point.share == share]
            (lines[share],) = axes.plot(
                [point.batch for point in points],
                [point.latency * 1e3 for point in points],
                style,
                marker=".",
                color=colour,
                label=show_share(share),
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_title(f"{profile.model} on {profile.kind}", loc="left", fontsize=10)
        axes.set_xlabel("batch, rows")
        axes.set_ylabel("latency, ms")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels:
        axes.set_visible(False)
    figure.legend(
        handles=[lines[share] for share in shares], loc="outside right upper", fontsize=8, title="share", frameon=False
    )
    save_figure(figure, path)


def check_drawable(path: Path) -> None:
    """Raises ConfigError for what cannot be drawn, by its suffix or without matplotlib: for those who will draw only
    after a while."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"{path}: cannot draw a {path.suffix or 'file without suffix'}; take .svg, .png or .pdf")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{path}: drawing needs matplotlib; install `cotenant[plot]`")


def figure_for(path: Path, width: float, height: float) -> Figure:
    """A figure, in inches, for a path that can be drawn."""
    check_drawable(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """All of it or, where that fails, nothing: what was there before stays until then."""
    part = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, dpi=150, format=path.suffix[1:])
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def _draw(axes: Axes, row: int, start: int, end: int, partition: Partition, colours: Mapping[str, str]) -> None:
    """One partition: what runs there, and below that who has which part of a round."""
    strip, left, width = 0.1, start / 10, (end - start) / 10
    colour = colours[_leader(partition)]
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
    lines = [BarText((f"{share}  round {show_seconds(_round(partition))}", share))]
    for placement in partition.placements:
        name, batch = placement.model, f"batch {placement.batch}"
        if placement.procs != 1:
            batch += f" x {placement.procs}"
        whole = f"{name}  {batch}  {show_rate(placement.rate)}/s"
        lines.append(BarText((whole, f"{name}  {batch}", name), bold=True))
    _write(axes, row - strip / 2, start, end, lines)


def _write(axes: Axes, row: float, start: int, end: int, lines: Sequence[BarText]) -> None:
    """Lines of text into a bar, each as long as it has room for; none where there is too little to say anything."""
    percent = (end - start) / 10
    if percent < 2.5:
        return
    rest = len(lines) - LINES + 1
    shown = lines if len(lines) <= LINES else [*lines[: LINES - 1], BarText((f"and {rest} more", f"+{rest}"))]
    for i, line in enumerate(shown):
        letters = int((percent - 1) / (0.76 if line.bold else 0.66))  # a letter takes so many percent of the width
        axes.annotate(
            next((text for text in line.texts if len(text) <= letters), _cut(line.texts[-1], letters)),
            (start / 10 + 0.6, row),
            xytext=(0, ((len(shown) - 1) / 2 - i) * 10.5),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            weight="bold" if line.bold else "normal",
        )


def _summary(plan: Plan) -> str:
    parts = [show_count(plan.devices_used, "device")]
    parts.append(f"{show_rate(plan.scale)} x the rates" if plan.objective == "rate" else "")
    parts.append("" if plan.cost_per_hour is None else f"{plan.cost_per_hour:.2f} per hour")
    parts.append("" if plan.bound is None else f"proven bound {plan.bound:.4g}")
    free = sum(device.free for device in plan.devices if device.free >= CRUMB)
    parts.append(_free(free) if free else "")
    parts.append(f"{show_rate(sum(plan.unserved.values()))} requests/s unserved" if plan.unserved else "")
    return ", ".join(part for part in parts if part)


def _free(thousandths: int) -> str:
    if thousandths <= WHOLE:
        return f"{show_share(thousandths)} of a device free"
    return f"as much as {thousandths / WHOLE:.1f} devices free"


def _more(groups: Sequence[DeviceGroup]) -> str:
    rest = sum(group.count for group in groups[GROUPS:])
    return f"… and {rest} more devices"


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: max(letters - 1, 0)] + "…" * (letters > 0)


def _middle(name: str) -> str:
    """A long name without its middle: beginnings and ends tell names apart."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[-(LONGEST // 2 - 1) :]}"


def _round(partition: Partition) -> float:
    return max((placement.duty for placement in partition.placements), default=0.0)


def _spans(device: Device) -> Iterable[tuple[int, int, Partition | None]]:
    """From where to where, in ‰, each partition lies on its device; None for what is free."""
    start = 0
    for partition in device.partitions:
        yield start, start + partition.share, partition
        start += partition.share
    if WHOLE - start >= CRUMB:
        yield start, WHOLE, None


def _leader(partition: Partition) -> str:
    """The model that gives a partition its colour: the one that takes most of a round."""
    return max(partition.placements, key=lambda p: p.latency).model if partition.placements else ""


def _colours(plan: Plan) -> dict[str, str]:
    names = sorted({placement.model for _, _, placement in plan.placements()})
    return {"": FREE} | {name: FILLS[i % len(FILLS)] for i, name in enumerate(names)}
