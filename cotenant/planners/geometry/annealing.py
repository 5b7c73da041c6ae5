"""Improve a fixed fleet by simulated annealing: empty a few partitions, and refill each with the mode of most value.

A step takes a tenth of a millisecond, hundreds of times less than an integer program over a few devices: thousands of
steps bring a fleet near to serving everything, and programs finish (fleet_search.py). Modes are the columns of the
relaxation near their price, and a few made for what comes short.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.covering import Fleet
from cotenant.planners.geometry.modes import Mode
from cotenant.planners.geometry.round_filling import RoundFiller
from cotenant.planners.geometry.ruin_recreate import (
    EVEN_PRICE_FRACTION,
    SECONDS_PER_MADE_MODE,
    DeviceState,
    FleetState,
    ModePool,
    ruined,
)

Array = NDArray[np.float64]

STEPS_BETWEEN_CHECKS = 20  # of the budget
SECONDS_PER_DEVICE = 3e-7  # of work, for each step
TEMPERATURE = 1e-4  # part of the demand's value by which a step may raise the shortfall, on average, at first
MADE_PROBABILITY = 0.3  # of a step that may make modes for what comes short
NO_SHORTFALL = 1e-9  # part of the demand's value that counts as served


class FleetAnnealer:
    """Fill and improve fixed fleets. modes: to choose from; demand: requests/s of each model; prices: of one of them.

    patterns: with which devices are filled first, a few of those of the fleet.
    """

    def __init__(
        self,
        fleet: Fleet,
        modes: Sequence[Mode],
        demand: Array,
        prices: Array,
        patterns: Sequence[Sequence[tuple[int, ...]]],
        filler: RoundFiller,
    ) -> None:
        values = prices * demand
        self._prices = values / (values.sum() or 1.0) + EVEN_PRICE_FRACTION / len(values)
        self._pool = ModePool(modes, demand)
        self._fleet, self._filler, self._first = fleet, filler, patterns
        self._patterns = pieces_by_kind(fleet)

    def filled(self, counts: Sequence[int], budget: WorkBudget) -> list[DeviceState]:
        """Return so many devices of each kind, filled one after the other; empty ones where the budget ends first."""
        state = self._state([DeviceState(k, None, [], []) for k, count in enumerate(counts) for _ in range(count)])
        state.patterns = self._first
        for d, device in enumerate(state.devices):
            if d and device.kind == state.devices[d - 1].kind and state.repeat(d - 1, d):
                continue
            if not budget.left():
                break
            tried = sum(len(pieces) for pieces in state.patterns[device.kind])
            budget.spend(self._pool.seconds_per_step * tried)
            state.fill_best_pattern(d)
        return state.devices

    def improved(
        self, devices: Sequence[DeviceState], rng: np.random.Generator, budget: WorkBudget
    ) -> list[DeviceState]:
        """Return the devices with the least shortfall found."""
        state = self._state(devices)
        seconds = self._pool.seconds_per_step + SECONDS_PER_DEVICE * len(devices)
        shortfall = least = state.shortfall()
        best, work = state.copy(), budget.left()
        steps, taken = max(1.0, work / seconds), 0
        while least > NO_SHORTFALL and (taken % STEPS_BETWEEN_CHECKS or budget.left()):
            taken += 1
            before, made = state.copy(), state.made_modes
            state.refill(ruined(state, rng), rng if rng.random() < MADE_PROBABILITY else None)
            budget.spend(seconds + SECONDS_PER_MADE_MODE * (state.made_modes - made))
            after = state.shortfall()
            temperature = TEMPERATURE * max(0.0, 1 - taken / steps)
            if after > shortfall + temperature * -math.log(rng.random() + 1e-12):
                state.restore(before)
                continue
            shortfall = after
            if shortfall < least - NO_SHORTFALL:
                least, best = shortfall, state.copy()
        state.restore(best)
        return state.devices

    def _state(self, devices: Sequence[DeviceState]) -> FleetState:
        return FleetState(devices, self._pool, self._patterns, self._fleet.memory_limits, self._prices, self._filler)


def pieces_by_kind(fleet: Fleet) -> list[list[tuple[int, ...]]]:
    """Return the slots of the pieces of each pattern, for each kind."""
    pieces: list[list[tuple[int, ...]]] = [[] for _ in fleet.counts]
    for pattern in fleet.patterns:
        pieces[pattern.kind].append(tuple(s for s, many in pattern.pieces for _ in range(many)))
    return pieces


def with_free_pieces(modes: Sequence[Mode], patterns: Sequence[tuple[int, ...]]) -> list[tuple[int, Mode | None]]:
    """Return a slot and a mode for each piece of a device that runs some modes, None where a pattern leaves it free."""
    taken = Counter(mode.slot for mode in modes)
    own: list[tuple[int, Mode | None]] = [(mode.slot, mode) for mode in modes]
    whole = next((counted for pattern in patterns if taken <= (counted := Counter(pattern))), taken)
    return own + [(s, None) for s in (whole - taken).elements()]
