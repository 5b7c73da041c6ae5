"""The search for a plan: what is tried, in which order, and which of the answers is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import QUICK, Problem, ideal, load_planner
from cotenant.planners.geometry.context import MANY, PlanningContext
from cotenant.planners.geometry.device_assembly import DeviceGroup
from cotenant.planners.geometry.large_fleet import SolverBudget, solve_large_fleet
from cotenant.planners.geometry.rate_fitting import count_served, fitted_plan, served_fractions
from cotenant.planners.geometry.small_fleet import SMALL, SearchBudget, rescaled_current_plan, solve_small_fleet

BISECTIONS = 6
RIVALS = tuple(load_planner(name) for name in QUICK)

Merit = tuple[float, float, float, int, int]


def search_plan(problem: Problem) -> Plan:
    """The best plan that was found, and the bound."""
    space = PlanningContext(problem)
    limit = space.bound()
    best = count_served(space, ())
    if space.names:
        for candidate in _candidates(space):
            if _merit(space, candidate) > _merit(space, best):
                best = candidate
            if _reaches(space, best, limit):
                break
    if space.scale and limit is not None and space.about() <= MANY:
        best = _raised(space, best, limit)
    return msgspec.structs.replace(best, bound=limit)


def find_feasible(problem: Problem, *, thorough: bool = True) -> Plan | None:
    """Any plan that serves the rates. thorough: whatever it takes."""
    space = PlanningContext(problem)
    if not space.names and not space.hopeless:
        return count_served(space, ())
    if space.relaxed is None or space.hopeless:
        return None
    for candidate in _candidates(space, first=True, thorough=thorough):
        if not candidate.unserved:
            return candidate
    return None


def _raised(space: PlanningContext, best: Plan, limit: float) -> Plan:
    """A plan for a larger multiple of the rates, asked for one multiple after the other.

    With neighbours in play that finds more than to ask for the largest; and no rival may serve more.
    """
    problem = space.problem
    low, high = max(0.0, best.scale), limit
    known = len(space.menus) == 1
    for n in range(BISECTIONS):
        # Where all went well, rivals do no better, and one question is enough.
        multiple = (low + high) / 2
        if n == 0:
            multiple = low * 1.001 if known else min(max(1.0, low * 1.001), high)
        rates = {name: rate * multiple for name, rate in problem.rates.items()}
        asked = msgspec.structs.replace(
            problem, rates=rates, objective="devices", time_limit=problem.time_limit / BISECTIONS
        )
        if known:
            found = next((plan for rival in RIVALS if not (plan := rival(asked)).unserved), None)
        else:
            found = find_feasible(asked, thorough=False)
        if found is not None:
            low, best = multiple, count_served(space, found.devices)
        elif n == 0 and known:
            break
        else:
            high = multiple
    return best


def _candidates(space: PlanningContext, *, first: bool = False, thorough: bool = True) -> Generator[Plan, None, None]:
    """Plans, each a try of its own. first: any that serves the rates will do. thorough: whatever it takes."""
    problem = space.problem
    patience, clock = SearchBudget(problem.time_limit), SolverBudget(problem.time_limit)
    small = bool(space.names) and space.about() <= SMALL
    rivals = RIVALS if space.names and not space.scale and space.about() <= MANY else ()
    if space.names and space.standing:
        yield _as_it_stands(space)
    crowded = thorough and len(space.menus) > 1 and not space.scale and space.about() <= ideal.DEVICES
    if first:
        yield from (count_served(space, rival(problem).devices) for rival in rivals)
        if thorough and space.refuted():
            return
        if crowded and (found := ideal.feasible(problem)) is not None:
            yield count_served(space, found.devices)
    for n, menu in enumerate(space.menus):
        done = small and (yield from solve_small_fleet(space, menu, patience, first=first))
        if n == 0 and not first:
            yield from (count_served(space, rival(problem).devices) for rival in rivals)
        if done or (small and (first or space.scale)):
            continue
        all_served = space.relaxed is not None and (yield from solve_large_fleet(space, menu, clock, scale=space.scale))
        if not all_served and not space.scale and not first:
            yield from solve_large_fleet(space, menu, clock, scale=True)
    if crowded and not first:
        yield count_served(space, ideal.plan(problem).devices)


def _as_it_stands(space: PlanningContext) -> Plan:
    """The devices of the plan in force, with their models, for the rates that are asked now."""
    modes = rescaled_current_plan(space, space.menu)
    groups = []
    for device in space.standing:
        known = tuple(modes[place] for place in device.places if place in modes)
        if known:
            groups.append(DeviceGroup(device.kind, known, (device.id,)))
    return fitted_plan(space, space.menu, groups)


def _merit(space: PlanningContext, plan: Plan) -> Merit:
    """More is better: the least part of a rate that is served, the part over all; the price, what stays as it was, and
    how few workers there are."""
    parts = served_fractions(space, plan).tolist()
    over_all = 0.0 if space.scale else sum(min(1.0, part) for part in parts)
    workers = sum(placement.procs for _, _, placement in plan.placements())
    return (
        round(min(parts), 6),
        round(over_all, 6),
        -_spent(space, plan),
        _stays(plan, space.problem.current),
        -workers,
    )


def _reaches(space: PlanningContext, plan: Plan, limit: float | None) -> bool:
    if space.scale or limit is None or plan.unserved:
        return False
    return _spent(space, plan) <= limit * (1 + 1e-6)


def _spent(space: PlanningContext, plan: Plan) -> float:
    price = {kind.name: price for kind, price in zip(space.fleet, space.prices, strict=True)}
    return sum(price[device.kind] for device in plan.devices)


def _stays(plan: Plan, current: Plan | None) -> int:
    """How many partitions are as they were, on the same device with the same models."""

    def what(of: Plan | None) -> Counter[object]:
        return Counter(
            (device.kind, device.id, partition.share, frozenset(p.model for p in partition.placements))
            for device in (of.devices if of else ())
            for partition in device.partitions
        )

    return (what(plan) & what(current)).total() if current else 0
