"""Plan small fleets by ruin and recreate (Schrimpf et al., Journal of Computational Physics 159, 2000).

An integer program has hundreds of columns for a few partitions, and takes seconds to find good solutions. Here a state
is a whole plan. A step empties one or two devices, or some partitions of any, may change the patterns of the former,
and refills one partition after the other with the mode that leaves the least shortfall at the relaxation's prices;
thousands of modes are compared at once.

The modes of a pool are made beforehand, those of many models for few rates. Where a partition has to serve many models,
the pool has hardly any set of them that is needed. So now and then a mode is made for what comes short
(round_filling.py), and a device is cut anew for the sets of models that share its partitions, with one of them moved to
another partition, or two exchanged.

Refilling takes the best mode each time, so on few devices the same partitions would be refilled in a few ways only: in
half of the steps the models' prices are changed at random (as with the blinks of Christiaens and Vanden Berghe,
Transportation Science 54, 2020), while shortfalls still count at the relaxation's prices.
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
from cotenant.planners.geometry.round_filling import RoundFiller

Array = NDArray[np.float64]

TARGET_RATIO = 1.002  # multiple to search for, over the best so far
EVEN_PRICE_FRACTION = 0.05  # fraction of all prices that is spread evenly, so that no model is too cheap to be served
SCATTERED_STEP_PROBABILITY = 0.5  # probability of a step that empties partitions anywhere rather than whole devices
KEEP_PROBABILITY = 0.75  # probability of each partition to be kept in such a step
STEPS_BETWEEN_CHECKS = 20  # of the budget
SECONDS_PER_STEP = 7e-5  # of work
SECONDS_PER_STEP_AND_ENTRY = 2e-9  # and for each model and mode of the largest slot
TEMPERATURE = 1e-4  # part of the target by which a step may raise the shortfall, on average, at first
MAX_SCATTERED = 12.0  # partitions emptied in such a step, on average
MAX_HALVINGS = 40  # of the target, while some model is not served at all
FILL_PROBABILITY = 0.1  # of making a mode for a partition, to compare with those of the pool
SECONDS_PER_MADE_MODE = 1e-4  # of work
RECUT_PROBABILITY = 0.3  # of a step that cuts a device anew for its sets of models
MADE_PART = 0.25  # of further steps, in which modes are made
PATTERN_PROBABILITY = 0.5  # of other shares in such a step
UNCHANGED_PROBABILITY = 1 / 3  # of the same sets in such a step
WEIGHTED_PROBABILITY = 0.5  # of a step that refills at prices changed at random
WEIGHT_DEVIATION = 1.0  # of the logarithm of the factors on prices in such a step
EXCHANGE_PROBABILITY = 0.5  # of exchanging two models, where the sets change, rather than moving one


class DeviceState(msgspec.Struct):
    """Describe a device during the search. pieces: slots of its partitions; modes: one for each, None where empty."""

    kind: int
    id: int | None
    pieces: list[int]
    modes: list[Mode | None]


class ModePool:
    """Hold the modes to choose from. served[s][:, n]: what mode n of slot s serves, as fractions of the rates."""

    def __init__(self, modes: Sequence[Mode], rates: Array) -> None:
        self.rates = rates
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
        pool.rates = self.rates * factors
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
    filler: RoundFiller | None = None,
) -> tuple[float, list[DeviceState]]:
    """Search for the largest multiple of the rates; return it and its devices.

    devices: to begin with; those without pieces are filled first. patterns: for each kind, the pieces of each pattern.
    prices: of each model's rate. target_scale: the multiple at which the search stops. steps: at most, as far as the
    budget allows. filler: makes modes that the pool lacks.
    """
    state = FleetState(
        devices,
        pool,
        patterns,
        memory_limits,
        prices / (prices.sum() or 1.0) + EVEN_PRICE_FRACTION / len(prices),
        filler,
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
    seconds = pool.seconds_per_step
    # Where the pool serves some model not at all, it lacks modes from the start; else it is used first.
    lacks_modes = filler is not None and best <= 0
    last = steps + (round(steps * MADE_PART) if filler is not None else 0)
    reserved = MADE_PART * budget.left() if filler is not None and not lacks_modes else 0.0
    steps_taken = 0
    while steps_taken < last and state.devices and best < target_scale * (1 - 1e-9):
        if steps_taken % STEPS_BETWEEN_CHECKS == 0 and not budget.left():
            break
        if steps_taken == steps or (steps_taken < steps and budget.left() <= reserved):
            steps_taken = steps
            state.restore(best_state)
            shortfall = state.shortfall()
        steps_taken += 1
        budget.spend(seconds)
        if best <= 0 and steps_taken % (1 + steps // MAX_HALVINGS) == 0:
            state.target /= 2
            shortfall = state.shortfall()
        before, made = state.copy(), state.made_modes
        makes_modes = lacks_modes or steps_taken > steps
        if makes_modes and rng.random() < RECUT_PROBABILITY:
            state.refill(_recut(state, rng))
        else:
            emptied = _ruined(state, rng)
            weights = rng.lognormal(0.0, WEIGHT_DEVIATION, len(prices)) if rng.random() < WEIGHTED_PROBABILITY else None
            state.refill(emptied, rng if makes_modes else None, weights)
        budget.spend(SECONDS_PER_MADE_MODE * (state.made_modes - made))
        new_shortfall = state.shortfall()
        temperature = TEMPERATURE * state.target * max(0.0, 1 - steps_taken / steps)
        if new_shortfall > shortfall + temperature * -math.log(rng.random() + 1e-12):
            state.restore(before)
            continue
        shortfall = new_shortfall
        if state.scale() > best:
            best, best_state = state.scale(), state.copy()
            state.target = min(target_scale, best * TARGET_RATIO)
            shortfall = state.shortfall()
    state.restore(best_state)
    return best, state.devices


def _repair(state: FleetState, rng: np.random.Generator, target_scale: float, tries: int, budget: WorkBudget) -> bool:
    """Try to reach the target by changing a few partitions, the fewest first; restore the state where that fails."""
    before = state.copy()
    state.target = target_scale
    for n in range(tries):
        if n % STEPS_BETWEEN_CHECKS == 0 and not budget.left():
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


def _ruined(state: FleetState, rng: np.random.Generator) -> list[tuple[int, int]]:
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


def _recut(state: FleetState, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Cut a device anew for the sets of models that share its partitions, mostly after a move or an exchange; return
    its empty partitions."""
    d = int(rng.integers(len(state.devices)))
    device = state.devices[d]
    sets = _changed_sets([list(mode.models) for mode in device.modes if mode is not None], rng)
    pieces = device.pieces
    alike = [pattern for pattern in state.patterns[device.kind] if len(pattern) == len(pieces)]
    if alike and rng.random() < PATTERN_PROBABILITY:
        pieces = list(alike[int(rng.integers(len(alike)))])
    for p in range(len(device.modes)):
        state.place(d, p, None)
    state.devices[d] = DeviceState(device.kind, device.id, list(pieces), [None] * len(pieces))
    order = rng.permutation(len(pieces)).tolist()
    for p, models in zip(order, sets, strict=False):
        state.place(d, p, state.made(d, p, models))
    return [(d, p) for p in order if state.devices[d].modes[p] is None]


def _changed_sets(sets: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    """Return the sets of models with one moved to another set, or two exchanged, or as they are."""
    if len(sets) < 2 or rng.random() < UNCHANGED_PROBABILITY:
        return sets
    a, b = rng.permutation(len(sets))[:2].tolist()
    moved = sets[a].pop(int(rng.integers(len(sets[a]))))
    if rng.random() < EXCHANGE_PROBABILITY:
        sets[a].append(sets[b].pop(int(rng.integers(len(sets[b])))))
    sets[b].append(moved)
    return sets


class FleetState:
    """Describe a plan during the search.

    target: the multiple of the rates beyond which serving counts nothing; served: fractions of the rates; made_modes:
    number of modes made so far.
    """

    def __init__(
        self,
        devices: Sequence[DeviceState],
        pool: ModePool,
        patterns: Sequence[Sequence[Sequence[int]]],
        memory_limits: Sequence[int | None],
        prices: Array,
        filler: RoundFiller | None,
    ) -> None:
        self.pool, self.patterns, self.memory_limits, self.prices = pool, patterns, memory_limits, prices
        self.filler = filler
        self.made_modes = 0
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
            modes = [None if mode is None else self._known(mode) for mode in device.modes]
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

    def refill(
        self,
        partitions: Sequence[tuple[int, int]],
        rng: np.random.Generator | None = None,
        weights: Array | None = None,
    ) -> None:
        """Place on each partition the mode that leaves the least shortfall; none, if none reduces it. rng: decides
        where one is made; without it, modes are those of the pool. weights: factors on the prices of models at which
        modes of the pool are compared."""
        for d, p in partitions:
            device = self.devices[d]
            s = device.pieces[p]
            if s not in self.pool.modes:
                continue
            shortfalls = (self.target - self.served) * self.prices
            # How much each mode reduces the shortfall; anything beyond it does not count.
            reduced = np.minimum(self._values[s], shortfalls[:, None])
            gains = reduced.sum(axis=0) if weights is None else weights @ reduced
            memory_left = self._memory_left(d)
            if memory_left < math.inf:
                gains[self.pool.memory[s] > memory_left] = -np.inf
            n = int(gains.argmax())
            mode, gain = self.pool.modes[s][n], float(reduced[:, n].sum())
            if gains[n] == -math.inf:
                gain = -math.inf  # no mode fits the memory
            if self.filler is not None and rng is not None and rng.random() < FILL_PROBABILITY:
                made = self.made(d, p)
                if made is not None:
                    own = float(np.minimum(self._served_by[id(made)] * self.prices, shortfalls).sum())
                    mode, gain = (made, own) if own > gain else (mode, gain)
            if shortfalls.sum() - gain < self.shortfall() - 1e-12:
                self.place(d, p, mode)

    def made(self, d: int, p: int, first: Sequence[int] = ()) -> Mode | None:
        """Return a mode made for what comes short, of these models first; None where the first cannot be served."""
        assert self.filler is not None
        self.made_modes += 1
        demand = (self.target - self.served) * self.pool.rates
        short = {i: float(demand[i]) for i in np.flatnonzero(demand > 0).tolist()}
        mode = self.filler.fill(self.devices[d].pieces[p], short, self._memory_left(d), first)
        return None if mode is None else self._known(mode)

    def _known(self, mode: Mode) -> Mode:
        """Return the mode as the pool has it; one that was made is added to what is known, as it is."""
        if id(mode) in self._served_by:
            return mode
        if mode in self.pool.index:
            return self.pool.modes[mode.slot][self.pool.index[mode]]
        served = np.zeros(len(self.served))
        served[list(mode.models)] = mode.rates
        self._served_by[id(mode)] = served / self.pool.rates
        return mode

    def _memory_left(self, d: int) -> float:
        """Return the bytes of a device that its workers leave to others; inf where memory cannot limit."""
        limit = self.memory_limits[self.devices[d].kind]
        if limit is None:
            return math.inf
        return float(limit - sum(mode.memory for mode in self.devices[d].modes if mode is not None))

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

    def repeat(self, d: int, other: int) -> bool:
        """Place the modes of one device on another of its kind, if all that they serve is short; return whether so."""
        modes = [mode for mode in self.devices[d].modes if mode is not None]
        served = sum((self._served_by[id(mode)] for mode in modes), np.zeros(len(self.served)))
        if not modes or (self.served + served > self.target).any():
            return False
        own, device = self.devices[d], self.devices[other]
        self.devices[other] = DeviceState(device.kind, device.id, list(own.pieces), list(own.modes))
        self.served = self.served + served
        return True

    def copy(self) -> tuple[list[DeviceState], Array]:
        return list(self.devices), self.served

    def restore(self, copy: tuple[list[DeviceState], Array]) -> None:
        self.devices = list(copy[0])
        self.served = copy[1]
