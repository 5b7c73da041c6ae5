"""What a partition can be worth at most, at prices for what it carries: the proof that no mode was forgotten.

Branch and bound. The length D of a round is cut into short intervals; in each, a model with batch b takes L(b) of at
most the upper end, and carries no more than b over the lower end, so that rounds become knapsacks. Models are added one
after the other to all rounds at once, and what cannot be worth more than is known already is dropped: the rest of a
round is worth no more than a fractional knapsack of what may still come. Memory is left out, so the bound holds for
modes that do not fit, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.modes import Mode, ModeCatalog

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]

ROUND_LENGTH_STEP = 0.02  # from one length of a round to the next
BEAM_WIDTH = 10_000  # rounds that are carried on; of more, those that may be worth least are only bounded
MAX_PRICED_MODES = 20  # modes that are answered, each of another set of models
TINY = 1e-300


class StepValue(msgspec.Struct, frozen=True):
    """Worth `value` for each whole multiple of 1 / times that a part of model `model` reaches, rounded up."""

    model: int
    times: float
    value: float


class DualPrices(msgspec.Struct, frozen=True):
    """What carrying something of a model is worth. asked: requests/s of each, more of which counts for nothing;
    whole: what all of that is worth, and parts in proportion; steps: what is worth something besides."""

    asked: Array
    whole: Array
    steps: Sequence[StepValue] = ()

    def all(self) -> float:
        """Worth of all that is asked."""
        return float(self.whole.sum()) + sum(step.value * math.ceil(step.times) for step in self.steps)

    def of(self, i: int, rates: Array) -> Array:
        part = np.minimum(rates / self.asked[i], 1.0)
        worth: Array = self.whole[i] * part
        for step in self.steps:
            if step.model == i:
                worth = worth + step.value * np.ceil(step.times * part)
        return worth


class _Rounds(msgspec.Struct):
    """Lengths of rounds on one slot, n of them. longest[n]: the end of the interval, in seconds.

    took[v, b - 1]: seconds of a batch; gain[n, v, b - 1]: what it is worth at most, where useful[n, v, b - 1]: it fits,
    and one row less may be worth less. order: models, as they are added; most[n, i], pay[n, i]: what each can add, and
    per second.
    """

    longest: Array
    took: Array
    gain: Array
    useful: NDArray[np.bool_]
    order: list[int]
    most: Array
    pay: Array


class _States(msgspec.Struct):
    """Rounds that are being filled. round: which; left: seconds; worth: so far; batches[·, v]: of each variant."""

    round: Numbers
    left: Array
    worth: Array
    batches: Numbers

    def pick(self, which: Numbers) -> _States:
        return _States(self.round[which], self.left[which], self.worth[which], self.batches[which])


def price_modes(
    catalog: ModeCatalog, s: int, worth: DualPrices, known: float
) -> tuple[float, list[tuple[float, Mode]]]:
    """A worth that no mode of slot s exceeds, and the best modes that are worth more than is known, with theirs.

    known: what a partition is known to be worth, and the least that is answered.
    """
    rounds = _rounds(catalog, s, worth)
    if rounds is None:
        return known, []
    count = len(rounds.longest)
    none = np.zeros((count, len(catalog.owner)), dtype=np.int64)
    states = _States(np.arange(count), rounds.longest.copy(), np.zeros(count), none)
    bound = known
    for level, i in enumerate(rounds.order):
        states = _with(rounds, states, np.flatnonzero(catalog.owner == i))
        most = states.worth + _rest(rounds, rounds.order[level + 1 :], states)
        able = np.flatnonzero(most > known)
        if len(able) > BEAM_WIDTH:
            able = able[np.argsort(-most[able])]
            bound = max(bound, float(most[able[BEAM_WIDTH]]))
            able = able[:BEAM_WIDTH]
        states = states.pick(able)
    found = _found(catalog, s, states.batches, worth, known)
    return max([bound, *(value for value, _ in found)]), [each for each in found if _housed(catalog, each[1])]


def _latest(catalog: ModeCatalog) -> Array:
    """The target of each variant; planners may add up the same round in another order."""
    latest: Array = catalog.slo[catalog.owner] * (1 + ROUNDING_TOLERANCE)
    return latest


def _rounds(catalog: ModeCatalog, s: int, worth: DualPrices) -> _Rounds | None:
    latest = _latest(catalog)
    # A round is no shorter than any of its batches.
    depth = int((2 * catalog.latency[s] <= latest[:, None]).sum(axis=1).max())
    took = catalog.latency[s, :, :depth]
    if not depth:
        return None
    quickest, longest = float(took[:, 0].min()), float((latest - took[:, 0]).max())
    shortest = quickest * np.power(
        1 + ROUND_LENGTH_STEP, np.arange(int(math.log(longest / quickest) / math.log1p(ROUND_LENGTH_STEP)) + 1)
    )
    ends = np.multiply(shortest, 1 + ROUND_LENGTH_STEP)
    fits = took <= np.minimum(latest - shortest[:, None], ends[:, None])[:, :, None]
    rows = np.arange(1, took.shape[1] + 1)
    gain, smaller = np.zeros(fits.shape), np.zeros(fits.shape)
    for v, i in enumerate(catalog.owner.tolist()):
        gain[:, v] = worth.of(i, catalog.procs[v] * rows / shortest[:, None])
        # At least: what one row less is worth in the shortest round need not be so in the one that it is in.
        smaller[:, v] = worth.of(i, catalog.procs[v] * (rows - 1) / ends[:, None])
    gain[~fits] = 0.0
    useful = gain > smaller
    pay = np.where(useful, gain / took, 0.0).max(axis=2)
    own = [catalog.owner == i for i in range(len(catalog.names))]
    best = np.stack([pay[:, mine].max(axis=1) for mine in own], axis=1)
    most = np.stack([gain[:, mine].max(axis=(1, 2)) for mine in own], axis=1)
    return _Rounds(ends, took, gain, useful, np.argsort(-best.mean(axis=0), kind="stable").tolist(), most, best)


def _with(rounds: _Rounds, states: _States, variants: Numbers) -> _States:
    """The states without one more model, and with each of its batches."""
    made = [states]
    for v in variants.tolist():
        origin, b = np.nonzero(rounds.useful[states.round, v] & (rounds.took[v] <= states.left[:, None]))
        grown = states.pick(origin)
        grown.left -= rounds.took[v, b]
        grown.worth += rounds.gain[grown.round, v, b]
        grown.batches[:, v] = b + 1
        made.append(grown)
    return _States(
        np.concatenate([each.round for each in made]),
        np.concatenate([each.left for each in made]),
        np.concatenate([each.worth for each in made]),
        np.concatenate([each.batches for each in made]),
    )


def _rest(rounds: _Rounds, later: Sequence[int], states: _States) -> Array:
    """What these models can add at most: those that pay best first, the last one in part."""
    total = np.zeros(len(states.round))
    order = np.argsort(-rounds.pay[:, later], axis=1)
    most, pay = (np.take_along_axis(each[:, later], order, axis=1) for each in (rounds.most, rounds.pay))
    seconds = most / np.maximum(pay, TINY)
    left = states.left.copy()
    for n in range(len(later)):
        took = seconds[states.round, n]
        total += most[states.round, n] * np.clip(left / np.maximum(took, TINY), 0.0, 1.0)
        left -= took
    return total


def _found(catalog: ModeCatalog, s: int, batches: Numbers, worth: DualPrices, known: float) -> list[tuple[float, Mode]]:
    """The best modes with these batches that hold their targets and are really worth more than is known."""
    there = batches > 0
    took = np.where(there, catalog.latency[s, np.arange(len(catalog.owner)), np.maximum(batches - 1, 0)], 0.0)
    length = took.sum(axis=1)
    rates = catalog.procs * batches / np.maximum(length, TINY)[:, None]
    value = np.zeros(len(batches))
    for v, i in enumerate(catalog.owner.tolist()):
        value += worth.of(i, rates[:, v])
    holds = (~there | (length[:, None] + took <= _latest(catalog))).all(axis=1) & (value > known)
    found = []
    for n in _varied(there, np.where(holds, value, -math.inf)):
        own = np.flatnonzero(there[n])
        own = own[np.argsort(catalog.owner[own])]
        mode = Mode(
            s,
            tuple(catalog.owner[own].tolist()),
            tuple(rates[n, own].tolist()),
            tuple(batches[n, own].tolist()),
            tuple(catalog.procs[own].tolist()),
            int(catalog.memory[catalog.slots[s].kind, own, batches[n, own] - 1].sum()),
        )
        found.append((float(value[n]), mode))
    return found


def _varied(there: NDArray[np.bool_], value: Array) -> list[int]:
    """The best of each set of models, and of those the best `MAX_PRICED_MODES`; none without a value."""
    order = np.argsort(-value, kind="stable")
    order = order[np.isfinite(value[order])]
    _, first = np.unique(there[order], axis=0, return_index=True)
    return [int(n) for n in order[np.sort(first)][:MAX_PRICED_MODES]]


def _housed(catalog: ModeCatalog, mode: Mode) -> bool:
    return mode.memory <= catalog.slots[mode.slot].memory
