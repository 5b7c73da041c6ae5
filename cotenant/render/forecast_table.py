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


def forecast_table(forecast: Forecast, targets: Iterable[Model | Application]) -> Table:
    """Tabulate the predicted SLO attainment of a plan under Poisson arrivals, by model and application."""
    predictions = forecast.models | forecast.applications
    rows = table("predicted, under Poisson arrivals", "model", ">goodput/s", ">p50", ">p99", ">target", ">attainment")
    for target in targets:
        if target.name in predictions:
            predicted = predictions[target.name]
            colour = "green" if predicted.attainment >= target.attainment else "red"
            latencies = (show_seconds(seconds) for seconds in (predicted.p50, predicted.p99, target.slo))
            attainment = f"[{colour}]{predicted.attainment * 100:.2f} %[/]"
            rows.add_row(escape(target.name), f"{predicted.rate:.1f}", *latencies, attainment)
    return rows
