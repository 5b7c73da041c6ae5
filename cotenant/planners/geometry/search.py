"""The search for a plan: what is tried, in which order, and which of the answers is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import QUICK, Problem, ideal, load_planner
from cotenant.planners.geometry.context import MAX_DEVICES_TO_TIGHTEN, PlanningContext
from cotenant.planners.geometry.device_assembly import DeviceGroup
from cotenant.planners.geometry.large_fleet import SolverBudget, solve_large_fleet
from cotenant.planners.geometry.rate_fitting import fitted_plan, plan_from_devices, served_fractions
from cotenant.planners.geometry.small_fleet import (
    MAX_SMALL_FLEET,
    SearchBudget,
    rescaled_current_plan,
    solve_small_fleet,
)

BISECTIONS = 6
RIVALS = tuple(load_planner(name) for name in QUICK)

Merit = tuple[float, float, float, int, int]


def search_plan(problem: Problem) -> Plan:
    """The best plan that was found, and the bound."""
    context = PlanningContext(problem)
    limit = context.bound()
    best = plan_from_devices(context, ())
    if context.names:
        for candidate in _candidates(context):
            if _merit(context, candidate) > _merit(context, best):
                best = candidate
            if _reaches(context, best, limit):
                break
    if context.maximize_scale and limit is not None and context.estimated_devices() <= MAX_DEVICES_TO_TIGHTEN:
        best = _raised(context, best, limit)
    return msgspec.structs.replace(best, bound=limit)


def find_feasible(problem: Problem, *, thorough: bool = True) -> Plan | None:
    """Any plan that serves the rates. thorough: whatever it takes."""
    context = PlanningContext(problem)
    if not context.names and not context.has_unservable:
        return plan_from_devices(context, ())
    if context.relaxation is None or context.has_unservable:
        return None
    for candidate in _candidates(context, first=True, thorough=thorough):
        if not candidate.unserved:
            return candidate
    return None


def _raised(context: PlanningContext, best: Plan, limit: float) -> Plan:
    """A plan for a larger multiple of the rates, asked for one multiple after the other.

    With neighbours in play that finds more than to ask for the largest; and no rival may serve more.
    """
    problem = context.problem
    low, high = max(0.0, best.scale), limit
    known = len(context.catalogs) == 1
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
            low, best = multiple, plan_from_devices(context, found.devices)
        elif n == 0 and known:
            break
        else:
            high = multiple
    return best


def _candidates(context: PlanningContext, *, first: bool = False, thorough: bool = True) -> Generator[Plan, None, None]:
    """Plans, each a try of its own. first: any that serves the rates will do. thorough: whatever it takes."""
    problem = context.problem
    search_budget, solver_budget = SearchBudget(problem.time_limit), SolverBudget(problem.time_limit)
    small = bool(context.names) and context.estimated_devices() <= MAX_SMALL_FLEET
    rivals = (
        RIVALS
        if context.names and not context.maximize_scale and context.estimated_devices() <= MAX_DEVICES_TO_TIGHTEN
        else ()
    )
    if context.names and context.current_devices:
        yield _as_it_stands(context)
    crowded = (
        thorough
        and len(context.catalogs) > 1
        and not context.maximize_scale
        and context.estimated_devices() <= ideal.MAX_DEVICES
    )
    if first:
        yield from (plan_from_devices(context, rival(problem).devices) for rival in rivals)
        if thorough and context.proves_infeasible():
            return
        if crowded and (found := ideal.feasible(problem)) is not None:
            yield plan_from_devices(context, found.devices)
    for n, catalog in enumerate(context.catalogs):
        done = small and (yield from solve_small_fleet(context, catalog, search_budget, first=first))
        if n == 0 and not first:
            yield from (plan_from_devices(context, rival(problem).devices) for rival in rivals)
        if done or (small and (first or context.maximize_scale)):
            continue
        all_served = context.relaxation is not None and (
            yield from solve_large_fleet(context, catalog, solver_budget, maximize_scale=context.maximize_scale)
        )
        if not all_served and not context.maximize_scale and not first:
            yield from solve_large_fleet(context, catalog, solver_budget, maximize_scale=True)
    if crowded and not first:
        yield plan_from_devices(context, ideal.plan(problem).devices)


def _as_it_stands(context: PlanningContext) -> Plan:
    """The devices of the plan in force, with their models, for the rates that are asked now."""
    modes = rescaled_current_plan(context, context.catalog)
    groups = []
    for device in context.current_devices:
        known = tuple(modes[partition] for partition in device.partitions if partition in modes)
        if known:
            groups.append(DeviceGroup(device.kind, known, (device.id,)))
    return fitted_plan(context, context.catalog, groups)


def _merit(context: PlanningContext, plan: Plan) -> Merit:
    """More is better: the least part of a rate that is served, the part over all; the price, what stays as it was, and
    how few workers there are."""
    parts = served_fractions(context, plan).tolist()
    over_all = 0.0 if context.maximize_scale else sum(min(1.0, part) for part in parts)
    workers = sum(placement.procs for _, _, placement in plan.placements())
    return (
        round(min(parts), 6),
        round(over_all, 6),
        -_spent(context, plan),
        _stays(plan, context.problem.current),
        -workers,
    )


def _reaches(context: PlanningContext, plan: Plan, limit: float | None) -> bool:
    if context.maximize_scale or limit is None or plan.unserved:
        return False
    return _spent(context, plan) <= limit * (1 + 1e-6)


def _spent(context: PlanningContext, plan: Plan) -> float:
    price = {kind.name: price for kind, price in zip(context.fleet, context.prices, strict=True)}
    return sum(price[device.kind] for device in plan.devices)


def _stays(plan: Plan, current: Plan | None) -> int:
    """How many partitions are as they were, on the same device with the same models."""

    def what(of: Plan | None) -> Counter[object]:
        return Counter(
            (device.id, partition.share, frozenset(p.model for p in partition.placements))
            for device in (of.devices if of else ())
            for partition in device.partitions
        )

    return (what(plan) & what(current)).total() if current else 0
