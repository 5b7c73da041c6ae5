"""Plans of devices and modes: rates fitted to what is asked, and to the neighbours that there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Device, Partition, Plan
from cotenant.planners.capacity import batched_partitions, partitions_with_batches, with_totals
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.device_assembly import DeviceGroup, partition_drafts, reduce_interference
from cotenant.planners.geometry.modes import ModeCatalog

Array = NDArray[np.float64]

TRIED_FRACTIONS = (
    1.0,
    0.97,
    0.93,
    0.87,
    0.8,
    0.7,
    0.55,
    0.4,
    0.2,
)  # of what a device was to carry, those that are tried
TINY = 1e-12


def plan_from_devices(context: PlanningContext, devices: Sequence[Device]) -> Plan:
    plan = Plan(planner="geometry", objective=context.problem.objective, devices=tuple(devices))
    return with_totals(plan, context.problem)


def served_fractions(context: PlanningContext, plan: Plan) -> Array:
    """The part of each model's rate."""
    carried = plan.rates()
    parts: Array = np.array([carried.get(name, 0.0) for name in context.names]) / context.rates
    return parts


def demand_multipliers(context: PlanningContext, plan: Plan) -> Array | None:
    """How many times as much to ask for each model that came short; None where none did."""
    parts = served_fractions(context, plan)
    target = float(parts.max()) if context.maximize_scale else 1.0
    if (parts > target * (1 - 1e-6)).all():
        return None
    times: Array = np.clip(1.005 * target / np.maximum(parts, 1e-9), 1.0, 1.5)
    return times


def fitted_plan(context: PlanningContext, catalog: ModeCatalog, groups: list[DeviceGroup]) -> Plan:
    """The plan with these devices: for the rates, or for the largest multiple of them that they carry."""
    groups = reduce_interference(context.problem, catalog, groups, context.memory_limits)
    carried = np.zeros(len(context.names))
    for group in groups:
        for mode in group.modes:
            for i, rate in zip(mode.models, mode.rates, strict=True):
                carried[i] += rate * group.count
    factors = np.minimum(1.0, context.rates / np.maximum(carried, TINY))
    if context.maximize_scale:
        factors = context.rates * float((carried / context.rates).min()) / np.maximum(carried, TINY)
        factors *= _stretch(context, catalog, groups, factors)
    devices = [
        Device(kind=context.fleet[group.kind].name, id=number, partitions=made)
        for group, made in zip(groups, [_fitted(context, catalog, group, factors) for group in groups], strict=True)
        for number in group.ids
    ]
    return plan_from_devices(context, devices)


def _stretch(context: PlanningContext, catalog: ModeCatalog, groups: Sequence[DeviceGroup], factors: Array) -> float:
    """By how much more than was reckoned all rates may grow, with the neighbours that there are."""
    low, high = 1.0, 2.0 if context.problem.interference.interferes else 1.0
    while high - low > 1e-3:
        multiple = (low + high) / 2
        if all(_fits(context, catalog, group, factors * multiple) for group in groups):
            low = multiple
        else:
            high = multiple
    return low


def _fits(
    context: PlanningContext, catalog: ModeCatalog, group: DeviceGroup, factors: Array
) -> tuple[Partition, ...] | None:
    wanted = partition_drafts(catalog, group, factors)
    kind = context.fleet[group.kind]
    return (
        batched_partitions(context.problem, kind, wanted, full=True)
        or batched_partitions(context.problem, kind, wanted)
        or partitions_with_batches(context.problem, kind, wanted, [mode.batches for mode in group.modes])
    )


def _fitted(
    context: PlanningContext, catalog: ModeCatalog, group: DeviceGroup, factors: Array
) -> tuple[Partition, ...]:
    """The partitions of one device; where neighbours slow each other too much, with less, or with fewer of them.

    Slowdowns need not fall with rates, nor with batches: hence no bisection.
    """
    if not group.modes:
        return ()
    for part in TRIED_FRACTIONS:
        if (made := _fits(context, catalog, group, factors * part)) is not None:
            return made
    # The first without which the others fit; else the last, and so on.
    fewer = [
        DeviceGroup(group.kind, group.modes[:n] + group.modes[n + 1 :], group.ids) for n in range(len(group.modes))
    ]
    fitting = (less for less in fewer if less.modes and _fits(context, catalog, less, factors) is not None)
    return _fitted(context, catalog, next(fitting, fewer[-1]), factors)
