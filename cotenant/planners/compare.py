"""Compare the plans of several planners for one problem: by objective, against each other and the proven bound."""

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

OBJECTIVE_TOLERANCE = 1e-6  # relative tolerance of equality for devices and costs
SCALE_TOLERANCE = 0.005  # relative tolerance of equality for scales; they are searched no more precisely


class WorstModel(msgspec.Struct, frozen=True):
    """Name the served model or application whose predicted attainment is farthest below its objective, or nearest to
    it."""

    model: str
    attainment: float
    objective: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the plan of one planner.

    error: why it has no plan; the other fields are then as if nothing were served. value: what the objective counts:
    devices, cost per hour, or the multiple of the rates. bound: what the planner proves of it. gap: the distance to the
    best bound of all, as a fraction of that; None without one, or where some rate is unserved. unserved: requests/s by
    model. worst: None where no request is served.
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
    def meets_slos(self) -> bool:
        """Return whether every SLO is predicted to be met."""
        return self.worst is None or self.worst.attainment >= self.worst.objective


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a comparison of planners.

    rows: the best first. bound: the best that any planner proves of the objective. summary: the result in words.
    """

    objective: str
    bound: float | None
    rows: tuple[Row, ...]
    summary: str


def compare(problem: Problem, plans: Sequence[Plan], errors: Mapping[str, str] = {}) -> Comparison:
    """Compare plans for one problem, the best first. errors: planner → why it has no plan."""
    proven = [plan.bound for plan in plans if plan.bound is not None]
    bound = None if not proven else min(proven) if problem.objective == "rate" else max(proven)
    rows = [_row(problem, plan, bound) for plan in plans]
    rows.sort(key=lambda row: _rank(problem, row))
    rows += [Row(planner=name, error=reason) for name, reason in errors.items()]
    return Comparison(
        objective=problem.objective, bound=bound, rows=tuple(rows), summary=_summary(problem, rows, bound)
    )


def _row(problem: Problem, plan: Plan, bound: float | None) -> Row:
    if problem.objective == "rate":
        value = plan.scale
    else:
        priced = any(kind.price is not None for kind in problem.fleet)
        value = (plan.cost_per_hour or 0.0) if priced else float(plan.devices_used)
    gap = None
    if bound and (problem.objective == "rate" or not plan.unserved):
        least = math.ceil(bound - OBJECTIVE_TOLERANCE) if _counts_devices(problem) else bound
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
        worst=_worst_model(problem, plan),
        unserved=plan.unserved,
        violations=tuple(str(violation) for violation in check(plan, problem)),
    )


def _worst_model(problem: Problem, plan: Plan) -> WorstModel | None:
    predicted = forecast(plan, problem)
    # Under "rate" all models lack the same fraction of their rates.
    unserved = set() if problem.objective == "rate" else plan.unserved.keys() | _unserved_applications(plan, problem)
    served = (
        WorstModel(name, of.attainment, slo_of(problem, name).attainment)
        for name, of in (predicted.models | predicted.applications).items()
        if problem.rates.get(name) and name not in unserved
    )
    return min(served, key=lambda one: one.attainment - one.objective, default=None)


def _unserved_applications(plan: Plan, problem: Problem) -> set[str]:
    """Return the applications one of whose models has unserved rate."""
    return {application.name for application in problem.applications if application.models() & plan.unserved.keys()}


def _counts_devices(problem: Problem) -> bool:
    """Return whether the objective is a number of devices, which is an integer."""
    return problem.objective == "devices" and all(kind.price is None for kind in problem.fleet)


def _rank(problem: Problem, row: Row) -> tuple[float, ...]:
    """Rank sound plans first, then those that serve everything, then those that meet their SLOs, then the objective."""
    if problem.objective == "rate":
        return (len(row.violations), -row.value, row.devices, row.solve_s)
    unserved = sum(row.unserved.values())
    return (len(row.violations), unserved, not row.meets_slos, row.value, row.devices, row.solve_s)


def _summary(problem: Problem, rows: Sequence[Row], bound: float | None) -> str:
    sound = [row for row in rows if not row.error and not row.violations]
    if not sound:
        return "No planner has a sound plan for this problem."
    best = sound[0]
    proof = "" if bound is None or best.gap is None else _proof(problem, best, bound)
    if problem.objective == "rate":
        if best.value <= 0:
            return "No planner serves any multiple of the rates: at least one model cannot be served at all."
        sentences = [_ranking(sound, "serves {} x the rates", "serves {} x", proof, SCALE_TOLERANCE)]
    elif best.unserved:
        asked, unserved = sum(rates_of_models(problem).values()), sum(best.unserved.values())
        sentences = [
            f"No planner serves everything with these devices: {best.planner} leaves least unserved, {unserved:.4g} of"
            f" {asked:.4g} requests/s ({_percent(unserved / asked)})."
        ]
    else:
        serving = [row for row in sound if not row.unserved]
        needs = "needs {} per hour" if best.cost_per_hour is not None else "needs {} device" + "s" * (best.value != 1)
        sentences = [_ranking(serving, needs, "needs {}", proof, OBJECTIVE_TOLERANCE)]
        if short := [row.planner for row in sound if row.unserved]:
            sentences.append(f"{show_names(short)} cannot serve everything.")
    if best.worst is not None and not best.meets_slos:
        # Plans have headroom for random arrivals wherever the devices have room for it.
        sentences.append(
            f"SLO violated under Poisson arrivals, predicted: {best.worst.model} {_percent(best.worst.attainment)} <"
            f" {_percent(best.worst.objective)}."
        )
    return " ".join(sentences)


def _ranking(rows: Sequence[Row], best_text: str, other_text: str, proof: str, tolerance: float) -> str:
    """State which planner is best, and how much more the others need or less they serve; plans within the tolerance are
    tied."""
    best = rows[0]
    ties = [
        row.planner
        for row in rows
        if row.meets_slos == best.meets_slos and abs(row.value - best.value) <= tolerance * best.value
    ]
    clauses = [_clause(ties, best_text.format(_number(best.value))) + proof]
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.planner not in ties:
            text = other_text.format(_number(row.value))
            if best.value and row.value != best.value:
                change = row.value / best.value - 1
                text += f" ({'+' if change > 0 else '-'}{_percent(abs(change))})"
            if best.meets_slos and not row.meets_slos:
                text += ", and violates SLOs"
            groups.setdefault(text, []).append(row.planner)
    return "; ".join(clauses + [_clause(names, text) for text, names in groups.items()]) + "."


def _clause(names: Sequence[str], text: str) -> str:
    """Return ``a needs 5``, or ``a and b need 5``."""
    verb, rest = text.split(" ", 1)
    return f"{show_names(names)} {verb if len(names) == 1 else verb.removesuffix('s')} {rest}"


def _proof(problem: Problem, best: Row, bound: float) -> str:
    if not best.gap:
        return " (proven optimal)"
    unit = " x" if problem.objective == "rate" else ""
    return f" (within {_percent(best.gap)} of the proven bound, {_number(bound)}{unit})"


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.3g} %" if fraction < 0.99 or fraction >= 1 else f"{fraction * 100:.4g} %"
