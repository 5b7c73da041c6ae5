"""For small fleets: devices emptied and filled again, over and over, as long as that leaves less unserved.

An integer program has hundreds of columns for a few partitions, and finding good answers takes it seconds. Here a state
is a whole plan. A step empties one or two devices, or some partitions of any, cuts them anew perhaps, and fills one
piece after the other with the mode that leaves least unserved, at the relaxation's prices; thousands of modes are
compared at once. That is ruin and recreate (Schrimpf et al., Journal of Computational Physics 159, 2000).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.modes import Mode

Array = NDArray[np.float64]

TARGET_RATIO = 1.002  # of the best multiple so far, the one that is tried for
EVEN_PRICE_FRACTION = 0.05  # of all prices, the part that is spread evenly: a model that is cheap must not be forgotten
SCATTERED_STEP_PROBABILITY = 0.5  # of steps, those that empty partitions anywhere; of which they leave alone
KEEP_PROBABILITY = 0.75


class DeviceState(msgspec.Struct):
    """A device while it is filled: slots of its pieces, and the mode on each; None where none is."""

    kind: int
    id: int | None
    pieces: list[int]
    modes: list[Mode | None]


class ModePool:
    """What may lie on each slot. carried[s][:, n]: what mode n of slot s carries, as parts of the rates."""

    def __init__(self, modes: Sequence[Mode], rates: Array) -> None:
        self.modes: dict[int, list[Mode]] = {}
        for mode in dict.fromkeys(modes):
            self.modes.setdefault(mode.slot, []).append(mode)
        self.carried = {}
        self.memory = {}
        for s, own in self.modes.items():
            # A row for each model: long rows are what numpy is quick at.
            carried = np.zeros((len(rates), len(own)))
            for n, mode in enumerate(own):
                carried[list(mode.models), n] = mode.rates
            self.carried[s] = carried / rates[:, None]
            self.memory[s] = np.array([float(mode.memory) for mode in own])
        self.number = {mode: n for own in self.modes.values() for n, mode in enumerate(own)}

    def for_more(self, times: Array) -> ModePool:
        """The same where so many times each rate is wanted."""
        other = copy(self)
        other.carried = {s: carried / times[:, None] for s, carried in self.carried.items()}
        return other


def ruin_and_recreate(
    boxes: Sequence[DeviceState],
    offer: ModePool,
    patterns: Sequence[Sequence[Sequence[int]]],
    memory_limits: Sequence[int | None],
    worth: Array,
    *,
    enough: float,
    steps: int,
) -> tuple[float, list[DeviceState], int]:
    """The largest multiple of the rates that was found, the devices, and the steps taken; stops where it is `enough`.

    boxes: the devices to begin with; those in no pieces are cut and filled. cuttings: for each kind, the pieces of each
    way to cut it. worth: the price of each model's rate. steps: how many are tried.
    """
    state = _State(
        boxes, offer, patterns, memory_limits, worth / (worth.sum() or 1.0) + EVEN_PRICE_FRACTION / len(worth)
    )
    rng = np.random.default_rng(0)
    empty = state.copy()
    best, kept = -1.0, empty
    # What is too much to try for leaves some models out: less may serve more.
    for state.target in (enough, enough / 2, enough / 4, enough / 8):
        state.restore(empty)
        for d, box in enumerate(state.boxes):
            if not box.pieces:
                state.begin(d)
        if state.scale() > best:
            best, kept = state.scale(), state.copy()
        if best > state.target / 2:
            break
    state.restore(kept)
    if any(box.pieces for box in boxes) and _mended(state, rng, enough, steps // 4):
        return state.scale(), state.boxes, steps // 4
    state.target = min(enough, best * TARGET_RATIO) or enough / 8
    missing = state.missing()
    taken = 0
    while taken < steps and best < enough * (1 - 1e-9):
        taken += 1
        if best <= 0 and taken % (1 + steps // 10) == 0:
            state.target /= 2
            missing = state.missing()
        before = state.copy()
        state.fill(_emptied(state, rng))
        now = state.missing()
        if now > missing + 1e-12:
            state.restore(before)
            continue
        missing = now
        if state.scale() > best:
            best, kept = state.scale(), state.copy()
            state.target = min(enough, best * TARGET_RATIO)
            missing = state.missing()
    state.restore(kept)
    return best, state.boxes, taken


def _mended(state: _State, rng: np.random.Generator, enough: float, tries: int) -> bool:
    """Whether changing a few partitions is enough; the fewest first. Where it is not, all is as before."""
    before = state.copy()
    state.target = enough
    for n in range(tries):
        places = [(d, p) for d, box in enumerate(state.boxes) for p in range(len(box.modes))]
        few = [places[k] for k in rng.permutation(len(places))[: 1 + 4 * n // tries].tolist()]
        for d, p in few:
            state.put(d, p, None)
        state.fill(few)
        if state.scale() >= enough * (1 - 1e-9):
            return True
        state.restore(before)
    return False


def _emptied(state: _State, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Empties some partitions, and answers which, in the order in which they are to be filled."""
    count = len(state.boxes)
    if rng.random() < SCATTERED_STEP_PROBABILITY:
        gone = [
            (d, p)
            for d, box in enumerate(state.boxes)
            for p in range(len(box.modes))
            if rng.random() >= KEEP_PROBABILITY
        ]
    else:
        gone = []
        for d in rng.permutation(count)[: int(rng.integers(1, 3))].tolist():
            box = state.boxes[d]
            ways = state.patterns[box.kind]
            for p in range(len(box.modes)):
                state.put(d, p, None)
            pieces = ways[int(rng.integers(len(ways)))]
            state.boxes[d] = DeviceState(box.kind, box.id, list(pieces), [None] * len(pieces))
            gone += [(d, p) for p in range(len(pieces))]
    for d, p in gone:
        state.put(d, p, None)
    return [gone[n] for n in rng.permutation(len(gone)).tolist()]


class _State:
    """target: the multiple of the rates that is worth something. carried: parts of the rates, over all devices."""

    def __init__(
        self,
        boxes: Sequence[DeviceState],
        offer: ModePool,
        patterns: Sequence[Sequence[Sequence[int]]],
        memory_limits: Sequence[int | None],
        worth: Array,
    ) -> None:
        self.offer, self.patterns, self.memory_limits, self.worth = offer, patterns, memory_limits, worth
        self.target = 1.0
        self._valued = {s: worth[:, None] * carried for s, carried in offer.carried.items()}
        # Modes are told apart by identity here: to hash one takes longer than all the rest of a step.
        own = offer.modes
        self._carries = {
            id(mode): carried for s in own for mode, carried in zip(own[s], offer.carried[s].T.copy(), strict=True)
        }
        self.boxes: list[DeviceState] = []
        self.carried = np.zeros(len(worth))
        for box in boxes:
            modes = [None if mode is None else own[mode.slot][offer.number[mode]] for mode in box.modes]
            self.boxes.append(DeviceState(box.kind, box.id, box.pieces, modes))
            for mode in modes:
                if mode is not None:
                    self.carried = self.carried + self._carries[id(mode)]

    def scale(self) -> float:
        return float(self.carried.min())

    def missing(self) -> float:
        return float(np.maximum(self.target - self.carried, 0.0) @ self.worth)

    def put(self, d: int, p: int, mode: Mode | None) -> None:
        box = self.boxes[d]
        old = box.modes[p]
        if old is mode:
            return
        if old is not None:
            self.carried = self.carried - self._carries[id(old)]
        if mode is not None:
            self.carried = self.carried + self._carries[id(mode)]
        # A box of its own: copies share those that did not change.
        self.boxes[d] = DeviceState(box.kind, box.id, box.pieces, [*box.modes[:p], mode, *box.modes[p + 1 :]])

    def fill(self, places: Sequence[tuple[int, int]]) -> None:
        """Put on each place what leaves least missing; nothing where nothing helps."""
        for d, p in places:
            box = self.boxes[d]
            s = box.pieces[p]
            if s not in self.offer.modes:
                continue
            wanted = (self.target - self.carried) * self.worth
            # Of what is wanted, what each mode gives; more than is wanted is worth nothing.
            given = np.minimum(self._valued[s], wanted[:, None]).sum(axis=0)
            room = self.memory_limits[box.kind]
            if room is not None:
                taken = sum(mode.memory for mode in box.modes if mode is not None)
                given[self.offer.memory[s] > room - taken] = -np.inf
            n = int(given.argmax())
            if wanted.sum() - given[n] < self.missing() - 1e-12:
                self.put(d, p, self.offer.modes[s][n])

    def begin(self, d: int) -> None:
        """Cut and fill an empty device in the way that leaves least missing."""
        kind, number = self.boxes[d].kind, self.boxes[d].id
        before, best = self.copy(), (math.inf, self.copy())
        for pieces in self.patterns[kind]:
            self.restore(before)
            self.boxes[d] = DeviceState(kind, number, list(pieces), [None] * len(pieces))
            self.fill([(d, p) for p in reversed(range(len(pieces)))])
            if self.missing() < best[0]:
                best = self.missing(), self.copy()
        self.restore(best[1])

    def copy(self) -> tuple[list[DeviceState], Array]:
        return list(self.boxes), self.carried

    def restore(self, copy: tuple[list[DeviceState], Array]) -> None:
        self.boxes = list(copy[0])
        self.carried = copy[1]
