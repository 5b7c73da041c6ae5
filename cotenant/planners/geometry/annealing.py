"""Improve a fixed fleet by simulated annealing: empty a few partitions, and refill each with the mode of most value.

A step takes about a tenth of a millisecond, hundreds of times less than an integer program over a few devices. Most
steps empty partitions that have to do with each other: one that serves a model that is short, and others that share
models with it (Shaw, CP 1998). Chosen anywhere, partitions of a larger fleet have no model in common, and get back what
they had. Modes are the columns of the relaxation near their price, many more that are nearly as good
(annealing_modes.py), and a few made for what comes short. A mode serves few models, so only these are looked at.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.covering import Fleet
from cotenant.planners.geometry.modes import Mode
from cotenant.planners.geometry.round_filling import RoundFiller
from cotenant.planners.geometry.ruin_recreate import (
    EVEN_PRICE_FRACTION,
    FILL_PROBABILITY,
    SECONDS_PER_MADE_MODE,
    DeviceState,
    FleetState,
    ModePool,
)

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

STEPS_BETWEEN_CHECKS = 20  # of the budget
SECONDS_PER_STEP = 1e-5  # of work
SECONDS_PER_REFILL = 8e-6  # and for each partition that is refilled
SECONDS_PER_REFILL_AND_ENTRY = 1e-9  # and for each model of each mode of its slot
SECONDS_PER_COPIED_DEVICE = 1e-7  # and for each device of a state that is kept as the best
TEMPERATURE = 1e-4  # part of the demand's value by which a step may raise the shortfall, on average, at first
OF_LEAST = 0.1  # part of the least shortfall by which it may at most: a fleet that is nearly served is not left again
RECUT_PROBABILITY = 0.2  # of a step that empties whole devices, and cuts them anew, rather than a few partitions
TWO_PROBABILITY = 0.1  # of two devices in such a step, rather than one
MIN_EMPTIED, MORE_EMPTIED = 2, 2.0  # partitions in another step: at least, and so many more on average
RELATED_PROBABILITY = 0.7  # of such a step whose partitions have models in common, from one that is short on
MADE_PROBABILITY = 0.3  # of a step that may make modes for what comes short
TUNE_PROBABILITY = 0.15  # of a step that changes the batches of one partition, for a model that is short
NO_SHORTFALL = 1e-9  # part of the demand's value that counts as served
TINY = 1e-12  # below which a mode gains nothing


class FleetAnnealer:
    """Fill and improve fixed fleets. modes: to fill devices with; more: to improve them with, besides; demand:
    requests/s of each model; prices: of one of them.

    patterns: with which devices are filled first, a few of those of the fleet.
    """

    def __init__(
        self,
        fleet: Fleet,
        modes: Sequence[Mode],
        more: Sequence[Mode],
        demand: Array,
        prices: Array,
        patterns: Sequence[Sequence[tuple[int, ...]]],
        filler: RoundFiller,
    ) -> None:
        values = prices * demand
        self._prices = values / (values.sum() or 1.0) + EVEN_PRICE_FRACTION / len(values)
        self._pool, self._demand = ModePool(modes, demand), demand
        self._fleet, self._filler, self._first = fleet, filler, patterns
        self._choices = _Choices(list(dict.fromkeys([*modes, *more])), self._prices / demand)
        self._patterns = pieces_by_kind(fleet)

    def filled(self, counts: Sequence[int], budget: WorkBudget) -> list[DeviceState]:
        """Return so many devices of each kind, filled one after the other; empty ones where the budget ends first."""
        devices = [DeviceState(k, None, [], []) for k, count in enumerate(counts) for _ in range(count)]
        state = FleetState(devices, self._pool, self._first, self._fleet.memory_limits, self._prices, self._filler)
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
        # Of the standard library: numpy's generator takes ten times as long for a single number.
        own_rng = random.Random(int(rng.integers(1 << 62)))  # noqa: S311
        state = _Annealed(
            self._choices, devices, self._patterns, self._fleet.memory_limits, self._filler, own_rng, self._demand
        )
        shortfall = least = state.shortfall()
        best, work, taken = state.copy(), budget.left(), 0
        temperature = TEMPERATURE
        while least > NO_SHORTFALL:
            if taken % STEPS_BETWEEN_CHECKS == 0:
                left = budget.left()
                if not left:
                    break
                temperature = TEMPERATURE * left / work
            taken += 1
            state.begin()
            if own_rng.random() < TUNE_PROBABILITY:
                state.tune()
            else:
                state.refill(state.ruined())
            budget.spend(state.work)
            after = state.shortfall()
            if after > shortfall + min(temperature, OF_LEAST * least) * -math.log(own_rng.random() + TINY):
                state.undo()
                continue
            shortfall = after
            if shortfall < least - NO_SHORTFALL:
                least, best = shortfall, state.copy()
                budget.spend(SECONDS_PER_COPIED_DEVICE * len(devices))
        return [
            DeviceState(device.kind, device.id, list(pieces), [None if each is None else each.mode for each in own])
            for device, (pieces, own) in zip(devices, best, strict=True)
        ]


class _Choice(msgspec.Struct, frozen=True):
    """Hold a mode, and what it serves of each of its models, at the prices of their rates."""

    mode: Mode
    served: tuple[tuple[int, float], ...]


class _Table(msgspec.Struct, frozen=True):
    """Hold the choices of a slot. Column n of `models` and `values` is choice n, padded with a model that is never
    short; reduced, gains: of the same shape, and of one row, to compute in."""

    choices: list[_Choice]
    models: IntArray
    values: Array
    memory: Array
    reduced: Array
    gains: Array


class _Choices:
    """Hold the modes to choose from by slot. prices: of a request/s of each model."""

    def __init__(self, modes: Sequence[Mode], prices: Array) -> None:
        self.prices = prices
        self._known: dict[Mode, _Choice] = {}
        by_slot: dict[int, list[_Choice]] = {}
        for mode in modes:
            by_slot.setdefault(mode.slot, []).append(self.of(mode))
        self.tables = {s: _table(choices, len(prices)) for s, choices in by_slot.items()}

    def of(self, mode: Mode) -> _Choice:
        if mode not in self._known:
            served = zip(mode.models, mode.rates, strict=True)
            self._known[mode] = _Choice(mode, tuple((i, float(self.prices[i]) * rate) for i, rate in served))
        return self._known[mode]


def _table(choices: list[_Choice], models: int) -> _Table:
    shape = max(len(choice.served) for choice in choices), len(choices)
    table = _Table(
        choices,
        np.full(shape, models, dtype=np.int64),
        np.zeros(shape),
        np.array([float(choice.mode.memory) for choice in choices]),
        np.zeros(shape),
        np.zeros(len(choices)),
    )
    for n, choice in enumerate(choices):
        for row, (i, value) in enumerate(choice.served):
            table.models[row, n], table.values[row, n] = i, value
    return table


class _Annealed:
    """Hold the devices during annealing. work: seconds that the last step took.

    `_left`: value of each model's rate that is not served, below 0 where more is; `_short`: the same, at least 0, and a
    model that is never short behind; `_hosts`: for each model on how many partitions which devices serve it.
    """

    def __init__(
        self,
        choices: _Choices,
        devices: Sequence[DeviceState],
        patterns: Sequence[Sequence[tuple[int, ...]]],
        memory_limits: Sequence[int | None],
        filler: RoundFiller,
        rng: random.Random,
        demand: Array,
    ) -> None:
        self._choices, self._filler, self._rng = choices, filler, rng
        self._patterns = [patterns[device.kind] for device in devices]
        self._limits = [memory_limits[device.kind] for device in devices]
        self._pieces = [list(device.pieces) for device in devices]
        self._modes = [[None if mode is None else choices.of(mode) for mode in device.modes] for device in devices]
        self._left: list[float] = (choices.prices * demand).tolist()
        self._short = np.append(choices.prices * demand, 0.0)
        self._hosts: list[dict[int, int]] = [{} for _ in demand]
        for d, own in enumerate(self._modes):
            for choice in own:
                self._change(d, choice, -1)
        self.begin()

    def begin(self) -> None:
        """Begin a step, which `undo` takes back."""
        self.work = SECONDS_PER_STEP
        self._before: dict[int, tuple[list[int], list[_Choice | None]]] = {}
        self._left_before, self._short_before = list(self._left), self._short.copy()

    def undo(self) -> None:
        for d, (pieces, modes) in self._before.items():
            for choice in self._modes[d]:
                self._host(d, choice, -1)
            for choice in modes:
                self._host(d, choice, 1)
            self._pieces[d], self._modes[d] = pieces, modes
        self._left, self._short = self._left_before, self._short_before

    def shortfall(self) -> float:
        return float(self._short.sum())

    def copy(self) -> list[tuple[list[int], list[_Choice | None]]]:
        """Return pieces and choices of each device, which steps do not change."""
        return [(pieces, list(own)) for pieces, own in zip(self._pieces, self._modes, strict=True)]

    def ruined(self) -> list[tuple[int, int]]:
        """Empty some partitions and return them in the order in which to refill them."""
        rng = self._rng
        emptied: list[tuple[int, int]] = []
        if rng.random() < RECUT_PROBABILITY:
            many = 2 if rng.random() < TWO_PROBABILITY else 1
            for d in rng.sample(range(len(self._modes)), min(many, len(self._modes))):
                if not self._patterns[d]:
                    continue
                self._touch(d)
                for choice in self._modes[d]:
                    self._change(d, choice, 1)
                self._pieces[d] = list(rng.choice(self._patterns[d]))
                self._modes[d] = [None] * len(self._pieces[d])
                emptied += [(d, p) for p in range(len(self._pieces[d]))]
        else:
            related = rng.random() < RELATED_PROBABILITY
            models = [self._any_short()] if related else []
            for _ in range(MIN_EMPTIED + int(rng.expovariate(1 / MORE_EMPTIED))):
                at = self._partition(rng.choice(models) if models else None)
                if at is None or at in emptied:
                    continue
                d, p = at
                self._touch(d)
                choice = self._modes[d][p]
                self._change(d, choice, 1)
                self._modes[d][p] = None
                emptied.append((d, p))
                if related and choice is not None:
                    models += choice.mode.models
        rng.shuffle(emptied)
        return emptied

    def _any_short(self) -> int:
        """Return a model at random of those that are short."""
        return int(self._rng.choice(np.flatnonzero(self._short).tolist()))

    def _partition(self, i: int | None = None) -> tuple[int, int] | None:
        """Return a device and one of its partitions at random, of those that serve a model where there are any; None
        where the device has none."""
        rng = self._rng
        hosts = self._hosts[i] if i is not None else None
        if not hosts:
            d = int(rng.random() * len(self._modes))
            return (d, int(rng.random() * len(self._pieces[d]))) if self._pieces[d] else None
        d = rng.choice(list(hosts))
        own = [p for p, choice in enumerate(self._modes[d]) if choice is not None and i in choice.mode.models]
        return d, rng.choice(own)

    def refill(self, partitions: Sequence[tuple[int, int]]) -> None:
        """Place on each partition the mode that serves most of what is short."""
        rng = self._rng
        makes = rng.random() < MADE_PROBABILITY
        for d, p in partitions:
            s = self._pieces[d][p]
            table = self._choices.tables.get(s)
            if table is None:
                continue
            reduced, gains = table.reduced, table.gains
            self._short.take(table.models, out=reduced, mode="clip")
            np.minimum(reduced, table.values, out=reduced)
            np.add.reduce(reduced, axis=0, out=gains)
            self.work += SECONDS_PER_REFILL + SECONDS_PER_REFILL_AND_ENTRY * reduced.size
            memory_left = self._memory_left(d)
            if memory_left < math.inf:
                gains[table.memory > memory_left] = -1.0
            n = int(gains.argmax())
            chosen, gain = table.choices[n], float(gains[n])
            if makes and rng.random() < FILL_PROBABILITY:
                self.work += SECONDS_PER_MADE_MODE
                made = self._filler.fill(s, self._short[:-1] / self._choices.prices, memory_left)
                if made is not None:
                    other = self._choices.of(made)
                    own = sum(min(value, self._left[i]) for i, value in other.served if self._left[i] > 0)
                    chosen, gain = (other, own) if own > gain else (chosen, gain)
            if gain > TINY:
                self._modes[d][p] = chosen
                self._change(d, chosen, -1)

    def tune(self) -> None:
        """Make a mode anew for the models of some partition and one that is short: with batches as small as what others
        leave to it allows, it may have room."""
        i = self._any_short()
        at = self._partition()
        if at is None:
            return
        d, p = at
        old = self._modes[d][p]
        self._touch(d)
        self._change(d, old, 1)
        self._modes[d][p] = None
        self.work += SECONDS_PER_MADE_MODE
        models = () if old is None else old.mode.models
        first = [*models, *(() if i in models else (i,))]
        made = self._filler.fill(
            self._pieces[d][p], self._short[:-1] / self._choices.prices, self._memory_left(d), first, in_part=True
        )
        chosen = old if made is None else self._choices.of(made)
        self._modes[d][p] = chosen
        self._change(d, chosen, -1)

    def _touch(self, d: int) -> None:
        if d not in self._before:
            self._before[d] = self._pieces[d], self._modes[d]
            self._modes[d] = list(self._modes[d])

    def _change(self, d: int, choice: _Choice | None, sign: int) -> None:
        """Take a choice from a device (1) or place it there (-1)."""
        for i, value in choice.served if choice is not None else ():
            left = self._left[i] = self._left[i] + sign * value
            self._short[i] = max(left, 0.0)
        self._host(d, choice, -sign)

    def _host(self, d: int, choice: _Choice | None, sign: int) -> None:
        """Count a device among those that serve the models of a choice once more (1) or less (-1)."""
        for i, _ in choice.served if choice is not None else ():
            hosts = self._hosts[i]
            many = hosts.get(d, 0) + sign
            if many:
                hosts[d] = many
            else:
                del hosts[d]

    def _memory_left(self, d: int) -> float:
        """Return the bytes of a device that its workers leave to others; inf where memory cannot limit."""
        limit = self._limits[d]
        if limit is None:
            return math.inf
        return float(limit - sum(choice.mode.memory for choice in self._modes[d] if choice is not None))


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
