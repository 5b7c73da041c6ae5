"""What the planners themselves leave out: the largest rate a fleet can serve, and room for chance.

The papers' planners are deterministic: they answer whether a fleet serves given rates, evenly spaced. Under random
arrivals such a plan may break promises that it keeps on paper, so what users ask for goes through here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec

from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import PlanError
from cotenant.planners import Planner, Problem, bound_of, load
from cotenant.planners.capacity import accounted
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planners.polish import lacking, polish

Accept = Callable[[Plan, Problem], bool]


def solve(name: str, problem: Problem, *, accept: Accept = attains) -> Plan:
    """The plan of a named planner for either objective, with room for Poisson arrivals where the fleet has it.

    accept: see `largest_scale`.
    """
    planner = partial(promised, load(name))
    if problem.objective == "devices":
        return planner(problem)
    return largest_scale(planner, problem, accept=accept, bound=bound_of(name, problem))


def promised(planner: Planner, problem: Problem) -> Plan:
    """A plan for the rates asked for whose forecast keeps the promises, by planning models that would break theirs for
    more than is asked. Where there is no room for more: as near as it came."""
    plan = planner(problem)
    bound = plan.bound
    room = dict.fromkeys(problem.rates, 1.0)
    for _ in range(12):
        if plan.unserved:
            break
        plan = polish(plan, problem)
        missing = lacking(plan, problem)
        if not missing:
            break
        room |= {name: room[name] * 1.15 for name in missing}
        wider = planner(_at(problem, {name: rate * room[name] for name, rate in problem.rates.items()}))
        if wider.unserved:
            break
        plan = accounted(_scaled(wider, {name: 1 / factor for name, factor in room.items()}), problem)
    # What was proven of larger rates does not hold for these.
    return msgspec.structs.replace(plan, bound=bound)


def largest_scale(planner: Planner, problem: Problem, *, accept: Accept = attains, bound: float | None = None) -> Plan:
    """The plan for the largest multiple of the rates that the planner serves soundly and `accept` takes, to 0.5 %.

    accept: given a plan and the problem at those rates; by default, whether the forecast keeps every promise.
    bound: a multiple that is proven to be out of reach for any sound plan, if one is known; the result keeps it.
    """
    endless = next((kind.name for kind in problem.fleet if kind.count is None), None)
    if endless is not None:
        raise PlanError(f"the largest rate of endless devices is endless: give kind {endless!r} a count")

    def attempt(scale: float) -> Plan | None:
        scaled = _at(problem, {name: rate * scale for name, rate in problem.rates.items()})
        plan = planner(scaled)
        return plan if not plan.unserved and not check(plan, scaled) and accept(plan, scaled) else None

    if not any(problem.rates.values()):
        return msgspec.structs.replace(planner(_at(problem, problem.rates)), objective="rate")
    high = math.inf if bound is None else bound
    best, low = attempt(min(1.0, high)) if high > 0 else None, min(1.0, high)
    if best is None:
        best, low, high = planner(_at(problem, dict.fromkeys(problem.rates, 0.0))), 0.0, low
    while high > low * 1.005 and high > 1e-6:
        scale = low * 2 if math.isinf(high) else high / 4 if low == 0 else (low + high) / 2
        plan = attempt(scale)
        if plan is None:
            high = scale
        else:
            best, low = plan, scale
    return msgspec.structs.replace(accounted(best, problem), objective="rate", bound=bound)


def _at(problem: Problem, rates: dict[str, float]) -> Problem:
    return msgspec.structs.replace(problem, rates=rates, objective="devices")


def _scaled(plan: Plan, factors: dict[str, float]) -> Plan:
    """The plan with each model's rates multiplied."""

    def placement(old: Placement) -> Placement:
        return msgspec.structs.replace(old, rate=old.rate * factors[old.model])

    def partition(old: Partition) -> Partition:
        return msgspec.structs.replace(old, placements=tuple(placement(p) for p in old.placements))

    def device(old: Device) -> Device:
        return msgspec.structs.replace(old, partitions=tuple(partition(p) for p in old.partitions))

    return msgspec.structs.replace(plan, devices=tuple(device(d) for d in plan.devices))
