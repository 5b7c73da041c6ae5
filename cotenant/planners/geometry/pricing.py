"""Solve the pricing problem of column generation: bound the value of any mode of a slot, and find the most valuable
ones.

Branch and bound. The length D of a round is divided into short intervals. Within one, a model with batch b takes L(b)
of at most the interval's upper end and serves at most b over its lower end, so each round becomes a knapsack. Models
are added one after the other to all rounds at once, and a state is pruned once it cannot exceed the threshold: the rest
of a round is worth at most a fractional knapsack of the models still to come. Memory is ignored, so the bound also
holds for modes that do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.modes import Mode, ModeCatalog

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

ROUND_LENGTH_STEP = 0.02  # relative width of an interval of round lengths
MIN_BEAM_WIDTH, MAX_BEAM_WIDTH = 100, 10_000  # states kept at each level; the least promising beyond only bound
SECONDS_PER_CALL = 6e-4  # of work, for one slot
SECONDS_PER_OPTION = 1e-6  # and for each option of a model on it
SECONDS_PER_CELL = 1.2e-8  # and for each state and option that it might take, and each model of a new state
STATES_PER_STATE = 10.0  # new ones at a level for each that was kept, about, to choose the width of the beam
MAX_PRICED_MODES = 20  # modes returned, each of a different set of models
TINY = 1e-300


class StepValue(msgspec.Struct, frozen=True):
    """Price a cut (dual): a mode that serves a fraction f of model `model` earns `value` · ⌈multiplier · f⌉."""

    model: int
    multiplier: float
    value: float


class DualPrices(msgspec.Struct, frozen=True):
    """Hold the dual prices of the demand for each model.

    demand: requests/s, beyond which serving earns nothing; full: value of serving all of it, proportional below;
    steps: dual prices of cuts.
    """

    demand: Array
    full: Array
    steps: Sequence[StepValue] = ()

    def total(self) -> float:
        """Return the value of serving the whole demand."""
        return float(self.full.sum()) + sum(step.value * math.ceil(step.multiplier) for step in self.steps)

    def value(self, i: int, rates: Array) -> Array:
        """Return the value of serving model i at each of some rates (requests/s)."""
        fraction = np.minimum(rates / self.demand[i], 1.0)
        value: Array = self.full[i] * fraction
        for step in self.steps:
            if step.model == i:
                value = value + step.value * np.ceil(step.multiplier * fraction)
        return value


class _Rounds(msgspec.Struct):
    """Hold the n intervals of round lengths on one slot.

    length[n]: upper end in seconds. latency[i, b]: seconds of option b of model i (`BatchOptions`). value[n, i, b]: an
    upper bound on what it earns. useful[n, i, b]: the option fits, and may earn more than the one before. order: models
    in the order in which they are added. most[n, i], most_per_s[n, i]: upper bounds on what model i can add, in all and
    for each second of the round.
    """

    length: Array
    latency: Array
    value: Array
    useful: NDArray[np.bool_]
    order: list[int]
    most: Array
    most_per_s: Array


class _States(msgspec.Struct):
    """Hold partly filled rounds.

    round: index of the interval; left: seconds; value: so far; chosen[·, i]: 1 + the option of each model; 0: none.
    """

    round: IntArray
    left: Array
    value: Array
    chosen: IntArray

    def select(self, indices: IntArray) -> _States:
        return _States(self.round[indices], self.left[indices], self.value[indices], self.chosen[indices])


def price_modes(
    catalog: ModeCatalog, s: int, prices: DualPrices, threshold: float, budget: WorkBudget | None = None
) -> tuple[float, list[tuple[float, Mode]]]:
    """Bound the value of any mode of slot s from above, and return the best modes with their values.

    Values up to `threshold` are not told apart: the bound is at least the threshold, and modes exceed it. budget: what
    this may take about; with less, fewer states are kept and the bound is looser.
    """
    work = SECONDS_PER_CALL + SECONDS_PER_OPTION * catalog.options.latency[s].size
    rounds = _rounds(catalog, s, prices)
    if rounds is None:
        return threshold, []
    models, depth = rounds.latency.shape
    cells = depth + STATES_PER_STATE * models  # of a state at one level
    affordable = MAX_BEAM_WIDTH if budget is None else budget.left() / (SECONDS_PER_CELL * cells * models)
    beam_width = int(np.clip(affordable, MIN_BEAM_WIDTH, MAX_BEAM_WIDTH))
    count = len(rounds.length)
    empty = np.zeros((count, len(catalog.names)), dtype=np.int64)
    states = _States(np.arange(count), rounds.length.copy(), np.zeros(count), empty)
    bound = threshold
    for level, i in enumerate(rounds.order):
        before = len(states.round)
        states = _branch(rounds, states, i)
        work += SECONDS_PER_CELL * (before * depth + len(states.round) * models)
        most = states.value + _fractional_knapsack(rounds, rounds.order[level + 1 :], states)
        open_states = np.flatnonzero(most > threshold)
        if len(open_states) > beam_width:
            open_states = open_states[np.argsort(-most[open_states])]
            bound = max(bound, float(most[open_states[beam_width]]))
            open_states = open_states[:beam_width]
        states = states.select(open_states)
    if budget is not None:
        budget.spend(work)
    modes = _modes(catalog, s, states.chosen, prices, threshold)
    return max([bound, *(value for value, _ in modes)]), [each for each in modes if _fits_memory(catalog, each[1])]


def _latest(catalog: ModeCatalog) -> Array:
    """Return the latency target of each model, with slack for planners that sum the same round in another order."""
    latest: Array = catalog.slo * (1 + ROUNDING_TOLERANCE)
    return latest


def _rounds(catalog: ModeCatalog, s: int, prices: DualPrices) -> _Rounds | None:
    latest, options = _latest(catalog), catalog.options
    # A round is no shorter than any of its batches.
    depth = int((2 * options.latency[s] <= latest[:, None]).sum(axis=1).max())
    latency, rows, rows_below = (each[s, :, :depth] for each in (options.latency, options.rows, options.rows_below))
    if not depth:
        return None
    shortest, longest = float(latency[:, 0].min()), float((latest - latency[:, 0]).max())
    count = int(math.log(longest / shortest) / math.log1p(ROUND_LENGTH_STEP)) + 1
    lower = shortest * np.power(1 + ROUND_LENGTH_STEP, np.arange(count))
    upper = np.multiply(lower, 1 + ROUND_LENGTH_STEP)
    fits = latency <= np.minimum(latest - lower[:, None], upper[:, None])[:, :, None]
    fewer = np.concatenate([np.zeros((len(rows), 1)), rows[:, :-1]], axis=1)
    value, value_of_fewer = np.zeros(fits.shape), np.zeros(fits.shape)
    for i in range(len(catalog.names)):
        value[:, i] = prices.value(i, rows_below[i] / lower[:, None])
        # At least: fewer rows may earn less in the round that they are really in than in the interval's shortest.
        value_of_fewer[:, i] = prices.value(i, fewer[i] / upper[:, None])
    value[~fits] = 0.0
    useful = value > value_of_fewer
    most_per_s = np.where(useful, value / latency, 0.0).max(axis=2)
    most = value.max(axis=2)
    order = np.argsort(-most_per_s.mean(axis=0), kind="stable").tolist()
    return _Rounds(upper, latency, value, useful, order, most, most_per_s)


def _branch(rounds: _Rounds, states: _States, i: int) -> _States:
    """Return the states without one more model, and with each of its options."""
    parent, b = np.nonzero(rounds.useful[states.round, i] & (rounds.latency[i] <= states.left[:, None]))
    child = states.select(parent)
    child.left -= rounds.latency[i, b]
    child.value += rounds.value[child.round, i, b]
    child.chosen[:, i] = b + 1
    return _States(
        np.concatenate([states.round, child.round]),
        np.concatenate([states.left, child.left]),
        np.concatenate([states.value, child.value]),
        np.concatenate([states.chosen, child.chosen]),
    )


def _fractional_knapsack(rounds: _Rounds, later: Sequence[int], states: _States) -> Array:
    """Bound what some models can add to each state: most valuable per second first, the last one in part."""
    total = np.zeros(len(states.round))
    order = np.argsort(-rounds.most_per_s[:, later], axis=1)
    most, per_s = (np.take_along_axis(each[:, later], order, axis=1) for each in (rounds.most, rounds.most_per_s))
    seconds = most / np.maximum(per_s, TINY)
    left = states.left.copy()
    for n in range(len(later)):
        took = seconds[states.round, n]
        total += most[states.round, n] * np.clip(left / np.maximum(took, TINY), 0.0, 1.0)
        left -= took
    return total


def _modes(
    catalog: ModeCatalog, s: int, chosen: IntArray, prices: DualPrices, threshold: float
) -> list[tuple[float, Mode]]:
    """Return the best modes of these options that meet their targets and are really worth more than the threshold."""
    present = chosen > 0
    indices = np.arange(len(catalog.names)), np.maximum(chosen - 1, 0)
    latency = np.where(present, catalog.options.latency[s][indices], 0.0)
    length = latency.sum(axis=1)
    rates = np.where(present, catalog.options.rows[s][indices], 0.0) / np.maximum(length, TINY)[:, None]
    value = np.zeros(len(chosen))
    for i in range(len(catalog.names)):
        value += prices.value(i, rates[:, i])
    feasible = (~present | (length[:, None] + latency <= _latest(catalog))).all(axis=1) & (value > threshold)
    return [
        (float(value[n]), catalog.mode(s, [(int(i), int(chosen[n, i]) - 1) for i in np.flatnonzero(present[n])]))
        for n in _best_of_each_set(present, np.where(feasible, value, -math.inf))
    ]


def _best_of_each_set(present: NDArray[np.bool_], value: Array) -> list[int]:
    """Return the best row for each set of models, best first, at most `MAX_PRICED_MODES`; rows of -inf never."""
    order = np.argsort(-value, kind="stable")
    order = order[np.isfinite(value[order])]
    _, first = np.unique(present[order], axis=0, return_index=True)
    return [int(n) for n in order[np.sort(first)][:MAX_PRICED_MODES]]


def _fits_memory(catalog: ModeCatalog, mode: Mode) -> bool:
    return mode.memory <= catalog.slots[mode.slot].memory
