"""Tabulate what a planner is asked: models with their targets and rates, and devices."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.markup import escape

from cotenant.core.application import Application
from cotenant.core.model import Kind, Model
from cotenant.core.units import show_memory, show_rate, show_seconds, show_share
from cotenant.planners import Problem
from cotenant.render.table import table

NO_LIMIT = 1 << 60  # bytes; devices with more have no memory limit to plan for
MANY = 6  # shares that are listed


def problem_tables(problem: Problem) -> list[RenderableType]:
    """Return a table of the models and applications, and one of the devices."""
    return [_targets(problem), _devices(problem.fleet)]


def _targets(problem: Problem) -> RenderableType:
    rows = table("models", "model", ">target", ">attainment", ">rate /s", ">largest batch")
    targets: list[Application | Model] = [*problem.applications, *problem.models]
    for target in targets:
        rate = problem.rates.get(target.name)
        shown = "-" if rate is None else show_rate(rate)
        limit = target.max_batch if isinstance(target, Model) else None
        rows.add_row(
            escape(target.name),
            show_seconds(target.slo),
            f"{target.attainment * 100:g} %",
            f"{shown} (assumed)" if target.name in problem.assumed else shown,
            "-" if limit is None else f"{limit}",
        )
    return rows


def _devices(fleet: Iterable[Kind]) -> RenderableType:
    rows = table("devices", "kind", ">at most", ">memory", ">price /h", "shares")
    for kind in fleet:
        shares = [show_share(share) for share in kind.cuts]
        rows.add_row(
            escape(kind.name),
            "any number" if kind.count is None else f"{kind.count}",
            "-" if kind.memory >= NO_LIMIT else show_memory(kind.memory),
            "-" if kind.price is None else f"{kind.price:.2f}",
            kind.geometry
            or (", ".join(shares) if len(shares) <= MANY else f"{len(shares)} from {shares[0]} to {shares[-1]}"),
        )
    return rows
