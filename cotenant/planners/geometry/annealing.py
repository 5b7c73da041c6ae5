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
from functools import cached_property

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
    DeviceState,
    FleetState,
    ModePool,
)

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

STEPS_BETWEEN_CHECKS = 20  # of the budget
SECONDS_PER_STEP = 6e-6  # of work
SECONDS_PER_REFILL = 5e-6  # and for each partition that is refilled
SECONDS_PER_REFILL_AND_ENTRY = 1e-9  # and for each model of each mode of its slot
SECONDS_PER_MADE_MODE = 5e-5  # and for each mode that is made
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
        self._first_modes, self._modes, self._unit_prices = modes, list(dict.fromkeys([*modes, *more])), prices
        values = prices * demand
        self._prices = values / (values.sum() or 1.0) + EVEN_PRICE_FRACTION / len(values)
        self._demand, self._fleet, self._filler, self._first = demand, fleet, filler, patterns
        self._choices = _Choices(self._modes, self._prices / demand)
        self._patterns = pieces_by_kind(fleet)

    def for_demand(self, demand: Array) -> FleetAnnealer:
        """Return the annealer of these modes for another demand."""
        return FleetAnnealer(
            self._fleet, self._first_modes, self._modes, demand, self._unit_prices, self._first, self._filler
        )

    @cached_property
    def _pool(self) -> ModePool:
        """Return the modes to fill devices with: large tables, which improving them does not need."""
        return ModePool(self._first_modes, self._demand)

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
        shortfall = least = state.shortfall
        best, work, taken = state.copy(), budget.left(), 0
        temperature = TEMPERATURE
        while least > NO_SHORTFALL:
            if taken % STEPS_BETWEEN_CHECKS == 0:
                budget.spend(state.work)
                state.work = 0.0
                left = budget.left()
                if not left:
                    break
                temperature = TEMPERATURE * left / work
            taken += 1
            state.step()
            after = state.shortfall
            if after > shortfall + min(temperature, OF_LEAST * least) * -math.log(own_rng.random() + TINY):
                state.undo()
                continue
            state.keep()
            shortfall = after
            if shortfall < least - NO_SHORTFALL:
                least, best = shortfall, state.copy()
        budget.spend(state.work)
        return [
            DeviceState(device.kind, device.id, list(pieces), [None if each is None else each.mode for each in own])
            for device, pieces, own in zip(devices, *best, strict=True)
        ]


class _Choice(msgspec.Struct, frozen=True):
    """Hold a mode, and what it serves of each of its models, at the prices of their rates."""

    mode: Mode
    served: tuple[tuple[int, float], ...]


class _Table(msgspec.Struct, frozen=True):
    """Hold the choices of a slot. Column n of `models` and `values` is choice n, padded with a model that is never
    short; reduced, gains: of the same shape, and of one row, to compute in; work: seconds of a search."""

    choices: list[_Choice]
    models: IntArray
    values: Array
    memory: Array
    reduced: Array
    gains: Array
    work: float

    def best(self, short: Array, memory: float) -> tuple[_Choice, float]:
        """Return the choice within so many bytes that serves most of what is short, and how much; less than 0 where
        none has the memory."""
        reduced, gains = self.reduced, self.gains
        short.take(self.models, out=reduced, mode="clip")
        np.minimum(reduced, self.values, out=reduced)
        np.add.reduce(reduced, axis=0, out=gains)
        if memory < math.inf:
            gains[self.memory > memory] = -1.0
        n = int(gains.argmax())
        return self.choices[n], float(gains[n])


class _Choices:
    """Hold the modes to choose from by slot. prices: of a request/s of each model."""

    def __init__(self, modes: Sequence[Mode], prices: Array) -> None:
        self.prices: list[float] = prices.tolist()
        self._known: dict[Mode, _Choice] = {}
        by_slot: dict[int, list[_Choice]] = {}
        for mode in modes:
            by_slot.setdefault(mode.slot, []).append(self.of(mode))
        self.tables = {s: _table(choices, len(prices)) for s, choices in by_slot.items()}

    def of(self, mode: Mode) -> _Choice:
        if mode not in self._known:
            served = zip(mode.models, mode.rates, strict=True)
            self._known[mode] = _Choice(mode, tuple((i, self.prices[i] * rate) for i, rate in served))
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
        SECONDS_PER_REFILL + SECONDS_PER_REFILL_AND_ENTRY * shape[0] * shape[1],
    )
    for n, choice in enumerate(choices):
        for row, (i, value) in enumerate(choice.served):
            table.models[row, n], table.values[row, n] = i, value
    return table


class _Annealed:
    """Hold the devices during annealing. shortfall: the value that is not served; work: seconds taken by steps that
    have not been counted yet.

    `_left`: value of each model's rate that is not served, below 0 where more is; `_short`: the same, at least 0, and a
    model that is never short behind; `_hosts`: for each model the partitions that serve it, once a step is kept.
    `_before`, `_left_before`: pieces and choices of the devices, and what was left of the models, that the step has
    changed. A step changes a few of each: to copy all of them would take longer than the rest of it.
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
        self._choices, self._filler, self._random = choices, filler, rng.random
        self._patterns = [patterns[device.kind] for device in devices]
        self._limits = [memory_limits[device.kind] for device in devices]
        self._pieces = [list(device.pieces) for device in devices]
        self._modes = [[None if mode is None else choices.of(mode) for mode in device.modes] for device in devices]
        self._left: list[float] = [price * rate for price, rate in zip(choices.prices, demand.tolist(), strict=True)]
        self._short = np.array([*self._left, 0.0])
        self._hosts: list[list[tuple[int, int]]] = [[] for _ in demand]
        self._before: dict[int, tuple[list[int], list[_Choice | None]]] = {}
        self._left_before: dict[int, float] = {}
        self.work = self._shortfall_before = self.shortfall = 0.0
        for d, own in enumerate(self._modes):
            for choice in own:
                self._serve(choice)
            self._list(d)
        self.keep()

    def step(self) -> None:
        """Take a step, which `keep` or `undo` ends."""
        self.work += SECONDS_PER_STEP
        if self._random() < TUNE_PROBABILITY:
            self.tune()
        else:
            self.refill(self.ruined())

    def keep(self) -> None:
        for d, (pieces, modes) in self._before.items():
            # Most refills give back what was there.
            if modes != self._modes[d] or pieces != self._pieces[d]:
                self._unlist(d, modes)
                self._list(d)
        self._before.clear()
        self._left_before.clear()
        # Summed anew each time, lest rounding adds up.
        self.shortfall = self._shortfall_before = float(np.add.reduce(self._short))

    def undo(self) -> None:
        for d, (pieces, modes) in self._before.items():
            self._pieces[d], self._modes[d] = pieces, modes
        for i, left in self._left_before.items():
            self._left[i] = left
            self._short[i] = max(left, 0.0)
        self._before.clear()
        self._left_before.clear()
        self.shortfall = self._shortfall_before

    def copy(self) -> tuple[list[list[int]], list[list[_Choice | None]]]:
        """Return pieces and choices of each device, which steps replace and do not change."""
        return list(self._pieces), list(self._modes)

    def ruined(self) -> list[tuple[int, int]]:
        """Empty some partitions and return them in the order in which to refill them."""
        rng = self._random
        emptied = self._uncut() if rng() < RECUT_PROBABILITY else self._emptied()
        emptied.sort(key=lambda _: rng())
        return emptied

    def _uncut(self) -> list[tuple[int, int]]:
        """Empty whole devices, one or two, and cut them anew."""
        rng, count = self._random, len(self._modes)
        emptied: list[tuple[int, int]] = []
        chosen = {int(rng() * count) for _ in range(2 if rng() < TWO_PROBABILITY else 1)} if count else ()
        for d in chosen:
            patterns = self._patterns[d]
            if not patterns:
                continue
            self._touch(d)
            for choice in self._modes[d]:
                self._release(choice)
            self._pieces[d] = list(patterns[int(rng() * len(patterns))])
            self._modes[d] = [None] * len(self._pieces[d])
            emptied += [(d, p) for p in range(len(self._pieces[d]))]
        return emptied

    def _emptied(self) -> list[tuple[int, int]]:
        """Empty a few partitions, most often such that have models in common."""
        rng = self._random
        emptied: list[tuple[int, int]] = []
        related = rng() < RELATED_PROBABILITY
        models = [self._any_short()] if related else []
        for _ in range(MIN_EMPTIED + int(-math.log(1.0 - rng()) * MORE_EMPTIED)):
            at = self._partition(emptied, models[int(rng() * len(models))] if models else None)
            if at is None or at in emptied:
                continue
            emptied.append(at)
            choice = self._empty(*at)
            if related and choice is not None:
                models += choice.mode.models
        return emptied

    def _any_short(self) -> int:
        """Return a model at random of those that are short."""
        short = self._short.nonzero()[0]
        return int(short[int(self._random() * len(short))])

    def _partition(self, emptied: Sequence[tuple[int, int]] = (), i: int | None = None) -> tuple[int, int] | None:
        """Return a device and one of its partitions at random, of those not emptied yet that serve a model where there
        are any; None where the device has none."""
        rng = self._random
        hosts = [] if i is None else [at for at in self._hosts[i] if at not in emptied]
        if hosts:
            return hosts[int(rng() * len(hosts))]
        d = int(rng() * len(self._modes))
        return (d, int(rng() * len(self._pieces[d]))) if self._pieces[d] else None

    def refill(self, partitions: Sequence[tuple[int, int]]) -> None:
        """Place on each partition the mode that serves most of what is short."""
        rng = self._random
        makes = rng() < MADE_PROBABILITY
        for d, p in partitions:
            s = self._pieces[d][p]
            table = self._choices.tables.get(s)
            if table is None:
                continue
            self.work += table.work
            memory = self._memory_left(d)
            chosen, gain = table.best(self._short, memory)
            if makes and rng() < FILL_PROBABILITY:
                made = self._made(s, memory)
                if made is not None:
                    own = sum(min(value, self._left[i]) for i, value in made.served if self._left[i] > 0)
                    chosen, gain = (made, own) if own > gain else (chosen, gain)
            if gain > TINY:
                self._modes[d][p] = chosen
                self._serve(chosen)

    def tune(self) -> None:
        """Make a mode anew for the models of some partition and one that is short: with batches as small as what others
        leave to it allows, it may have room."""
        i = self._any_short()
        at = self._partition()
        if at is None:
            return
        d, p = at
        old = self._empty(d, p)
        models = () if old is None else old.mode.models
        first = [*models, *(() if i in models else (i,))]
        made = self._made(self._pieces[d][p], self._memory_left(d), first)
        self._modes[d][p] = chosen = old if made is None else made
        self._serve(chosen)

    def _made(self, s: int, memory: float, first: Sequence[int] = ()) -> _Choice | None:
        """Make a mode for what is short; of the models given first in part, too."""
        self.work += SECONDS_PER_MADE_MODE
        short, prices = self._short, self._choices.prices
        models = short.nonzero()[0]
        demand = {i: value / prices[i] for i, value in zip(models.tolist(), short[models].tolist(), strict=True)}
        made = self._filler.fill(s, demand, memory, first, in_part=bool(first))
        return None if made is None else self._choices.of(made)

    def _empty(self, d: int, p: int) -> _Choice | None:
        """Take from a partition what it runs, and return that."""
        self._touch(d)
        choice = self._modes[d][p]
        self._modes[d][p] = None
        self._release(choice)
        return choice

    def _touch(self, d: int) -> None:
        if d not in self._before:
            self._before[d] = self._pieces[d], self._modes[d]
            self._modes[d] = list(self._modes[d])

    def _release(self, choice: _Choice | None) -> None:
        """Count what a choice serves as not served."""
        if choice is None:
            return
        left = self._left
        for i, value in choice.served:
            old = left[i]
            self._left_before.setdefault(i, old)
            new = left[i] = old + value
            if new > 0.0:
                self._short[i] = new
                self.shortfall += min(new, value)

    def _serve(self, choice: _Choice | None) -> None:
        """Count what a choice serves as served."""
        if choice is None:
            return
        left = self._left
        for i, value in choice.served:
            old = left[i]
            self._left_before.setdefault(i, old)
            new = left[i] = old - value
            if old > 0.0:
                self._short[i] = max(new, 0.0)
                self.shortfall -= min(old, value)

    def _list(self, d: int) -> None:
        """Note that the partitions of a device serve the models of their choices."""
        for p, choice in enumerate(self._modes[d]):
            if choice is not None:
                for i in choice.mode.models:
                    self._hosts[i].append((d, p))

    def _unlist(self, d: int, modes: Sequence[_Choice | None]) -> None:
        """Take back what was noted of a device when it had these choices."""
        for p, choice in enumerate(modes):
            if choice is not None:
                for i in choice.mode.models:
                    self._hosts[i].remove((d, p))

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
