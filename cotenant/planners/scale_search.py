"""Search for the largest multiple of the rates at which a plan is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable

from cotenant.core.plan import Plan
from cotenant.planners.capacity import with_totals
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planners.local_search import improve_plan
from cotenant.planners.problem import Problem
from cotenant.planners.rates import at_scale, empty_plan, rescaled_plan
from cotenant.planners.registry import Planner

# Decides whether a plan is accepted, given the problem at its rates.
Accept = Callable[[Plan, Problem], bool]

# Precision: a search ends once the least rejected multiple is at most this many times the largest accepted one.
SCALE_RATIO = 1.005
MIN_SCALE = 1e-6  # multiple of the rates below which the search stops
LOWERED = (1.0, 0.96, 0.92, 0.84, 0.68, 0.36)  # fractions of a plan's scale to try in turn before bisection


def is_sound(plan: Plan, problem: Problem) -> bool:
    """Return whether a plan violates nothing, for evenly spaced requests."""
    return not check(plan, problem)


def meets_slos(plan: Plan, problem: Problem) -> bool:
    """Return whether a plan violates nothing and its forecast meets every SLO."""
    return is_sound(plan, problem) and attains(plan, problem)


def serves_all(plan: Plan, problem: Problem) -> bool:
    """Return whether a plan violates nothing and leaves no rate unserved."""
    return not plan.unserved and is_sound(plan, problem)


def search_scale(
    planner: Planner, problem: Problem, accept: Accept, *, above: Plan, below: float, ratio: float = SCALE_RATIO
) -> Plan:
    """Return the plan for the largest accepted multiple of the rates, searched from that of `above`, which is returned
    where no more is accepted, up to `below`, which may be infinite."""
    best, low, high = above, above.scale, below
    while high > low * ratio and high > MIN_SCALE:
        scale = (low * 2 or 1.0) if math.isinf(high) else high / 4 if low == 0 else (low + high) / 2
        plan = planner(scaled := at_scale(problem, scale))
        if accept(plan, scaled):
            best, low = plan, scale
        else:
            high = scale
    return with_totals(best, problem)


def accepts_more(planner: Planner, problem: Problem, accept: Accept, above: Plan) -> bool:
    """Return whether a plan for slightly more than that plan serves is accepted: where it is not, a single plan ends
    the search."""
    slightly_more = at_scale(problem, above.scale * SCALE_RATIO)
    return above.scale == 0 or accept(planner(slightly_more), slightly_more)


def largest_accepted_scale(
    plan: Plan, problem: Problem, *, accept: Accept = meets_slos, above: Plan | None = None, ratio: float = SCALE_RATIO
) -> Plan:
    """Return the plan at the largest accepted multiple of the rates, up to what it carries.

    Below that its devices are improved by local search: at lower rates there are better partitions.

    above: a plan that is accepted, and the answer unless a larger multiple is; by default, one that serves nothing.
    """
    above = above or empty_plan(plan, problem)
    best = plan

    def attempt(scaled: Problem) -> Plan:
        return improve_plan(rescaled_plan(best, scaled), scaled)

    def accept_and_keep(lowered: Plan, scaled: Problem) -> bool:
        nonlocal best
        if not accept(lowered, scaled):
            return False
        best = lowered
        return True

    below = limit = with_totals(plan, problem).scale
    at_limit = at_scale(problem, limit)
    unchanged = rescaled_plan(plan, at_limit)
    if limit > above.scale and accept(unchanged, at_limit):
        return with_totals(unchanged, problem)
    if not accepts_more(attempt, problem, accept_and_keep, above):
        return above
    for fraction in LOWERED:
        if limit * fraction <= above.scale:
            break
        scaled = at_scale(problem, limit * fraction)
        lowered = attempt(scaled)
        if lowered != unchanged and accept_and_keep(lowered, scaled):
            above = with_totals(best, problem)
            break
        below = limit * fraction
    return search_scale(attempt, problem, accept_and_keep, above=above, below=below, ratio=ratio)
