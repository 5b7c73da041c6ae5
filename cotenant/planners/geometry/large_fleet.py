"""Plan fleets of any size: dive to a cover of the demand (diving.py), for large ones solve an integer program over the
most promising modes as well, and search for cheaper fleets (fleet_search.py).

For the largest multiple of the rates, multiples are tried: one is reached where nothing stays unserved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Plan
from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.covering import Fleet
from cotenant.planners.geometry.device_assembly import DeviceGroup, number_devices, pack_devices
from cotenant.planners.geometry.diving import Cover, Diver, Relaxed
from cotenant.planners.geometry.fleet_search import FIRST_RAISE, FleetSearch, PlacedDevice
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.program import solve_milp
from cotenant.planners.geometry.rate_fitting import demand_multipliers, fitted_plan
from cotenant.planners.geometry.small_fleet import MAX_REPAIRS, rescaled_current_plan

Array = NDArray[np.float64]

UNSERVED_PENALTY = 1000.0  # of the dearest device: what a whole model unserved costs
# For fleets that cost more than so many of the dearest device, a whole model unserved costs a multiple of them instead:
# it would else be cheaper than what serves it, or the last of its rate than the device that serves that.
LARGE_COST, LARGE_FACTOR = 300.0, 30.0
MAX_SCALE_TRIALS = 6  # multiples of the rates tried by diving alone
ANNEALED_SCALE_TRIALS = 2  # the same where annealing follows: until every model is served
SCALE_DIVE_SHARE = 0.6  # of the work left, which each of these may take
FIRST_SCALE, ANNEALED_FIRST_SCALE = 0.98, 0.85  # of the relaxation's multiple, which is tried first
LEAST_SCALE = 0.5  # of the relaxation's multiple, to begin with where dives serve some model not at all
NEAR_ZERO_SCALE = 1e-9  # of the rates: devices serve next to nothing of what is asked for
SCALE_STEP = 1.003  # from the largest multiple reached to the next that is searched for
MAX_ASSEMBLIES = 4
FLEET_DIVE_WORK = 0.6  # of that dive, which one for a single fleet takes
MAX_ANNEALED_DEVICES = 64.0  # up to which annealing finds cheaper fleets than integer programs
MIN_ANNEALED_MODELS = 25  # from which on there it finds cheaper ones than the program of one model a partition
NEAREST_SHARE = 0.5  # of the work left, for that over the dive's columns and those that are nearest to their price
ONE_MODEL_SHARE = 0.1  # of the work left, for the integer program of one model a partition
# Parts of what is fractional that dives for any fleet round up at a time, where there is work; none is always best.
ROUNDED_UP = 0.1, 0.3, 0.2, 0.03, 0.5
FURTHER_DIVE_SHARE = 0.1  # of the work left, which each after the first may take


def solve_large_fleet(
    context: PlanningContext,
    catalog: ModeCatalog,
    budget: WorkBudget,
    fleet_search: WorkBudget,
    *,
    maximize_scale: bool,
) -> Generator[Plan, None, bool]:
    """Yield plans; where models come short of what was planned under interference, plan again with more demand.

    fleet_search: budget for sparing devices. maximize_scale: plan for the largest multiple of the rates. Returns
    whether no model came short.
    """
    demand = context.rates.copy()
    for _ in range(MAX_REPAIRS):
        multipliers = None
        for devices in _covers(context, catalog, demand, budget, fleet_search, maximize_scale=maximize_scale):
            plan = fitted_plan(context, catalog, _grouped(context, devices))
            yield plan
            multipliers = demand_multipliers(context, plan)
            if multipliers is None:
                break
        if multipliers is None:
            return True
        if maximize_scale != context.maximize_scale or not context.problem.interference.interferes:
            return False
        demand *= multipliers
        if not budget.left():
            break
    return False


def _covers(
    context: PlanningContext,
    catalog: ModeCatalog,
    demand: Array,
    budget: WorkBudget,
    fleet_search: WorkBudget,
    *,
    maximize_scale: bool,
) -> Generator[list[PlacedDevice], None, None]:
    """Yield devices that serve the demand, or its largest multiple: changed from the current plan, and made anew."""
    singles = context.planning_modes(catalog)
    if maximize_scale:
        yield _largest_scale(context, catalog, singles, demand, budget, fleet_search)
        return
    penalties = _unserved_cost(context) / demand
    fleet = _fleet(context, context.prices, penalties)
    diver = Diver(fleet, catalog, singles, context.planning_slots, budget)
    least = context.relaxation.value if context.relaxation is not None else 0.0
    before = budget.used
    dive = diver.cover(demand, rounded_up=ROUNDED_UP[0])
    work = budget.used - before
    if dive.relaxed is None:
        yield _assembled(context, diver, dive.cover, demand)
        return
    prices, slot_prices = dive.relaxed.prices(), dive.relaxed.solution.slot_duals
    search = FleetSearch(diver, singles, demand, prices, slot_prices, fleet_search, dive_work=FLEET_DIVE_WORK * work)

    def fleet_for(multiple: float) -> Sequence[int] | None:
        return cheapest_fleet(context, fleet, catalog.with_demand(singles, demand * multiple), demand * multiple)

    if context.current_devices:
        yield search.cheaper(_completed(context, catalog, diver, demand), fleet_for, least=least)
    covers = [dive.cover]
    covers += [
        diver.cover(demand, rounded_up=part).cover
        for part in ROUNDED_UP[1:]
        if work <= FURTHER_DIVE_SHARE * budget.left()
    ]
    starts = [_assembled(context, diver, cover, demand) for cover in covers]
    large = context.estimated_devices() > MAX_ANNEALED_DEVICES
    if large or len(demand) < MIN_ANNEALED_MODELS or all(search.rank(start)[0] > 0 for start in starts):
        # One model on each partition: a small program, whose plans are often hard to beat.
        alone = diver.one_model_each(dive, demand, ONE_MODEL_SHARE)
        covers += [] if alone is None else [alone]
        starts.append(_assembled(context, diver, alone, demand))
    if large:
        nearest = diver.nearest(dive.relaxed, covers, demand, NEAREST_SHARE)
        starts.append(_assembled(context, diver, nearest, demand))
    yield search.cheaper(min(starts, key=search.rank), fleet_for, least=least)


def cheapest_fleet(
    context: PlanningContext, fleet: Fleet, singles: Sequence[Mode], demand: Array
) -> Sequence[int] | None:
    """Return the cheapest numbers of devices of which the relaxation serves the demand; None where there are none.

    Where the solver used up its work they are the cheapest that it found (`solve_milp`), and some may be cheaper.
    """
    instance = context.instance(maximize_scale=False, rates=demand)
    whole = solve_milp(instance, context.slots, fleet.patterns, singles, budget=context.budget, whole_devices=True)
    return None if whole is None else whole.devices


def _unserved_cost(context: PlanningContext) -> float:
    """Return what leaving a whole model unserved costs: more than a fleet that serves it."""
    if context.relaxation is not None and not context.maximize_scale:
        served = context.relaxation.value
    else:
        limited = zip(context.counts, context.prices, strict=True)
        served = sum(count * price for count, price in limited if count < math.inf)
    dearest = max(context.prices)
    return LARGE_FACTOR * served if served > LARGE_COST * dearest else UNSERVED_PENALTY * dearest


def _fleet(context: PlanningContext, prices: Sequence[float], penalties: Array) -> Fleet:
    kinds = {context.slots[s].kind for s in context.planning_slots}
    patterns = [pattern for pattern in context.planning_patterns() if pattern.kind in kinds]
    return Fleet(context.slots, patterns, context.counts, prices, context.memory_limits, penalties)


def _dived(context: PlanningContext, diver: Diver, demand: Array) -> list[PlacedDevice]:
    """Return devices that cover the demand, made anew."""
    return _assembled(context, diver, diver.cover(demand).cover, demand)


def _assembled(context: PlanningContext, diver: Diver, cover: Cover | None, demand: Array) -> list[PlacedDevice]:
    """Return the devices of a cover, with further ones for modes whose memory did not fit together."""
    devices: list[PlacedDevice] = []
    for _ in range(MAX_ASSEMBLIES):
        if cover is None:
            break
        packed = pack_devices(cover.modes, cover.patterns, context.memory_limits)
        devices += [PlacedDevice(kind, None, modes) for kind, modes in packed]
        if not any(context.memory_limits):
            break
        left = demand - _served(devices, len(demand))
        left = np.where(left <= ROUNDING_TOLERANCE * demand, 0.0, left)
        if not left.any():
            break
        cover = _without(diver, Counter(device.kind for device in devices)).cover(left).cover
    return devices


def _completed(context: PlanningContext, catalog: ModeCatalog, diver: Diver, demand: Array) -> list[PlacedDevice]:
    """Return the devices of the current plan, with further ones for what they do not serve."""
    modes = rescaled_current_plan(context, catalog)
    kept = [
        PlacedDevice(device.kind, device.id, own)
        for device in context.current_devices
        if (own := tuple(modes[partition] for partition in device.partitions if partition in modes))
    ]
    left = demand - _served(kept, len(demand))
    left = np.where(left <= ROUNDING_TOLERANCE * demand, 0.0, left)
    if not left.any():
        return kept
    used = Counter(device.kind for device in kept)
    rest = _without(diver, used)
    return [*kept, *_dived(context, rest, left)]


def _without(diver: Diver, used: Counter[int]) -> Diver:
    """Return a diver for the devices that are left."""
    fleet = diver.fleet
    counts = [count - used[k] for k, count in enumerate(fleet.counts)]
    fleet = Fleet(fleet.slots, fleet.patterns, counts, fleet.prices, fleet.memory_limits, fleet.penalties)
    return Diver(fleet, diver.catalog, diver.singles, diver.slots, diver.budget)


def _largest_scale(
    context: PlanningContext,
    catalog: ModeCatalog,
    singles: Sequence[Mode],
    demand: Array,
    budget: WorkBudget,
    fleet_search: WorkBudget,
) -> list[PlacedDevice]:
    """Return devices that serve the largest multiple of the demand that was found."""
    relaxation = context.solve_relaxation(context.instance(maximize_scale=True, rates=demand), singles)
    if relaxation is None:
        return []
    # As where the rates are to be served at the least cost: what the devices do not hold stays unserved.
    fleet = _fleet(context, context.prices, _unserved_cost(context) / demand)
    best: list[PlacedDevice] = []
    annealed = sum(context.counts) <= MAX_ANNEALED_DEVICES
    low, high = 0.0, relaxation.value
    multiple = (ANNEALED_FIRST_SCALE if annealed else FIRST_SCALE) * high
    relaxed: Relaxed | None = None
    for _ in range(ANNEALED_SCALE_TRIALS if annealed else MAX_SCALE_TRIALS):
        part = budget.part(SCALE_DIVE_SHARE) if annealed else budget
        diver = Diver(fleet, catalog, singles, context.planning_slots, part)
        dive = diver.cover(demand * multiple)
        devices = _assembled(context, diver, dive.cover, demand * multiple)
        relaxed = dive.relaxed or relaxed
        reached = float((_served(devices, len(demand)) / demand).min())
        if reached > low or not best:
            best, low = devices, max(low, reached)
        if reached < multiple:
            high = multiple
        multiple = (low + 2 * high) / 3
        if multiple < low * SCALE_STEP or not budget.left() or (annealed and low):
            break
    counts = [round(count) for count in context.counts]
    scale = low or LEAST_SCALE * relaxation.value
    if annealed:
        if scale < NEAR_ZERO_SCALE or relaxed is None:
            return best
        target = demand * scale * (1 + FIRST_RAISE)
        diver = Diver(fleet, catalog, singles, context.planning_slots, fleet_search, diver.pool)
        search = FleetSearch(diver, singles, target, relaxed.prices(), relaxed.solution.slot_duals, fleet_search)
        return search.raised(search.resized(best, counts), demand, scale)
    while fleet_search.left() and low * SCALE_STEP <= relaxation.value:
        target = demand * low * SCALE_STEP
        diver = Diver(fleet, catalog, singles, context.planning_slots, budget)
        search = FleetSearch(diver, singles, target, relaxation.demand_duals, relaxation.slot_duals, fleet_search)
        devices = search.improve(search.resized(best, counts), fleet_search)
        reached = float((_served(devices, len(demand)) / demand).min())
        if reached <= low:
            break
        best, low = devices, reached
    return best


def _served(devices: Sequence[PlacedDevice], models: int) -> Array:
    served = np.zeros(models)
    for device in devices:
        for mode in device.modes:
            for i, rate in zip(mode.models, mode.rates, strict=True):
                served[i] += rate
    return served


def _grouped(context: PlanningContext, devices: Sequence[PlacedDevice]) -> list[DeviceGroup]:
    """Return groups of equal devices with their numbers."""
    ids = number_devices([(device.kind, device.id, device.modes) for device in devices], context.current_devices)
    groups: dict[tuple[int, tuple[Mode, ...]], list[int]] = {}
    for device, number in zip(devices, ids, strict=True):
        groups.setdefault((device.kind, device.modes), []).append(number)
    return [DeviceGroup(kind, modes, tuple(numbers)) for (kind, modes), numbers in groups.items() if modes]
