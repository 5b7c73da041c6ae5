"""Planners side by side on one problem: who needs least, by how much, and how far that is from what can be proven."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.units import show_names
from cotenant.planners import Problem
from cotenant.planners.applications import rates_of_models, slo_of
from cotenant.planners.check import check
from cotenant.planners.forecast import forecast

OBJECTIVE_TOLERANCE = 1e-6  # relative: by which devices or costs may differ and be equal
SCALE_TOLERANCE = 0.005  # relative: by which scales may differ and be equal; they are found no closer


class WorstModel(msgspec.Struct, frozen=True):
    """Of the models that are served, the one that breaks its promise most or comes nearest to it, by the forecast."""

    model: str
    attainment: float
    promised: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one planner answers. error: why it has no plan; the rest is then as where nothing is served.

    value: what the objective counts: devices, cost per hour, or the multiple of the rates. bound: what the planner
    proves of it. gap: how far it is from the best bound of all, as a part of that; None without one, or where not all
    is served. unserved: requests/s by model. worst: None where no request is served.
    """

    planner: str
    error: str = ""
    devices: int = 0
    cost_per_hour: float | None = None
    scale: float = 0.0
    value: float = 0.0
    bound: float | None = None
    gap: float | None = None
    solve_s: float = 0.0
    worst: WorstModel | None = None
    unserved: dict[str, float] = {}
    violations: tuple[str, ...] = ()

    @property
    def keeps(self) -> bool:
        """Whether the forecast sees every promise kept."""
        return self.worst is None or self.worst.attainment >= self.worst.promised


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """rows: the best first. bound: the best that any of the planners proves of the objective. story: all in words."""

    objective: str
    bound: float | None
    rows: tuple[Row, ...]
    story: str


def compare(problem: Problem, plans: Sequence[Plan], refusals: Mapping[str, str] = {}) -> Comparison:
    """Plans for one problem side by side, the best first. refusals: by planner, why it has no plan."""
    proven = [plan.bound for plan in plans if plan.bound is not None]
    bound = None if not proven else min(proven) if problem.objective == "rate" else max(proven)
    rows = [_row(problem, plan, bound) for plan in plans]
    rows.sort(key=lambda row: _rank(problem, row))
    rows += [Row(planner=name, error=reason) for name, reason in refusals.items()]
    return Comparison(objective=problem.objective, bound=bound, rows=tuple(rows), story=_story(problem, rows, bound))


def _row(problem: Problem, plan: Plan, bound: float | None) -> Row:
    found = forecast(plan, problem)
    expected = {name: it for name, it in (found.models | found.applications).items() if problem.rates.get(name)}
    # Under "rate" what is missing from the rates asked for is missing from all of them alike.
    lacks = set() if problem.objective == "rate" else plan.unserved.keys() | _without(plan, problem)
    worst = min(
        (
            WorstModel(name, it.attainment, slo_of(problem, name).attainment)
            for name, it in expected.items()
            if name not in lacks
        ),
        key=lambda it: it.attainment - it.promised,
        default=None,
    )
    if problem.objective == "rate":
        value = plan.scale
    else:
        priced = any(kind.price is not None for kind in problem.fleet)
        value = (plan.cost_per_hour or 0.0) if priced else float(plan.devices_used)
    gap = None
    if bound and (problem.objective == "rate" or not plan.unserved):
        least = math.ceil(bound - OBJECTIVE_TOLERANCE) if _whole(problem) else bound
        gap = abs(value - least) / least if abs(value - least) > OBJECTIVE_TOLERANCE * least else 0.0
    return Row(
        planner=plan.planner,
        devices=plan.devices_used,
        cost_per_hour=plan.cost_per_hour,
        scale=plan.scale,
        value=value,
        bound=plan.bound,
        gap=gap,
        solve_s=plan.solve_s,
        worst=worst,
        unserved=plan.unserved,
        violations=tuple(str(violation) for violation in check(plan, problem)),
    )


def _without(plan: Plan, problem: Problem) -> set[str]:
    """Applications that lack a model."""
    return {it.name for it in problem.applications if it.models() & plan.unserved.keys()}


def _whole(problem: Problem) -> bool:
    """Whether the objective counts devices, which come whole."""
    return problem.objective == "devices" and all(kind.price is None for kind in problem.fleet)


def _rank(problem: Problem, row: Row) -> tuple[float, ...]:
    """Sound plans first, then those that serve all, then those that keep their promises, then the objective."""
    if problem.objective == "rate":
        return (len(row.violations), -row.value, row.devices, row.solve_s)
    unserved = sum(row.unserved.values())
    return (len(row.violations), unserved, not row.keeps, row.value, row.devices, row.solve_s)


def _story(problem: Problem, rows: Sequence[Row], bound: float | None) -> str:
    sound = [row for row in rows if not row.error and not row.violations]
    if not sound:
        return "No planner has a sound plan for this problem."
    best, asked = sound[0], sum(rates_of_models(problem).values())
    if problem.objective == "rate":
        if best.value <= 0:
            return "No planner serves any multiple of the rates: one model or more has no place at all."
        told = [_ahead(sound, "serves {} x the rates", "serves {} x", "less", SCALE_TOLERANCE)]
    elif best.unserved:
        left = sum(best.unserved.values())
        told = [
            f"No planner serves all with these devices: {best.planner} leaves least, {left:.4g} of {asked:.4g}"
            f" requests/s ({_percent(left / asked)})."
        ]
    else:
        serving = [row for row in sound if not row.unserved]
        unit = "{} per hour" if best.cost_per_hour is not None else "{} device" + "s" * (best.value != 1)
        told = [_ahead(serving, f"serves all with {unit}", "needs {}", "more", OBJECTIVE_TOLERANCE)]
        short = [row.planner for row in sound if row.unserved]
        if short:
            told.append(f"{show_names(short)} cannot serve all.")
    if bound is not None and best.gap is not None:
        told.append(_against(problem, best, bound))
    if best.worst is not None and not best.keeps:
        # Plans have headroom for random arrivals wherever the devices have room for it.
        told.append(
            f"But under Poisson arrivals {best.worst.model} would attain {_percent(best.worst.attainment)} where"
            f" {_percent(best.worst.promised)} are promised."
        )
    return " ".join(told)


def _ahead(rows: Sequence[Row], does: str, others_do: str, word: str, near: float) -> str:
    """Who is best, and by how much the others need more or serve less than that; within `near` they are as good."""
    best = rows[0]
    ties = [row.planner for row in rows if row.keeps == best.keeps and abs(row.value - best.value) <= near * best.value]
    told = [_does(ties, does.format(_number(best.value)))]
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.planner not in ties:
            text = others_do.format(_number(row.value))
            if best.value and (row.value > best.value) == (word == "more"):
                text += f" ({_percent(abs(row.value / best.value - 1))} {word})"
            if best.keeps and not row.keeps:
                text += ", and breaks promises"
            groups.setdefault(text, []).append(row.planner)
    return "; ".join(told + [_does(names, text) for text, names in groups.items()]) + "."


def _does(names: Sequence[str], text: str) -> str:
    """``a needs 5``, ``a and b need 5``."""
    verb, rest = text.split(" ", 1)
    return f"{show_names(names)} {verb if len(names) == 1 else verb.removesuffix('s')} {rest}"


def _against(problem: Problem, best: Row, bound: float) -> str:
    limit = f"exceed {_number(bound)} x" if problem.objective == "rate" else f"do with less than {_number(bound)}"
    if not best.gap:
        limit = "serve more" if problem.objective == "rate" else "do with less"
        return f"No plan can {limit}, which is proven."
    return f"No plan can {limit}, which is proven: {best.planner} is within {_percent(best.gap)} of it."


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _percent(part: float) -> str:
    return f"{part * 100:.3g} %" if part < 0.99 or part >= 1 else f"{part * 100:.4g} %"
