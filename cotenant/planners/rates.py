"""Derive problems and plans at other rates."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.planners.capacity import with_totals
from cotenant.planners.problem import Problem


def at_rates(problem: Problem, rates: dict[str, float]) -> Problem:
    """Return the problem of serving these rates, in requests/s by model."""
    return msgspec.structs.replace(problem, rates=rates, objective="devices", assumed=frozenset())


def at_scale(problem: Problem, scale: float) -> Problem:
    """Return the problem of serving that multiple of the rates."""
    return at_rates(problem, {name: rate * scale for name, rate in problem.rates.items()})


def rescaled_plan(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with each model's rates multiplied so that they add up to the problem's; none is unserved."""
    carried = plan.rates()
    factors = {name: rate / carried[name] for name, rate in problem.rates.items() if carried.get(name)}
    return with_totals(_multiplied(plan, factors), problem)


def empty_plan(plan: Plan, problem: Problem) -> Plan:
    """Return the plan without devices, which serves nothing."""
    return with_totals(msgspec.structs.replace(plan, devices=()), problem)


def _multiplied(plan: Plan, factors: Mapping[str, float]) -> Plan:
    def placement(old: Placement) -> Placement:
        return msgspec.structs.replace(old, rate=old.rate * factors.get(old.model, 1.0))

    def partition(old: Partition) -> Partition:
        return msgspec.structs.replace(old, placements=tuple(placement(p) for p in old.placements))

    def device(old: Device) -> Device:
        return msgspec.structs.replace(old, partitions=tuple(partition(p) for p in old.partitions))

    return msgspec.structs.replace(plan, devices=tuple(device(d) for d in plan.devices))
