"""Find the largest multiple of the rates that a fleet serves within its SLOs.

A planner that supports this objective plans up to the very limit of the targets, for evenly spaced requests: the
multiple is then lowered until the SLOs hold under random arrivals as well. Since shorter rounds may leave more
headroom, it also plans for tighter targets, and for less interference. Any other planner plans for one multiple of the
rates after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.provenance import Candidate
from cotenant.errors import PlanError
from cotenant.planners.candidates import provenance_of, with_provenance
from cotenant.planners.headroom import with_headroom
from cotenant.planners.local_search import improve_plan
from cotenant.planners.problem import Problem
from cotenant.planners.rates import at_rates, at_scale, empty_plan, rescaled_plan
from cotenant.planners.registry import Planner
from cotenant.planners.scale_search import (
    SCALE_RATIO,
    Accept,
    accepts_more,
    largest_accepted_scale,
    meets_slos,
    search_scale,
    serves_all,
)
from cotenant.predictors import Interference, Load, NoInterference, at_quantile

COARSE_SCALE_RATIO = 1.02  # replaces SCALE_RATIO while an expensive validation compares plans
# Alternatives to plan for: fractions of the targets, and of the predicted slowdown less 1. Half of the targets leaves
# headroom for interference and for random arrivals at once.
TIGHTENED = ((0.9, 1.0), (0.8, 1.0), (0.72, 1.0), (0.65, 1.0), (0.65, 0.0), (0.5, 0.0))
REPLAN_TIGHTENED = ((0.8, 1.0), (0.65, 1.0), (0.65, 0.0), (0.5, 0.0))  # the same, where a controller waits
QUICK_TIGHTENED = ((0.8, 0.5), (0.6, 0.0), (0.5, 0.0))  # the same, for the quick planners of a portfolio


class ScaledInterference(msgspec.Struct, frozen=True):
    """Predict a fraction of the slowdown, less 1, that another predictor predicts."""

    predictor: Interference
    fraction: float

    @property
    def interferes(self) -> bool:
        return self.fraction > 0 and self.predictor.interferes

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1.0 + self.fraction * (self.predictor.slowdown(victim, colocated) - 1.0)

    def with_quantile(self, quantile: float) -> ScaledInterference:
        return ScaledInterference(at_quantile(self.predictor, quantile), self.fraction)


def largest_scale(
    planner: Planner,
    problem: Problem,
    *,
    quick: Mapping[str, Planner] | None = None,
    accept: Accept = meets_slos,
    validate: Accept | None = None,
    sound: bool = True,
) -> Plan:
    """Return the plan for the largest multiple of the rates that is accepted, to 0.5 %.

    quick: other planners of a portfolio, by name, whose plans are taken where they sustain more. accept: decides on a
    plan, given the problem at its rates. validate: a more expensive decision on accepted plans, the largest scales
    first. sound: whether only sound plans are accepted. A caller that accepts others has a better criterion than the
    predicted interference, so that the largest sound scale is not the limit.

    Raises PlanError where a kind of device has no count.
    """
    unlimited = next((kind.name for kind in problem.fleet if kind.count is None), None)
    if unlimited is not None:
        raise PlanError(f"the largest rate of unlimited devices is unlimited: give kind {unlimited!r} a count")
    if not any(problem.rates.values()):
        return msgspec.structs.replace(planner(at_rates(problem, problem.rates)), objective="rate")
    limit = planner(problem)
    if limit.objective == "rate" and limit.scale == 0 and limit.bound == 0:
        return limit  # some model cannot be served at all; the others are, up to their rates
    search = _Search(problem, accept, validate)
    if limit.objective == "rate":
        best = search.lowered_from_limit(_named(limit), planner, quick or {}, sound=sound)
    else:
        best = search.by_multiples(limit.planner, planner, empty_plan(limit, problem))
    if validate is not None and best.scale:
        best = search.refined(best)
    best = with_provenance(best, candidates=search.candidates(provenance_of(best).source))
    return msgspec.structs.replace(best, planner=limit.planner, objective="rate", bound=limit.bound)


class _Search:
    """Search for the largest rate, and record what was tried."""

    def __init__(self, problem: Problem, accept: Accept, validate: Accept | None) -> None:
        self._problem = problem
        self._accept = accept
        self._validate = validate
        self._ratio = SCALE_RATIO if validate is None else COARSE_SCALE_RATIO
        self._tried: list[Candidate] = []

    def lowered_from_limit(self, limit: Plan, planner: Planner, quick: Mapping[str, Planner], *, sound: bool) -> Plan:
        """Return the best plan of a planner whose own largest-rate plan is `limit`, and of the quick planners."""
        best = self._lowered(limit, self._accept)
        unlowered = best.scale > 0 and best.scale * SCALE_RATIO >= limit.scale and self._is_valid(best)
        if sound and unlowered:
            return best  # without a need for headroom, no other plan serves more
        tightened = self._tightened(planner) if limit.scale else ()
        if self._validate is None:
            for plan in tightened:
                best = self._lowered(plan, self._accept, above=best)
        else:
            likely = [best, *(self._lowered(plan, self._accept) for plan in tightened)]
            best = best if unlowered else empty_plan(limit, self._problem)
            for plan in sorted(likely, key=lambda plan: -plan.scale):
                if plan.scale > best.scale * SCALE_RATIO:
                    best = largest_accepted_scale(
                        plan, self._problem, accept=self._accept_valid, above=best, ratio=self._ratio
                    )
        for name, other in quick.items():
            best = self._quick_plan(name, other, best)
        return best

    def _quick_plan(self, name: str, planner: Planner, above: Plan) -> Plan:
        """Return the plan of a simpler planner where that sustains more than `above`: the largest scale for evenly
        spaced requests may leave little headroom."""
        best = self.by_multiples(name, planner, above, self._ratio)
        for slo_factor, slowdown_factor in QUICK_TIGHTENED if self._problem.interference.interferes else ():
            tighter = _tighter(self._problem, slo_factor, slowdown_factor)
            limit = search_scale(planner, tighter, serves_all, above=best, below=math.inf)
            if limit.scale > best.scale * SCALE_RATIO:
                limit = _labelled(limit, name, self._problem, slo_factor, slowdown_factor)
                best = self._lowered(limit, self._accept_valid, above=best, ratio=self._ratio)
        return best

    def by_multiples(self, name: str, planner: Planner, above: Plan, ratio: float = SCALE_RATIO) -> Plan:
        """Return the plan of a planner that plans for one multiple of the rates after the other, if it sustains more
        than `above`."""
        limit = search_scale(planner, self._problem, serves_all, above=above, below=math.inf)
        if limit.scale <= above.scale * SCALE_RATIO:
            self._tried.append(Candidate(source=name, value=None, rejected="sustains no larger multiple of the rates"))
            return above
        limit = with_provenance(limit, source=name)
        best = self._lowered(limit, self._accept_valid, above=above, ratio=ratio)

        def with_room(scaled: Problem) -> Plan:
            return with_provenance(with_headroom(planner, scaled), source=name)

        def accept_all_served(plan: Plan, scaled: Problem) -> bool:
            return not plan.unserved and self._accept_valid(plan, scaled)

        if not accepts_more(with_room, self._problem, accept_all_served, best):
            return best
        return search_scale(with_room, self._problem, accept_all_served, above=best, below=limit.scale, ratio=ratio)

    def refined(self, plan: Plan) -> Plan:
        """Return the plan for a little more than a coarse search found."""

        def attempt(scaled: Problem) -> Plan:
            return improve_plan(rescaled_plan(plan, scaled), scaled)

        below = plan.scale * COARSE_SCALE_RATIO
        return search_scale(attempt, self._problem, self._accept_valid, above=plan, below=below)

    def candidates(self, source: str) -> tuple[Candidate, ...]:
        """Return what was tried; source: of the plan that is taken."""
        return tuple(
            msgspec.structs.replace(candidate, rejected="") if candidate.source == source else candidate
            for candidate in self._tried
        )

    def _tightened(self, planner: Planner) -> Iterator[Plan]:
        for slo_factor, slowdown_factor in TIGHTENED if self._problem.current is None else REPLAN_TIGHTENED:
            if slowdown_factor == 1 or self._problem.interference.interferes:
                plan = _named(planner(_tighter(self._problem, slo_factor, slowdown_factor)))
                yield _labelled(plan, provenance_of(plan).source, self._problem, slo_factor, slowdown_factor)

    def _lowered(self, plan: Plan, accept: Accept, *, above: Plan | None = None, ratio: float = SCALE_RATIO) -> Plan:
        """Return the plan at the largest accepted multiple, where that is above `above`."""
        source = provenance_of(plan).source
        if above is not None and plan.scale <= above.scale:
            reason = "serves no larger multiple of the rates"
            self._tried.append(Candidate(source=source, value=plan.scale, rejected=reason))
            return above
        best = largest_accepted_scale(plan, self._problem, accept=accept, above=above, ratio=ratio)
        reason = f"meets its SLOs up to {best.scale:.4g} x the rates"
        if best is above:
            reason = "meets its SLOs at no larger multiple than another"
        self._tried.append(Candidate(source=source, value=plan.scale, rejected=reason))
        return best

    def _is_valid(self, plan: Plan) -> bool:
        return self._validate is None or self._validate(plan, at_scale(self._problem, plan.scale))

    def _accept_valid(self, plan: Plan, problem: Problem) -> bool:
        return self._accept(plan, problem) and (self._validate is None or self._validate(plan, problem))


def _named(plan: Plan) -> Plan:
    """Return the plan with its planner in its source: the same planner may take part in a portfolio and on its own."""
    source = provenance_of(plan).source
    return plan if source.startswith(plan.planner) else with_provenance(plan, source=f"{plan.planner}, {source}")


def _tighter(problem: Problem, slo_factor: float, slowdown_factor: float) -> Problem:
    """Return the problem with these fractions of its targets and of its slowdowns less 1, without a bound."""
    models = tuple(msgspec.structs.replace(model, slo=model.slo * slo_factor) for model in problem.models)
    interference = problem.interference
    if slowdown_factor < 1:
        interference = ScaledInterference(interference, slowdown_factor) if slowdown_factor else NoInterference()
    return msgspec.structs.replace(problem, models=models, interference=interference, bounded=False)


def _labelled(plan: Plan, name: str, problem: Problem, slo_factor: float, slowdown_factor: float) -> Plan:
    source = f"{name}; targets x {slo_factor:g}"
    if slowdown_factor < 1:
        source += f", interference x {slowdown_factor:g}"
    return with_provenance(plan, source=source, slo_factors=dict.fromkeys(problem.rates, slo_factor))
