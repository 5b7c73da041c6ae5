"""Small fleets: devices to begin with, and what may lie on them, for ruin and recreate (exchange.py)."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence

import msgspec
import numpy as np

from cotenant.core.plan import Plan
from cotenant.planners.geometry.context import FEW, PlanningContext
from cotenant.planners.geometry.device_assembly import CurrentPartition, DeviceGroup
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.program import MilpSolution
from cotenant.planners.geometry.rate_fitting import fitted_plan, raised_rates
from cotenant.planners.geometry.ruin_recreate import DeviceState, ModePool, ruin_and_recreate

SMALL = 16  # devices up to which they are filled one by one
VERY_FEW = 5  # models of which larger sets are looked at, too
STEPS = 4500  # of filling devices anew, for each second of the time limit
ROUNDS = 3  # of so many steps, at most
REPAIRS = 4  # times that models which come short are asked for more
CHOICES = 20_000  # sets of devices of mixed kinds that are looked at, and of those, how many are tried
FLEETS = 6


class SearchBudget:
    """Steps that are left, over all menus. seconds: of the problem's time limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = round(STEPS * seconds * ROUNDS)


def solve_small_fleet(
    space: PlanningContext, menu: ModeCatalog, patience: SearchBudget, *, first: bool
) -> Generator[Plan, None, bool]:
    """What emptying and filling devices finds, from the fewest devices up. Returns whether it serves the rates.

    first: any plan that serves them will do.
    """
    priced = space.linear(space.ask(scale=space.scale, endless=not space.scale), space.ones(menu))
    if priced is None:
        return False
    worth = priced.worth * space.rates
    enough = priced.value if space.scale else 1.0
    offer = ModePool(_offered(space, menu, priced), space.rates)
    pieces = [
        [[s for s, many in cutting.pieces for _ in range(many)] for cutting in space.cuttings if cutting.kind == k]
        for k in range(len(space.fleet))
    ]
    every = _every(space)
    # Of several kinds more sets of devices are looked at, and each gets less.
    share = patience.seconds / min(2, len(space.fleet))
    for fleet in _fleets(space, menu, first=first):
        boxes = _boxes(space, [k for k in fleet if pieces[k]], offer)
        wanted = np.ones(len(space.names))
        for _ in range(REPAIRS):
            steps = min(patience.steps, round(STEPS * share))
            reached, boxes, taken = ruin_and_recreate(
                boxes, offer.for_more(wanted), pieces, space.rooms, worth, enough=enough, steps=steps
            )
            patience.steps -= taken
            plan = fitted_plan(space, menu, _grouped(boxes))
            yield plan
            lacking = raised_rates(space, plan)
            if lacking is None or (not space.scale and reached < 1 - 1e-9):
                break
            wanted *= lacking
        if not space.scale and lacking is None:
            return len(space.fleet) == 1 or fleet != every  # with all that there are, no choice was made of kinds
    return False


def rescaled_current_plan(space: PlanningContext, menu: ModeCatalog) -> dict[CurrentPartition, Mode]:
    """What each partition of the plan in force may run, in proportion to the rates that it has."""
    places = dict.fromkeys(place for device in space.standing for place in device.places)
    modes = ((place, menu.towards(*msgspec.structs.astuple(place))) for place in places)
    return {place: mode for place, mode in modes if mode is not None}


def _every(space: PlanningContext) -> list[int]:
    return [k for k, count in enumerate(space.counts) for _ in range(int(min(count, SMALL)))]


def _fleets(space: PlanningContext, menu: ModeCatalog, *, first: bool) -> Iterable[list[int]]:
    """Kinds of devices to try with: the cheapest with which the relaxation serves the rates; at last all."""
    every = _every(space)
    if space.scale or space.relaxed is None or first:
        yield every
        return
    most = [range(int(min(count, SMALL)) + 1) for count in space.counts]
    least = space.relaxed.value - 1e-9
    choices = (
        counts
        for counts in itertools.islice(itertools.product(*most), CHOICES)
        if 0 < sum(counts) <= SMALL and space.cost(counts) >= least
    )
    tried, ones = 0, space.ones(menu)
    for counts in sorted(choices, key=space.cost):
        ask = msgspec.structs.replace(space.ask(scale=False), counts=[float(count) for count in counts])
        if space.linear(ask, ones) is not None:
            yield [k for k, count in enumerate(counts) for _ in range(count)]
            tried += 1
        if tried == FLEETS:
            break
    yield every


def _offered(space: PlanningContext, menu: ModeCatalog, priced: MilpSolution) -> list[Mode]:
    """All modes of one model and of two, the best of more, and those of the plan in force."""
    clip = space.rates * (priced.value if space.scale else 1.0)
    pairs = menu.frontiers(space.planned) if len(space.names) <= FEW else []
    several = menu.several(space.planned, space.rates) if len(space.names) <= VERY_FEW else []
    return [
        *rescaled_current_plan(space, menu).values(),
        *space.ones(menu),
        *pairs,
        *several,
        *menu.fills(space.planned, priced.worth, clip),
    ]


def _boxes(space: PlanningContext, kinds: Sequence[int], offer: ModePool) -> list[DeviceState]:
    """Devices to begin with: those of the plan in force, and others in one piece each."""
    known = {(mode.slot, mode.models): mode for modes in offer.modes.values() for mode in reversed(modes)}
    left = list(kinds)
    boxes = []
    for device in space.standing:
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
