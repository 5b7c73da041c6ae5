"""Change a plan device by device: the decision process of `inss-plus`.

A state is what each device sustains of each model, and the rates; a move gives one device another option
(device_options.py), or opens one that is not in use. Masks leave the moves that serve most at once, some for each
device. A policy sees a move by `FEATURES`, which name neither models nor devices: they count requests as parts of all,
and work in devices (requests/s over what a device sustains of the model alone). So it decides for any models on any
fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.inss.device_options import Floats, Ints, Options

DEVICES, EACH = 8, 6  # devices of which moves are offered, and moves of each
CHOICES = DEVICES * EACH
MOST_MOVES = 10  # of an episode
# Moves of two devices at once: devices of which pairs are tried, pairs tried at most, options of the first of a pair,
# and the part of what is unserved that such a move must serve.
PAIRED, PAIRS, SHORTLIST, GAINED = 4, 4, 5, 1e-4
# Rewards: a step of the logarithm of what is unserved, so that the last percent counts like the first half; less for
# opening a device, and for starting the workers of one.
SMALL, OPENING, STARTING = 3e-3, 0.3, 0.03
SERVED = 1e-9  # of all requests/s, unserved at most where all are served

Singles = NDArray[np.float32]
FEATURES = (
    "unserved_before", "unserved_after", "largest_unserved_after", "models_short_after", "work_short_before",
    "work_short_after", "work_idle_after", "work_needed_least", "work_needed_second", "work_of_device_before",
    "work_of_device_after", "opens_device", "workers", "load", "devices_over_models", "rank",
)  # fmt: skip


class Moves(msgspec.Struct, frozen=True, eq=False):
    """Hold the moves that are offered in a state, those that serve most at once first. device, option: indices."""

    device: Ints
    option: Ints


class DeviceStates:
    """Hold what each device sustains, and make moves."""

    def __init__(self, options: Options, rates: Floats, kinds: Sequence[int], capacities: Floats) -> None:
        """kinds: by device, the index of its kind. capacities: requests/s, by device and model; zeros for a device that
        is not in use."""
        self.options, self.rates = options, rates
        self.kinds = np.array(kinds, dtype=np.int64)
        self.capacities = capacities.copy()
        self.chosen = [-1] * len(kinds)  # the option of each device; -1: as it was
        self.started = np.zeros(len(kinds), dtype=bool)
        self._asked = max(float(rates.sum()), 1e-12)
        self._of_work = np.where(options.sizes > 0, 1 / np.maximum(options.sizes, 1e-12), 0.0)
        self._tried: set[tuple[int, ...]] = {tuple(self.chosen)}

    @property
    def unserved(self) -> float:
        """Return the part of all requests/s that the devices do not sustain."""
        return float(np.maximum(0.0, self.rates - self.capacities.sum(axis=0)).sum()) / self._asked

    @property
    def served(self) -> bool:
        return self.unserved <= SERVED

    def copy(self) -> DeviceStates:
        """Return the same state, in which nothing was tried."""
        made = DeviceStates(self.options, self.rates, self.kinds.tolist(), self.capacities)
        made.chosen, made.started = list(self.chosen), self.started.copy()
        return made

    def moves(self, *, idle: bool = False) -> Moves:
        """Return the moves that serve most at once. idle: of devices that are not in use alone."""
        total = self.capacities.sum(axis=0)
        offered = [device for device in self._offered(total) if not (idle and self.capacities[device].any())]
        devices, picked, lacking = [], [], []
        for kind in sorted(set(self.kinds[offered].tolist())):
            own = [device for device in offered if self.kinds[device] == kind]
            first, capacities = self.options.of_kind(kind)
            count = min(EACH, capacities.shape[1])
            if not count:
                continue
            needed = np.maximum(0.0, self.rates - total + self.capacities[own]).astype(np.float32)
            unserved = needed.sum(axis=1)[:, None] - served_of(needed.T, capacities)
            best = np.argpartition(unserved, count - 1, axis=1)[:, :count]
            for row, device in enumerate(own):
                for option in best[row].tolist():
                    if self._new(device, first + option):
                        devices.append(device)
                        picked.append(first + option)
                        lacking.append(float(unserved[row, option]))
        order = np.argsort(lacking, kind="stable")
        return Moves(np.array(devices, dtype=np.int64)[order], np.array(picked, dtype=np.int64)[order])

    def features(self, moves: Moves) -> Floats:
        """Return the features of moves, a row for each."""
        device, option, total = moves.device, moves.option, self.capacities.sum(axis=0)
        count, devices = len(device), len(self.kinds)
        rows = np.arange(count)
        capacities = np.repeat(self.capacities[None], count, axis=0)
        capacities[rows, device] = self.options.capacities[option]
        after = capacities.sum(axis=1)
        lacking, idle = np.maximum(0.0, self.rates - after), np.maximum(0.0, after - self.rates)
        before = np.maximum(0.0, self.rates - total)
        needed = self._needed(after, capacities)
        of_device = needed[rows, device].copy()
        needed[rows, device] = np.inf
        least = np.sort(needed, axis=1)[:, :2] if devices > 1 else np.full((count, 2), np.inf)
        if devices == 2:
            least = np.repeat(least[:, :1], 2, axis=1)
        short = lacking @ self._of_work
        asked = np.maximum(self.rates, 1e-12)
        now = self._needed(total[None], self.capacities[None])[0]
        work = float(self.rates @ self._of_work)
        columns = (
            np.full(count, _magnified(before.sum() / self._asked)),
            _magnified(lacking.sum(axis=1) / self._asked),
            _magnified((lacking / asked).max(axis=1, initial=0.0)),
            (lacking > SERVED * asked).mean(axis=1),
            np.full(count, _magnified(float(before @ self._of_work))),
            _magnified(short),
            idle @ self._of_work / devices,
            np.minimum(least[:, 0] + short, 2.0),
            np.minimum(least[:, 1] + short, 2.0),
            now[device],
            of_device,
            np.asarray(self.capacities.sum(axis=1) == 0)[device],
            self.options.workers[option] / 10,
            np.full(count, work / devices),
            np.full(count, devices / len(self.rates)),
            rows / CHOICES,
        )
        return np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)

    def make(self, device: int, option: int) -> float:
        """Give a device an option; return the reward."""
        before = self._potential()
        opened = not self.capacities[device].any()
        self.capacities[device] = self.options.capacities[option]
        self.chosen[device] = option
        self._tried.add(tuple(self.chosen))
        reward = self._potential() - before - OPENING * opened
        if not self.started[device]:
            self.started[device] = True
            reward -= STARTING
        return reward

    def in_use(self, most: int) -> list[int]:
        """Return at most so many of the devices in use, those that are needed least."""
        needed = self._needed(self.capacities.sum(axis=0)[None], self.capacities[None])[0]
        needed[self.capacities.sum(axis=1) == 0] = np.inf
        order = np.argsort(needed, kind="stable")
        return sorted(order[np.isfinite(needed[order])][:most].tolist())

    def best_pair(self, first: int, second: int, beat: float = math.inf) -> tuple[float, tuple[int, int]]:
        """Return the part of all requests/s that is unserved at least once two devices have other options, and these;
        1 and no options where none can leave less than `beat`.

        Of the first device only the options that serve most are looked at, of the second all that may leave less than
        `beat` beside one of them: together two options serve at most the sum of what each serves alone.
        """
        none = 1.0, (-1, -1)
        others = self.capacities.sum(axis=0) - self.capacities[first] - self.capacities[second]
        needed = np.maximum(0.0, self.rates - others).astype(np.float32)
        start, capacities = self.options.of_kind(int(self.kinds[first]))
        second_start, of_second = self.options.of_kind(int(self.kinds[second]))
        if not capacities.size or not of_second.size:
            return none
        ones = np.ones(len(needed), dtype=np.float32)
        served = ones @ np.minimum(needed[:, None], capacities)
        count = min(SHORTLIST, len(served))
        chosen = np.argpartition(-served, count - 1)[:count]
        of_other = served if of_second is capacities else ones @ np.minimum(needed[:, None], of_second)
        least = needed.sum() - min(beat * self._asked, needed.sum()) - served[chosen].max()
        able = np.flatnonzero(of_other > least)
        if not len(able):
            return none
        left = np.maximum(0.0, needed[:, None] - capacities[:, chosen])
        unserved = left.sum(axis=0)[:, None] - served_of(left, of_second[:, able])
        row, column = divmod(int(unserved.argmin()), unserved.shape[1])
        return float(unserved[row, column]) / self._asked, (start + int(chosen[row]), second_start + int(able[column]))

    def _potential(self) -> float:
        return -math.log(self.unserved + SMALL)

    def _new(self, device: int, option: int) -> bool:
        """Tell whether a move leads to a state that was not seen."""
        return (*self.chosen[:device], option, *self.chosen[device + 1 :]) not in self._tried

    def _offered(self, total: Floats) -> list[int]:
        """Return the devices of which moves are offered: those that are needed least, one of each kind among those not
        in use."""
        needed = self._needed(total[None], self.capacities[None])[0]
        empty = np.asarray(self.capacities.sum(axis=1) == 0)
        seen: set[int] = set()
        devices = []
        for device in np.argsort(needed, kind="stable").tolist():  # those not in use are needed for nothing
            kind = int(self.kinds[device])
            if empty[device] and kind in seen:
                continue
            if empty[device]:
                seen.add(kind)
            devices.append(device)
        return devices[:DEVICES]

    def _needed(self, total: Floats, capacities: Floats) -> Floats:
        """Return the work that only each device serves, in devices. total: by move and model; capacities: by move,
        device and model."""
        others = total[:, None] - capacities
        return np.asarray(np.minimum(capacities, np.maximum(0.0, self.rates - others)) @ self._of_work)


def moved_by_gain(states: DeviceStates, most: int, *, idle: bool = False) -> DeviceStates:
    """Return the state with least unserved on the way of moves that serve most at once. idle: of devices that are not
    in use alone."""
    best, states = states, states.copy()
    for _ in range(most):
        if states.served:
            break
        moves = states.moves(idle=idle)
        if not len(moves.device):
            break
        states.make(int(moves.device[0]), int(moves.option[0]))
        best = min(best, states.copy(), key=lambda each: each.unserved)
    return best


def moved_by_pairs(states: DeviceStates, sweeps: int) -> DeviceStates:
    """Return the state after moves of two devices at once, each the one of its pair that leaves least unserved.

    Where a device alone has no better option, two often have. Tried are pairs of the devices in use that are needed
    least, until none of them serves more, or `PAIRS` were tried.
    """
    states = states.copy()
    left = states.unserved
    fruitless: set[tuple[int, int]] = set()  # pairs that were tried since the last move
    tries = 0
    for _ in range(sweeps):
        for pair in combinations(states.in_use(PAIRED), 2):
            if left <= SERVED or tries == PAIRS:
                return states
            if pair in fruitless:
                continue
            tries += 1
            unserved, options = states.best_pair(*pair, left * (1 - GAINED))
            if unserved < left * (1 - GAINED):
                for device, option in zip(pair, options, strict=True):
                    states.make(device, option)
                left = states.unserved
                fruitless.clear()
            fruitless.add(pair)
    return states


def served_of(needed: Singles, capacities: Singles) -> Singles:
    """Return the requests/s that options serve of some needs, by need and option. needed, capacities: by model, and
    need or option."""
    served = np.minimum(needed[:, :, None], capacities[:, None]).reshape(len(needed), -1)
    # A product with ones adds up faster than a sum over the first dimension.
    return (np.ones(len(needed), dtype=np.float32) @ served).reshape(needed.shape[1], -1)


def _magnified(part: Floats | float) -> Floats:
    """Return small parts on a logarithmic scale, from 0 at none to 1 at all."""
    return np.asarray(np.log1p(np.asarray(part) / SMALL) / math.log1p(1 / SMALL))
