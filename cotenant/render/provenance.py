"""Explain in a terminal why a plan was chosen: candidates, headroom, validation, and the time of each stage."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.core.plan import Plan
from cotenant.core.provenance import Candidate, Proof, Validation
from cotenant.core.units import show_count, show_names, show_rate, show_seconds
from cotenant.planners.candidates import objective_value
from cotenant.render.plan_layout import devices_to_serve_all
from cotenant.render.table import table

STAGES = {
    "candidates": "candidates",
    "headroom": "headroom and local search",
    "validation": "validation",
    "slo_budget": "SLO budgets",
}


ENDS = {
    "proof": "search: ended by the proof",
    "work": "search: ended by its counted work, so that every run gives this plan",
    "clock": "search: ended by the clock, so that another run may give another plan; a longer --time-limit avoids that",
}


def provenance_view(plan: Plan) -> RenderableType:
    """Return how a plan came about; one line where that is unknown."""
    provenance = plan.provenance
    if provenance is None:
        return Text("why this plan: its file does not say how it came about")
    lines = [
        _proof_line(plan, provenance.proven),
        ENDS.get(provenance.ended_by or "", ""),
        *_factor_lines("headroom", "rate", provenance.headroom, plan),
        *_factor_lines("tightened", "target", provenance.slo_factors, plan),
        _validation_line(provenance.validation),
        _front_end_line(provenance.request_s),
        f"time: {_times(provenance.stage_s)}",
    ]
    return Group(_candidate_table(plan, provenance.candidates), "", *(Text(line) for line in lines if line))


def _candidate_table(plan: Plan, candidates: tuple[Candidate, ...]) -> RenderableType:
    objective = ">times the rates" if plan.objective == "rate" else ">cost /h" if plan.cost_per_hour else ">devices"
    unserved = plan.objective == "devices" and any(candidate.unserved for candidate in candidates)
    rows = table(
        "why this plan: candidates for evenly spaced requests",
        "candidate",
        ">plans",
        objective,
        *([">unserved /s"] if unserved else []),
        "outcome",
    )
    for candidate in candidates:
        value = "-" if candidate.value is None else f"{candidate.value:.4g}"
        left = [show_rate(candidate.unserved) if candidate.unserved else "-"] if unserved else []
        style = "" if candidate.rejected else "bold"
        outcome = escape(candidate.rejected or "chosen")
        rows.add_row(escape(candidate.source), f"{candidate.plans}", value, *left, outcome, style=style)
    return rows


def _proof_line(plan: Plan, proven: Proof | None) -> str:
    """Say what is proven of a plan, or how far it is from its bound."""
    if proven == "optimal":
        return "proven optimal for evenly spaced requests"
    if plan.objective == "devices" and plan.unserved:
        if proven == "infeasible":
            return "unserved: proven, no plan of these devices serves all rates"
        least = devices_to_serve_all(plan)
        return f"unserved: {least or 'a plan that serves all rates was not found in the time, and none is ruled out'}"
    if plan.bound is None:
        return ""
    value = objective_value(plan)
    gap = abs(value / plan.bound - 1) if plan.bound else 0.0
    return f"bound: {plan.bound:.4g} for evenly spaced requests; this plan is {gap:.2%} from it"


def _factor_lines(label: str, of: str, factors: Mapping[str, float], plan: Plan) -> list[str]:
    """Say what was planned for instead of the rates or targets; models with the same factor share a line."""
    models: dict[float, list[str]] = {}
    for name, factor in factors.items():
        models.setdefault(factor, []).append(name)
    placed = plan.rates().keys()
    return [
        f"{label}: {'all models' if placed <= set(names) else show_names(names)} planned for {factor:.3g} x the {of}"
        for factor, names in models.items()
    ]


def _validation_line(validation: Validation | None) -> str:
    if validation is None:
        return "validation: none"
    verdict = "SLOs met" if validation.passed else "SLO violated"
    seeds = "seed" if len(validation.seeds) == 1 else "seeds"
    text = f"validation: {verdict} in {validation.requests:,} simulated requests"
    text += f" ({seeds} {', '.join(map(str, validation.seeds))})" if validation.seeds else ""
    if validation.worst is not None:
        worst = validation.worst
        text += f"; worst: {worst.name} {_percent(worst.attainment)} for {_percent(worst.objective)}"
    plans, runs = show_count(validation.plans, "plan"), show_count(validation.runs, "run")
    return f"{text}; {plans} simulated in {runs}"


def _front_end_line(seconds: float | None) -> str:
    return "" if seconds is None else f"front end: {show_seconds(seconds)} of a processor counted for each request"


def _times(stage_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {show_seconds(stage_s[stage])}" for stage, name in STAGES.items() if stage in stage_s)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.4g} %"
