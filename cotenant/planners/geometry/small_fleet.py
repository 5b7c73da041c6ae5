"""Small fleets: devices to begin with, and what may lie on them, for ruin and recreate (exchange.py)."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence

import msgspec
import numpy as np

from cotenant.core.plan import Plan
from cotenant.planners.geometry.context import MAX_MODELS_FOR_PAIRS, PlanningContext
from cotenant.planners.geometry.device_assembly import CurrentPartition, DeviceGroup
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.program import MilpSolution
from cotenant.planners.geometry.rate_fitting import demand_multipliers, fitted_plan
from cotenant.planners.geometry.ruin_recreate import DeviceState, ModePool, ruin_and_recreate

MAX_SMALL_FLEET = 16  # devices up to which they are filled one by one
MAX_MODELS_FOR_SETS = 5  # models of which larger sets are looked at, too
STEPS_PER_SECOND = 4500  # of filling devices anew, for each second of the time limit
BUDGET_ROUNDS = 3  # of so many steps, at most
MAX_REPAIRS = 4  # times that models which come short are asked for more
MAX_FLEET_CHOICES = 20_000  # sets of devices of mixed kinds that are looked at, and of those, how many are tried
MAX_FLEETS = 6


class SearchBudget:
    """Steps that are left, over all menus. seconds: of the problem's time limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = round(STEPS_PER_SECOND * seconds * BUDGET_ROUNDS)


def solve_small_fleet(
    context: PlanningContext, catalog: ModeCatalog, patience: SearchBudget, *, first: bool
) -> Generator[Plan, None, bool]:
    """What emptying and filling devices finds, from the fewest devices up. Returns whether it serves the rates.

    first: any plan that serves them will do.
    """
    priced = context.solve_relaxation(
        context.instance(scale=context.maximize_scale, endless=not context.maximize_scale),
        context.planning_modes(catalog),
    )
    if priced is None:
        return False
    worth = priced.demand_duals * context.rates
    enough = priced.value if context.maximize_scale else 1.0
    offer = ModePool(_offered(context, catalog, priced), context.rates)
    pieces = [
        [[s for s, many in pattern.pieces for _ in range(many)] for pattern in context.patterns if pattern.kind == k]
        for k in range(len(context.fleet))
    ]
    every = _every(context)
    # Of several kinds more sets of devices are looked at, and each gets less.
    share = patience.seconds / min(2, len(context.fleet))
    for fleet in _fleets(context, catalog, first=first):
        boxes = _boxes(context, [k for k in fleet if pieces[k]], offer)
        wanted = np.ones(len(context.names))
        for _ in range(MAX_REPAIRS):
            steps = min(patience.steps, round(STEPS_PER_SECOND * share))
            reached, boxes, taken = ruin_and_recreate(
                boxes, offer.for_more(wanted), pieces, context.memory_limits, worth, enough=enough, steps=steps
            )
            patience.steps -= taken
            plan = fitted_plan(context, catalog, _grouped(boxes))
            yield plan
            lacking = demand_multipliers(context, plan)
            if lacking is None or (not context.maximize_scale and reached < 1 - 1e-9):
                break
            wanted *= lacking
        if not context.maximize_scale and lacking is None:
            return len(context.fleet) == 1 or fleet != every  # with all that there are, no choice was made of kinds
    return False


def rescaled_current_plan(context: PlanningContext, catalog: ModeCatalog) -> dict[CurrentPartition, Mode]:
    """What each partition of the plan in force may run, in proportion to the rates that it has."""
    places = dict.fromkeys(place for device in context.current_devices for place in device.places)
    modes = ((place, catalog.proportional_mode(*msgspec.structs.astuple(place))) for place in places)
    return {place: mode for place, mode in modes if mode is not None}


def _every(context: PlanningContext) -> list[int]:
    return [k for k, count in enumerate(context.counts) for _ in range(int(min(count, MAX_SMALL_FLEET)))]


def _fleets(context: PlanningContext, catalog: ModeCatalog, *, first: bool) -> Iterable[list[int]]:
    """Kinds of devices to try with: the cheapest with which the relaxation serves the rates; at last all."""
    every = _every(context)
    if context.maximize_scale or context.relaxation is None or first:
        yield every
        return
    most = [range(int(min(count, MAX_SMALL_FLEET)) + 1) for count in context.counts]
    least = context.relaxation.value - 1e-9
    choices = (
        counts
        for counts in itertools.islice(itertools.product(*most), MAX_FLEET_CHOICES)
        if 0 < sum(counts) <= MAX_SMALL_FLEET and context.cost(counts) >= least
    )
    tried, ones = 0, context.planning_modes(catalog)
    for counts in sorted(choices, key=context.cost):
        ask = msgspec.structs.replace(context.instance(scale=False), counts=[float(count) for count in counts])
        if context.solve_relaxation(ask, ones) is not None:
            yield [k for k, count in enumerate(counts) for _ in range(count)]
            tried += 1
        if tried == MAX_FLEETS:
            break
    yield every


def _offered(context: PlanningContext, catalog: ModeCatalog, priced: MilpSolution) -> list[Mode]:
    """All modes of one model and of two, the best of more, and those of the plan in force."""
    clip = context.rates * (priced.value if context.maximize_scale else 1.0)
    pair_modes = catalog.pair_frontiers(context.planning_slots) if len(context.names) <= MAX_MODELS_FOR_PAIRS else []
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
        *catalog.knapsack_modes(context.planning_slots, priced.demand_duals, clip),
    ]


def _boxes(context: PlanningContext, kinds: Sequence[int], offer: ModePool) -> list[DeviceState]:
    """Devices to begin with: those of the plan in force, and others in one piece each."""
    known = {(mode.slot, mode.models): mode for modes in offer.modes.values() for mode in reversed(modes)}
    left = list(kinds)
    boxes = []
    for device in context.current_devices:
        modes = [known.get((place.slot, place.models)) for place in device.places]
        if device.kind in left and all(modes):
            left.remove(device.kind)
            boxes.append(DeviceState(device.kind, device.id, [place.slot for place in device.places], modes))
    return boxes + [DeviceState(kind, None, [], []) for kind in left]


def _grouped(boxes: Sequence[DeviceState]) -> list[DeviceGroup]:
    """As groups of one, with numbers."""
    taken = {(box.kind, box.id) for box in boxes}
    groups = []
    for box in boxes:
        modes = tuple(mode for mode in box.modes if mode is not None)
        number = box.id if box.id is not None else next(n for n in itertools.count() if (box.kind, n) not in taken)
        taken.add((box.kind, number))
        if modes:
            groups.append(DeviceGroup(box.kind, modes, (number,)))
    return groups
