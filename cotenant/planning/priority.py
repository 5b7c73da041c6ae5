"""Where devices do not suffice, serve models of higher priority first, and the others with what is left.

For the largest multiple of the rates that means: where no multiple serves all models, since they cannot share the
devices within their targets however few requests come, serve some of them: by priority, and within one those of most
requests/s that the planner finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.applications import carried_rates, slo_of, without_applications
from cotenant.planners.capacity import ROUNDING_TOLERANCE, with_totals
from cotenant.planners.rates import at_rates, at_scale, rescaled_plan

HALVINGS = 4  # of the part of its rates that a priority gets, where all of them would take from higher priorities

SELDOM = 0.1  # requests within the target of a model, at rates so low that batches of one request serve them


def keeps_priorities(plan: Plan, problem: Problem) -> bool:
    """Tell whether only what has the lowest priority of all is left unserved."""
    *higher, _ = _by_priority(problem)
    served = carried_rates(plan, problem)
    return _serves(served, {name: problem.rates[name] for names in higher for name in names})


def plan_by_priority(plan: Callable[[Problem], Plan], problem: Problem) -> Plan:
    """Return a plan in which nothing takes from what has a higher priority.

    plan: makes a plan for rates, of which it may leave unserved what it likes: that decides among models of one
    priority. The rates of each priority in turn are added to those that are served already, all of them, or the largest
    part that leaves these served.
    """
    kept = dict.fromkeys(problem.rates, 0.0)
    best: Plan | None = None
    for names in _by_priority(problem):
        part, step = 1.0, 0.5
        added: dict[str, float] = {}
        for _ in range(1 + HALVINGS):
            asked = at_rates(problem, kept | {name: part * problem.rates[name] for name in names})
            attempt = plan(asked)
            served = carried_rates(attempt, asked)
            fits = best is None or _serves(served, kept)
            if fits:
                best, added = attempt, {name: served[name] for name in names}
            if fits and part == 1.0:
                break
            part += step if fits else -step
            step /= 2
        kept |= added
    assert best is not None
    return with_totals(best, without_applications(problem, best.split))


def plan_for_part(plan: Callable[[Problem], Plan], quick: Callable[[Problem], Plan], problem: Problem) -> Plan | None:
    """Return the plan for the largest multiple of some of the rates, where no multiple of all can be served; None where
    that serves nothing either. Which ones is decided by priority, and within one by requests/s, as `quick` leaves them:
    not by how many models are served.

    plan: makes a plan for the largest multiple. quick: one for rates. The plan states at most the rates that were asked
    for; its devices are cut and its batches sized for the largest multiple of them.
    """
    names = _served_together(quick, problem)
    if not names:
        return None
    rates = {name: rate if name in names else 0.0 for name, rate in problem.rates.items()}
    part = plan(msgspec.structs.replace(problem, rates=rates))
    if not part.scale:
        return None
    if part.scale > 1:
        asked = msgspec.structs.replace(problem, rates=rates)
        part = rescaled_plan(part, without_applications(asked, part.split))
    return with_totals(part, without_applications(problem, part.split))


def _served_together(quick: Callable[[Problem], Plan], problem: Problem) -> set[str]:
    """Return what can be served together at all: so seldom that no second request comes before the first is late.

    What has a higher priority stays. Within one, what `quick` leaves unserved goes, as few requests/s as it
    finds; where that takes from a higher priority, models join one by one in the order of the rates.
    """
    seldom = min(SELDOM / (rate * slo_of(problem, name).slo) for name, rate in problem.rates.items() if rate)
    few = at_scale(problem, seldom).rates

    def served_of(names: Iterable[str]) -> set[str]:
        asked = at_rates(problem, dict.fromkeys(problem.rates, 0.0) | {name: few[name] for name in names})
        served = carried_rates(quick(asked), asked)
        return {name for name in names if served[name] >= few[name] * (1 - ROUNDING_TOLERANCE)}

    kept: set[str] = set()
    for names in _by_priority(problem):
        if kept <= (served := served_of([*kept, *names])):
            kept = served
            continue
        for name in names:
            if served_of([*kept, name]) == kept | {name}:
                kept.add(name)
    return kept


def _by_priority(problem: Problem) -> list[list[str]]:
    """Return what has a rate, in groups of one priority, the most important first."""
    priorities = {name: slo_of(problem, name).priority for name, rate in problem.rates.items() if rate}
    levels = sorted(set(priorities.values()))
    return [[name for name in priorities if priorities[name] == level] for level in levels] or [[]]


def _serves(served: dict[str, float], rates: dict[str, float]) -> bool:
    return all(served[name] >= rate * (1 - ROUNDING_TOLERANCE) for name, rate in rates.items())
