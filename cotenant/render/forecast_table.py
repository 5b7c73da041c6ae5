"""Tabulate the forecast of a plan."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from cotenant.core.application import Application
from cotenant.core.model import Model
from cotenant.core.units import show_seconds
from cotenant.planners.forecast import Forecast
from cotenant.render.table import table


def forecast_table(forecast: Forecast, targets: Iterable[Model | Application], lent: Forecast | None = None) -> Table:
    """Tabulate the predicted SLO attainment of a plan under Poisson arrivals, by model and application. lent: the
    forecast with lending, of which the median is shown."""
    predictions = forecast.models | forecast.applications
    with_lending = {} if lent is None else lent.models | lent.applications
    headings = (">goodput/s", ">p50", *([] if lent is None else [">p50, lent"]), ">p99", ">target", ">attainment")
    rows = table("predicted, under Poisson arrivals", "model", *headings)
    for target in targets:
        if target.name in predictions:
            predicted = predictions[target.name]
            colour = "green" if predicted.attainment >= target.attainment else "red"
            medians = [predicted.p50, *([with_lending[target.name].p50] if with_lending else [])]
            latencies = (show_seconds(seconds) for seconds in (*medians, predicted.p99, target.slo))
            attainment = f"[{colour}]{predicted.attainment * 100:.2f} %[/]"
            rows.add_row(escape(target.name), f"{predicted.rate:.1f}", *latencies, attainment)
    return rows
