"""Tabulate the report of a run."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.core.units import show_count, show_seconds
from cotenant.measure.report import ModelReport, Report
from cotenant.measure.timeline import Timeline, interval_mean
from cotenant.render.table import shorten_middle, table

NARROW = 100  # columns of a terminal below which rare figures are left out, and outcomes told below the table


def report_table(report: Report) -> RenderableType:
    """Tabulate one row per model, batches where they are known, and devices where the run was recorded."""
    return ReportTable(report)


class ReportTable(msgspec.Struct, frozen=True):
    """Draw the report of a run as wide as the terminal allows."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        report, narrow = self.report, options.max_width < NARROW
        yield _models(report, narrow=narrow)
        if narrow:
            for row in report.models:
                if others := _others(row):
                    yield Text(f"{row.model}: {others}")
        batches = table("batches", "model", ">rows", ">predicted", ">observed")
        for row in report.models:
            if row.batch is not None:
                batches.add_row(
                    escape(row.model), f"{row.batch:.1f}", show_duration(row.predicted), show_duration(row.observed)
                )
        if batches.rows:
            yield batches
        if report.timeline is not None:
            yield Text(_devices(report.timeline))


def _models(report: Report, *, narrow: bool) -> Table:
    numbers = (">offered /s", ">goodput /s", ">p50", ">p99", *([] if narrow else [">p99.9"]), ">target", ">attainment")
    others = [] if narrow else ["other outcomes"]
    rows = table(f"{report.source}, {show_seconds(report.seconds)}", "model", *numbers, *others)
    for row in report.models:
        latencies = [show_duration(value) for value in (row.p50, row.p99, *([] if narrow else [row.p999]))]
        target = "none" if row.target is None else show_seconds(row.target)
        rates = f"{row.offered:.1f}", f"{row.goodput:.1f}"
        name = shorten_middle(row.model) if narrow else row.model
        told = [] if narrow else [_others(row) or "-"]
        rows.add_row(escape(name), *rates, *latencies, target, _attainment(row), *told)
    if report.lag is not None:
        rows.caption = f"send lag p99: {show_seconds(report.lag)}"
    return rows


def _others(row: ModelReport) -> str:
    """Return how many requests were not served, by outcome."""
    return ", ".join(f"{count} {name}" for name, count in row.outcomes.items() if count and name != "served")


def show_duration(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def show_attainment(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def _attainment(row: ModelReport) -> str:
    if row.attainment is None:
        return "-"
    colour = "red" if not row.slo_met else "yellow" if row.attainment < row.required else "green"
    return f"[{colour}]{show_attainment(row.attainment)}[/]"


def _devices(timeline: Timeline) -> str:
    """Return utilisation, queue lengths and cost of the devices in a line or two."""
    devices = show_count(f"{max(timeline.devices, default=0.0):.3g}", "device")
    peak = max(timeline.busy, default=0.0)
    text = f"{devices}, utilisation {timeline.utilisation:.0%}, at most {peak:.0%} in {show_seconds(timeline.step)}; "
    text = text.replace("%", " %")
    text += f"{interval_mean(timeline.waiting):.3g} requests queued, at most {max(timeline.waiting):.3g}"
    if timeline.spent is None or timeline.cost is None:
        return text
    text += f"\n{interval_mean(timeline.cost):.4g} per hour"
    return text + (
        f", {timeline.spent / timeline.answers * 1e6:.3g} per million answers within target" if timeline.answers else ""
    )
