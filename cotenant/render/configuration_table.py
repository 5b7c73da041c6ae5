"""Tabulate the configurations of a model, the best first."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.core.model import Model
from cotenant.core.units import show_rate, show_seconds, show_share
from cotenant.planners.configurations import Configuration
from cotenant.render.table import table

SHOWN = 10  # configurations of a model
MARK = "in the plan"


def configuration_table(
    model: Model, ranked: Sequence[Configuration], planned: Collection[tuple[int, int, int]] = ()
) -> Table:
    """Tabulate the configurations that serve most, and those of the plan, with their ranks.

    ranked: of one model on one kind of device. planned: (share in ‰, largest batch, workers) of the plan's
    placements.
    """
    title = f"{model.name} on {ranked[0].kind}: SLO {show_seconds(model.slo)} for {model.attainment * 100:g} %"
    numbers = (">rank", ">share", ">batch", ">rate within SLO, /s", ">of a whole device, /s", ">p50", ">p99")
    rows = table(title, *numbers, *([""] if planned else []))
    for rank, one in enumerate(ranked, start=1):
        in_plan = (one.share, one.batch, one.procs) in planned
        if rank > SHOWN and not in_plan:
            continue
        rows.add_row(
            f"{rank}",
            show_share(one.share),
            f"{one.batch}" if one.procs == 1 else f"{one.batch} x {one.procs}",
            show_rate(one.rate) if one.rate else Text("none", style="red"),
            show_rate(one.rate_of_whole) if one.rate else "-",
            _seconds(one.p50),
            _seconds(one.p99),
            *([MARK if in_plan else ""] if planned else []),
            style="bold" if in_plan else "",
        )
    if len(ranked) > SHOWN:
        rows.caption = f"of {len(ranked)} configurations of {escape(model.name)}"
    return rows


def _seconds(value: float) -> str:
    return "-" if math.isinf(value) else show_seconds(value)
