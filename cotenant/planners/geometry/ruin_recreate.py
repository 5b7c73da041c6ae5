"""Plan small fleets by ruin and recreate (Schrimpf et al., Journal of Computational Physics 159, 2000).

An integer program has hundreds of columns for a few partitions, and takes seconds to find good solutions. Here a state
is a whole plan. A step empties one or two devices, or some partitions of any, may change the patterns of the former,
and refills one partition after the other with the mode that leaves the least shortfall at the relaxation's prices;
thousands of modes are compared at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.modes import Mode

Array = NDArray[np.float64]

TARGET_RATIO = 1.002  # multiple to search for, over the best so far
EVEN_PRICE_FRACTION = 0.05  # fraction of all prices that is spread evenly, so that no model is too cheap to be served
SCATTERED_STEP_PROBABILITY = 0.5  # probability of a step that empties partitions anywhere rather than whole devices
KEEP_PROBABILITY = 0.75  # probability of each partition to be kept in such a step
STEPS_BETWEEN_LOOKS = 20  # at the budget
SECONDS_PER_STEP = 1.5e-4  # of work
SECONDS_PER_STEP_AND_ENTRY = 6e-9  # and for each model and mode of the largest slot
TEMPERATURE = 1e-4  # part of the target by which a step may raise the shortfall, on average, at first
MAX_SCATTERED = 12.0  # partitions emptied in such a step, on average


class DeviceState(msgspec.Struct):
    """Describe a device during the search. pieces: slots of its partitions; modes: one for each, None where empty."""

    kind: int
    id: int | None
    pieces: list[int]
    modes: list[Mode | None]


class ModePool:
    """Hold the modes to choose from. served[s][:, n]: what mode n of slot s serves, as fractions of the rates."""

    def __init__(self, modes: Sequence[Mode], rates: Array) -> None:
        self.modes: dict[int, list[Mode]] = {}
        for mode in dict.fromkeys(modes):
            self.modes.setdefault(mode.slot, []).append(mode)
        self.served = {}
        self.memory = {}
        for s, own in self.modes.items():
            # A row for each model: numpy is fastest over long rows.
            served = np.zeros((len(rates), len(own)))
            for n, mode in enumerate(own):
                served[list(mode.models), n] = mode.rates
            self.served[s] = served / rates[:, None]
            self.memory[s] = np.array([float(mode.memory) for mode in own])
        largest = max((served.size for served in self.served.values()), default=0)
        self.seconds_per_step = SECONDS_PER_STEP + SECONDS_PER_STEP_AND_ENTRY * largest
        self.index = {mode: n for own in self.modes.values() for n, mode in enumerate(own)}

    def with_demand(self, factors: Array) -> ModePool:
        """Return the pool for rates multiplied by a factor for each model."""
        pool = copy(self)
        pool.served = {s: served / factors[:, None] for s, served in self.served.items()}
        return pool


def ruin_and_recreate(
    devices: Sequence[DeviceState],
    pool: ModePool,
    patterns: Sequence[Sequence[Sequence[int]]],
    memory_limits: Sequence[int | None],
    prices: Array,
    *,
    target_scale: float,
    steps: int,
    budget: WorkBudget,
) -> tuple[float, list[DeviceState]]:
    """Search for the largest multiple of the rates; return it and its devices.

    devices: to begin with; those without pieces are filled first. patterns: for each kind, the pieces of each pattern.
    prices: of each model's rate. target_scale: the multiple at which the search stops. steps: at most, as far as the
    budget allows.
    """
    state = _FleetState(
        devices, pool, patterns, memory_limits, prices / (prices.sum() or 1.0) + EVEN_PRICE_FRACTION / len(prices)
    )
    rng = np.random.default_rng(0)
    initial = state.copy()
    best, best_state = -1.0, initial
    # Too high a target leaves some models out: a lower one may serve more.
    for state.target in (target_scale, target_scale / 2, target_scale / 4, target_scale / 8):
        state.restore(initial)
        for d, device in enumerate(state.devices):
            if not device.pieces:
                state.fill_best_pattern(d)
        if state.scale() > best:
            best, best_state = state.scale(), state.copy()
        if best > state.target / 2 or not budget.left():
            break
    state.restore(best_state)
    if any(device.pieces for device in devices) and _repair(state, rng, target_scale, steps // 4, budget):
        return state.scale(), state.devices
    state.target = min(target_scale, best * TARGET_RATIO) or target_scale / 8
    shortfall = state.shortfall()
    steps_taken = 0
    seconds = pool.seconds_per_step
    while steps_taken < steps and best < target_scale * (1 - 1e-9):
        if steps_taken % STEPS_BETWEEN_LOOKS == 0 and not budget.left():
            break
        steps_taken += 1
        budget.spend(seconds)
        if best <= 0 and steps_taken % (1 + steps // 10) == 0:
            state.target /= 2
            shortfall = state.shortfall()
        before = state.copy()
        state.refill(_ruin(state, rng))
        new_shortfall = state.shortfall()
        if new_shortfall > shortfall + TEMPERATURE * state.target * (1 - steps_taken / steps) * -math.log(
            rng.random() + 1e-12
        ):
            state.restore(before)
            continue
        shortfall = new_shortfall
        if state.scale() > best:
            best, best_state = state.scale(), state.copy()
            state.target = min(target_scale, best * TARGET_RATIO)
            shortfall = state.shortfall()
    state.restore(best_state)
    return best, state.devices


def _repair(state: _FleetState, rng: np.random.Generator, target_scale: float, tries: int, budget: WorkBudget) -> bool:
    """Try to reach the target by changing a few partitions, the fewest first; restore the state where that fails."""
    before = state.copy()
    state.target = target_scale
    for n in range(tries):
        if n % STEPS_BETWEEN_LOOKS == 0 and not budget.left():
            break
        budget.spend(state.pool.seconds_per_step)
        partitions = [(d, p) for d, device in enumerate(state.devices) for p in range(len(device.modes))]
        chosen = [partitions[k] for k in rng.permutation(len(partitions))[: 1 + 4 * n // tries].tolist()]
        for d, p in chosen:
            state.place(d, p, None)
        state.refill(chosen)
        if state.scale() >= target_scale * (1 - 1e-9):
            return True
        state.restore(before)
    return False


def _ruin(state: _FleetState, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Empty some partitions and return them in the order in which to refill them."""
    count = len(state.devices)
    if rng.random() < SCATTERED_STEP_PROBABILITY:
        partitions = [(d, p) for d, device in enumerate(state.devices) for p in range(len(device.modes))]
        probability = min(1 - KEEP_PROBABILITY, MAX_SCATTERED / max(1, len(partitions)))
        emptied = [partitions[n] for n in np.flatnonzero(rng.random(len(partitions)) < probability).tolist()]
    else:
        emptied = []
        for d in rng.permutation(count)[: int(rng.integers(1, 3))].tolist():
            device = state.devices[d]
            patterns = state.patterns[device.kind]
            for p in range(len(device.modes)):
                state.place(d, p, None)
            pieces = patterns[int(rng.integers(len(patterns)))]
            state.devices[d] = DeviceState(device.kind, device.id, list(pieces), [None] * len(pieces))
            emptied += [(d, p) for p in range(len(pieces))]
    for d, p in emptied:
        state.place(d, p, None)
    return [emptied[n] for n in rng.permutation(len(emptied)).tolist()]


class _FleetState:
    """Describe a plan during the search.

    target: the multiple of the rates beyond which serving counts nothing; served: fractions of the rates.
    """

    def __init__(
        self,
        devices: Sequence[DeviceState],
        pool: ModePool,
        patterns: Sequence[Sequence[Sequence[int]]],
        memory_limits: Sequence[int | None],
        prices: Array,
    ) -> None:
        self.pool, self.patterns, self.memory_limits, self.prices = pool, patterns, memory_limits, prices
        self.target = 1.0
        self._values = {s: prices[:, None] * served for s, served in pool.served.items()}
        # Keyed by identity: to hash a mode takes longer than the rest of a step.
        modes_on = pool.modes
        self._served_by = {
            id(mode): served
            for s in modes_on
            for mode, served in zip(modes_on[s], pool.served[s].T.copy(), strict=True)
        }
        self.devices: list[DeviceState] = []
        self.served = np.zeros(len(prices))
        for device in devices:
            modes = [None if mode is None else modes_on[mode.slot][pool.index[mode]] for mode in device.modes]
            self.devices.append(DeviceState(device.kind, device.id, device.pieces, modes))
            for mode in modes:
                if mode is not None:
                    self.served = self.served + self._served_by[id(mode)]

    def scale(self) -> float:
        return float(self.served.min())

    def shortfall(self) -> float:
        return float(np.maximum(self.target - self.served, 0.0) @ self.prices)

    def place(self, d: int, p: int, mode: Mode | None) -> None:
        device = self.devices[d]
        old = device.modes[p]
        if old is mode:
            return
        if old is not None:
            self.served = self.served - self._served_by[id(old)]
        if mode is not None:
            self.served = self.served + self._served_by[id(mode)]
        # A new value, since copies of the state share the devices that did not change.
        modes = [*device.modes[:p], mode, *device.modes[p + 1 :]]
        self.devices[d] = DeviceState(device.kind, device.id, device.pieces, modes)

    def refill(self, partitions: Sequence[tuple[int, int]]) -> None:
        """Place on each partition the mode that leaves the least shortfall; none, if none reduces it."""
        for d, p in partitions:
            device = self.devices[d]
            s = device.pieces[p]
            if s not in self.pool.modes:
                continue
            shortfalls = (self.target - self.served) * self.prices
            # How much each mode reduces the shortfall; anything beyond it does not count.
            gains = np.minimum(self._values[s], shortfalls[:, None]).sum(axis=0)
            memory_limit = self.memory_limits[device.kind]
            if memory_limit is not None:
                used = sum(mode.memory for mode in device.modes if mode is not None)
                gains[self.pool.memory[s] > memory_limit - used] = -np.inf
            n = int(gains.argmax())
            if shortfalls.sum() - gains[n] < self.shortfall() - 1e-12:
                self.place(d, p, self.pool.modes[s][n])

    def fill_best_pattern(self, d: int) -> None:
        """Fill an empty device in the pattern that leaves the least shortfall."""
        kind, number = self.devices[d].kind, self.devices[d].id
        before, best = self.copy(), (math.inf, self.copy())
        for pieces in self.patterns[kind]:
            self.restore(before)
            self.devices[d] = DeviceState(kind, number, list(pieces), [None] * len(pieces))
            self.refill([(d, p) for p in reversed(range(len(pieces)))])
            if self.shortfall() < best[0]:
                best = self.shortfall(), self.copy()
        self.restore(best[1])

    def copy(self) -> tuple[list[DeviceState], Array]:
        return list(self.devices), self.served

    def restore(self, copy: tuple[list[DeviceState], Array]) -> None:
        self.devices = list(copy[0])
        self.served = copy[1]
