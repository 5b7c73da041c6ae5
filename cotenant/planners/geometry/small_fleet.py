"""Plan small fleets: initial devices and a pool of modes for ruin and recreate (ruin_recreate.py)."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence

import msgspec
import numpy as np

from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.context import MAX_MODELS_FOR_PAIRS, PAIRS_SHARE, PlanningContext
from cotenant.planners.geometry.device_assembly import CurrentPartition, DeviceGroup
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.program import MilpSolution
from cotenant.planners.geometry.rate_fitting import demand_multipliers, fitted_plan
from cotenant.planners.geometry.round_filling import RoundFiller
from cotenant.planners.geometry.ruin_recreate import DeviceState, ModePool, ruin_and_recreate
from cotenant.planners.geometry.whole_models import MAX_MODELS, whole_model_modes

MAX_SMALL_FLEET = 16  # devices up to which fleets are planned by ruin and recreate
MAX_MODELS_FOR_SETS = 5  # models up to which modes of three or more are enumerated
WHOLE_MODELS_SHARE = 0.3  # of the work, for the best plan with each model on one partition
STEPS_PER_SECOND = 900  # ruin-and-recreate steps for each second of the time limit
MAX_REPAIRS = 4  # searches for one fleet, each with more demand for the models that came short
MAX_FLEET_CHOICES = 20_000  # fleets of mixed kinds to consider
MAX_FLEETS = 6  # number of those to try


def solve_small_fleet(
    context: PlanningContext, catalog: ModeCatalog, budget: WorkBudget, *, first: bool
) -> Generator[Plan, None, bool]:
    """Yield plans found by ruin and recreate, cheapest fleets first. Returns whether the last one serves the rates.

    first: accept any plan that serves them, whatever its cost.
    """
    relaxation = context.solve_relaxation(
        context.instance(maximize_scale=context.maximize_scale, unlimited=not context.maximize_scale),
        context.planning_modes(catalog),
    )
    if relaxation is None:
        return False
    prices = relaxation.demand_duals * context.rates
    target_scale = relaxation.value if context.maximize_scale else 1.0
    modes = _pool_modes(context, catalog, relaxation)
    pool = ModePool(modes, context.rates)
    whole_models = _whole_model_modes(context, catalog, target_scale)
    filler = RoundFiller(catalog)
    patterns = context.planning_patterns()
    pieces = [
        [[s for s, many in pattern.pieces for _ in range(many)] for pattern in patterns if pattern.kind == k]
        for k in range(len(context.fleet))
    ]
    full_fleet = _full_fleet(context)
    # With several kinds more fleets are tried, each with fewer steps.
    most_steps = round(STEPS_PER_SECOND * context.problem.time_limit / min(2, len(context.fleet)))
    for fleet in _fleets(context, catalog, first=first):
        starts = [(_initial_devices(context, [k for k in fleet if pieces[k]], pool), pool)]
        if whole_models:
            # Its modes would draw the search from elsewhere to the same plan.
            whole = DeviceState(0, None, [mode.slot for mode in whole_models], list(whole_models))
            starts.append(([whole], ModePool([*modes, *whole_models], context.rates)))
        for devices, own_pool in starts:
            demand_factors = np.ones(len(context.names))
            for _ in range(MAX_REPAIRS):
                scale_reached, devices = ruin_and_recreate(
                    devices,
                    own_pool.with_demand(demand_factors),
                    pieces,
                    context.memory_limits,
                    prices,
                    target_scale=target_scale,
                    steps=most_steps,
                    budget=budget,
                    filler=filler,
                )
                plan = fitted_plan(context, catalog, _device_groups(devices))
                yield plan
                multipliers = demand_multipliers(context, plan)
                if (
                    multipliers is None
                    or (not context.maximize_scale and scale_reached < 1 - 1e-9)
                    or not budget.left()
                ):
                    break
                demand_factors *= multipliers
            if not context.maximize_scale and multipliers is None:
                # With the full fleet no choice between kinds was made.
                return len(context.fleet) == 1 or fleet != full_fleet
        # Not for work alone: a larger fleet may be the first that serves everything.
        if budget.deadline.seconds_left() <= 0:
            break
    return False


def rescaled_current_plan(context: PlanningContext, catalog: ModeCatalog) -> dict[CurrentPartition, Mode]:
    """Return for each partition of the current plan its mode of largest rates in their current proportions."""
    partitions = dict.fromkeys(partition for device in context.current_devices for partition in device.partitions)
    modes = ((partition, catalog.proportional_mode(*msgspec.structs.astuple(partition))) for partition in partitions)
    return {partition: mode for partition, mode in modes if mode is not None}


def _full_fleet(context: PlanningContext) -> list[int]:
    return [k for k, count in enumerate(context.counts) for _ in range(int(min(count, MAX_SMALL_FLEET)))]


def _fleets(context: PlanningContext, catalog: ModeCatalog, *, first: bool) -> Iterable[list[int]]:
    """Yield fleets to try, as kinds of devices: cheapest first where the relaxation is feasible; last, all devices."""
    full_fleet = _full_fleet(context)
    if context.maximize_scale or context.relaxation is None or first:
        yield full_fleet
        return
    ranges = [range(int(min(count, MAX_SMALL_FLEET)) + 1) for count in context.counts]
    least_cost = context.relaxation.value - 1e-9
    choices = (
        counts
        for counts in itertools.islice(itertools.product(*ranges), MAX_FLEET_CHOICES)
        if 0 < sum(counts) <= MAX_SMALL_FLEET and context.cost(counts) >= least_cost
    )
    tried, singles = 0, context.planning_modes(catalog)
    for counts in sorted(choices, key=context.cost):
        instance = context.instance(maximize_scale=False)
        instance = msgspec.structs.replace(instance, counts=[float(count) for count in counts])
        if context.solve_relaxation(instance, singles) is not None:
            yield [k for k, count in enumerate(counts) for _ in range(count)]
            tried += 1
        if tried == MAX_FLEETS:
            break
    yield full_fleet


def _pool_modes(context: PlanningContext, catalog: ModeCatalog, relaxation: MilpSolution) -> list[Mode]:
    """Return all modes of one and of two models, the best of more, and those of the current plan."""
    demand = context.rates * (relaxation.value if context.maximize_scale else 1.0)
    pair_modes = (
        catalog.pair_frontiers(context.planning_slots, context.budget.part(PAIRS_SHARE))
        if len(context.names) <= MAX_MODELS_FOR_PAIRS
        else []
    )
    several = (
        catalog.proportional_modes(context.planning_slots, context.rates)
        if len(context.names) <= MAX_MODELS_FOR_SETS
        else []
    )
    return [
        *rescaled_current_plan(context, catalog).values(),
        *context.planning_modes(catalog),
        *pair_modes,
        *several,
        *catalog.knapsack_modes(context.planning_slots, relaxation.demand_duals, demand),
    ]


def _whole_model_modes(context: PlanningContext, catalog: ModeCatalog, limit: float) -> list[Mode]:
    """Return modes that serve the largest multiple of the rates, up to a limit, on the only device with each model on
    one partition; [] for other fleets, and many models."""
    kind = context.fleet[0]
    if context.counts != [1.0] or len(context.names) > MAX_MODELS or kind.geometry is not None:
        return []
    modes = whole_model_modes(
        catalog, context.planning_slots, context.rates, limit, context.budget.part(WHOLE_MODELS_SHARE)
    )
    fits = sum(mode.memory for mode in modes) <= kind.memory
    return modes if fits and len(modes) <= (kind.max_partitions or WHOLE) else []


def _initial_devices(context: PlanningContext, kinds: Sequence[int], pool: ModePool) -> list[DeviceState]:
    """Return the initial devices: those of the current plan, and for the rest, devices without partitions."""
    mode_of = {(mode.slot, mode.models): mode for modes in pool.modes.values() for mode in reversed(modes)}
    kinds_left = list(kinds)
    devices = []
    for device in context.current_devices:
        modes = [mode_of.get((partition.slot, partition.models)) for partition in device.partitions]
        if device.kind in kinds_left and all(modes):
            kinds_left.remove(device.kind)
            pieces = [partition.slot for partition in device.partitions]
            devices.append(DeviceState(device.kind, device.id, pieces, modes))
    return devices + [DeviceState(kind, None, [], []) for kind in kinds_left]


def _device_groups(devices: Sequence[DeviceState]) -> list[DeviceGroup]:
    """Return groups of one device each; new devices get free numbers."""
    used = {(device.kind, device.id) for device in devices}
    groups = []
    for device in devices:
        modes = tuple(mode for mode in device.modes if mode is not None)
        number = device.id
        if number is None:
            number = next(n for n in itertools.count() if (device.kind, n) not in used)
        used.add((device.kind, number))
        if modes:
            groups.append(DeviceGroup(device.kind, modes, (number,)))
    return groups
