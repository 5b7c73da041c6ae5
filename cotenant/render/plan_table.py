"""Show a plan in a terminal: a table of its placements, and a bar for each device."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Iterator
from textwrap import wrap

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.core.device_groups import group_devices
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE, show_rate, show_seconds, show_share
from cotenant.render.plan_layout import (
    MAX_GROUPS,
    MIN_FREE,
    dominant_model,
    model_colours,
    more_devices,
    plan_summary,
    spans,
    truncate,
)
from cotenant.render.table import shorten_middle, table

SCREEN = 80  # columns
WIDTH = 70  # columns of a bar, where the devices' names leave that many
NARROW = 7  # columns of a partition up to which its models are letters, where names do not fit
ALPHABET = string.ascii_lowercase + string.ascii_uppercase + string.digits


def plan_table(plan: Plan, models: Iterable[Model] = ()) -> RenderableType:
    """Tabulate every placement with its worst-case latency and its target, and free shares; say what is unserved."""
    targets = {model.name: model.slo for model in models}
    numbers = (">batch", ">rate /s", ">batch latency", ">duty cycle", ">worst case", ">target")
    title = f"plan by {plan.planner}: {plan_summary(plan)}"
    rows = table(title, "partition", ">share", "model", *numbers)
    rows.title = None  # above it instead, where it may fold
    rows.columns[0].no_wrap = True
    groups = group_devices(plan)
    for group in groups[:MAX_GROUPS]:
        for slot, partition in enumerate(group.device.partitions):
            head = (f"{group.name}/{slot}", show_share(partition.share))
            for placement in partition.placements:
                target = targets.get(placement.model)
                rows.add_row(
                    *head,
                    escape(shorten_middle(placement.model)),
                    f"{placement.batch}" if placement.procs == 1 else f"{placement.batch} x {placement.procs}",
                    show_rate(placement.rate),
                    show_seconds(placement.latency),
                    show_seconds(placement.duty),
                    show_seconds(placement.duty + placement.latency),
                    "-" if target is None else show_seconds(target),
                )
                head = ("", "")
        if group.device.free >= MIN_FREE:
            rows.add_row(group.name, show_share(group.device.free), Text("free", style="dim"))
        rows.add_section()
    if len(groups) > MAX_GROUPS:
        rows.add_row(Text(more_devices(groups), style="dim"))
    if any(group.count > 1 for group in groups):
        rows.caption = "N x: that many equal devices; the figures are per device"
    return Group(Text(title), rows, *unserved_lines(plan))


def unserved_lines(plan: Plan) -> list[Text]:
    """Return a line of what a plan leaves unserved, if there is anything."""
    left = ", ".join(f"{model} {show_rate(rate)}" for model, rate in plan.unserved.items())
    return [Text.assemble(("unserved", "bold red"), f", requests/s: {left}")] if left else []


class Bars(msgspec.Struct, frozen=True):
    """Draw the bars of a plan's devices, as wide as the terminal allows."""

    plan: Plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from _bars(self.plan, options.max_width)


def plan_bars(plan: Plan) -> RenderableType:
    """Draw each device as a bar that is divided into its partitions."""
    return Bars(plan)


def _bars(plan: Plan, limit: int) -> list[Text]:
    colours, letters, is_narrow = model_colours(plan), _letters(plan), False
    lines: list[Text] = []
    groups = group_devices(plan)
    margin = max((len(group.name) for group in groups[:MAX_GROUPS]), default=0) + 1
    width = max(min(WIDTH, min(SCREEN, limit) - margin), WIDTH // 4)
    for group in groups[:MAX_GROUPS]:
        line = Text(group.name.ljust(margin))
        for start, end, partition in spans(group.device):
            columns = round(end * width / WHOLE) - round(start * width / WHOLE)
            if partition is None:
                line.append("·" * columns, style="dim")
                continue
            label = f" {show_share(partition.share)} {', '.join(p.model for p in partition.placements)}"
            if len(label) >= columns and columns <= NARROW:
                label = "".join(letters[placement.model] for placement in partition.placements)
                is_narrow = True
            # The gap shows where one partition ends, also between two of the same model.
            line.append(
                truncate(label, columns - 1).ljust(columns - 1), style=f"black on {colours[dominant_model(partition)]}"
            )
            line.append(" " * min(columns, 1))
        lines.append(line)
    if len(groups) > MAX_GROUPS:
        lines.append(Text(more_devices(groups), style="dim"))
    if is_narrow:
        key = "  ".join(f"{letter}\N{NO-BREAK SPACE}{name}" for name, letter in letters.items())
        parts = wrap(key, min(SCREEN, limit), break_long_words=False, break_on_hyphens=False)
        lines += [Text(part.replace("\N{NO-BREAK SPACE}", " "), style="dim") for part in parts]
    return lines


def _letters(plan: Plan) -> dict[str, str]:
    """Return a letter for each model, for partitions too narrow for names; those beyond the alphabets share one."""
    names = sorted({placement.model for _, _, placement in plan.placements()})
    return dict(itertools.zip_longest(names, ALPHABET[: len(names)], fillvalue="…"))
