"""Turn assembled devices into plans: fit their rates to the demand and to the actual interference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Plan
from cotenant.planners.capacity import batched_partitions, partitions_with_batches, with_totals
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.device_assembly import DeviceGroup, partition_drafts, reduce_interference
from cotenant.planners.geometry.modes import ModeCatalog

Array = NDArray[np.float64]

# fractions of a device's intended rates to try
TRIED_FRACTIONS = (1.0, 0.97, 0.93, 0.87, 0.8, 0.7, 0.55, 0.4, 0.2)
TINY = 1e-12


def plan_from_devices(context: PlanningContext, devices: Sequence[Device]) -> Plan:
    plan = Plan(planner="geometry", objective=context.problem.objective, devices=tuple(devices))
    return with_totals(plan, context.problem)


def served_fractions(context: PlanningContext, plan: Plan) -> Array:
    """Return the fraction of each model's rate that a plan serves."""
    served = plan.rates()
    fractions: Array = np.array([served.get(name, 0.0) for name in context.names]) / context.rates
    return fractions


def demand_multipliers(context: PlanningContext, plan: Plan) -> Array | None:
    """Return the factor by which to raise the demand for each model that came short; None where none did."""
    fractions = served_fractions(context, plan)
    target = float(fractions.max()) if context.maximize_scale else 1.0
    if (fractions > target * (1 - 1e-6)).all():
        return None
    multipliers: Array = np.clip(1.005 * target / np.maximum(fractions, 1e-9), 1.0, 1.5)
    return multipliers


def fitted_plan(context: PlanningContext, catalog: ModeCatalog, groups: list[DeviceGroup]) -> Plan:
    """Return the plan of these devices for the rates, or for the largest multiple of them that the devices sustain."""
    groups = reduce_interference(context.problem, catalog, groups, context.memory_limits)
    served = np.zeros(len(context.names))
    for group in groups:
        for mode in group.modes:
            for i, rate in zip(mode.models, mode.rates, strict=True):
                served[i] += rate * group.count
    factors = np.minimum(1.0, context.rates / np.maximum(served, TINY))
    if context.maximize_scale:
        factors = context.rates * float((served / context.rates).min()) / np.maximum(served, TINY)
        factors *= _achievable_scale(context, catalog, groups, factors)
    devices = [
        Device(id=DeviceId(context.fleet[group.kind].name, number), partitions=partitions)
        for group, partitions in zip(
            groups, [_fitted_device(context, catalog, group, factors) for group in groups], strict=True
        )
        for number in group.ids
    ]
    return plan_from_devices(context, devices)


def _achievable_scale(
    context: PlanningContext, catalog: ModeCatalog, groups: Sequence[DeviceGroup], factors: Array
) -> float:
    """Return the factor by which all rates can still grow under the actual interference."""
    low, high = 1.0, 2.0 if context.problem.interference.interferes else 1.0
    while high - low > 1e-3:
        multiple = (low + high) / 2
        if all(_batched_device(context, catalog, group, factors * multiple) for group in groups):
            low = multiple
        else:
            high = multiple
    return low


def _batched_device(
    context: PlanningContext, catalog: ModeCatalog, group: DeviceGroup, factors: Array
) -> tuple[Partition, ...] | None:
    drafts = partition_drafts(catalog, group, factors)
    kind = context.fleet[group.kind]
    return (
        batched_partitions(context.problem, kind, drafts, full=True)
        or batched_partitions(context.problem, kind, drafts)
        or partitions_with_batches(context.problem, kind, drafts, [mode.batches for mode in group.modes])
    )


def _fitted_device(
    context: PlanningContext, catalog: ModeCatalog, group: DeviceGroup, factors: Array
) -> tuple[Partition, ...]:
    """Return the partitions of one device, where interference requires it with lower rates or fewer partitions.

    Slowdowns need not fall with rates, nor with batches: hence no bisection.
    """
    if not group.modes:
        return ()
    for fraction in TRIED_FRACTIONS:
        if (partitions := _batched_device(context, catalog, group, factors * fraction)) is not None:
            return partitions
    # Drop the first partition without which the others fit; else the last, and repeat.
    without_one = [
        DeviceGroup(group.kind, group.modes[:n] + group.modes[n + 1 :], group.ids) for n in range(len(group.modes))
    ]
    feasible_groups = (
        smaller
        for smaller in without_one
        if smaller.modes and _batched_device(context, catalog, smaller, factors) is not None
    )
    return _fitted_device(context, catalog, next(feasible_groups, without_one[-1]), factors)
