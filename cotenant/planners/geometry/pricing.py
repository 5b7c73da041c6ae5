"""Solve the pricing problem of column generation: bound the value of any mode of a slot, and find the most valuable
ones.

The length D of a round is divided into short intervals. Within one, a model with batch b takes L(b) of at most the
interval's upper end and serves at most b over its lower end, so each round becomes a multiple-choice knapsack. Dynamic
programming over a round divided into equal cells, latencies rounded down, bounds what the models still to come can add
to what is left of a round. With these bounds, branch and bound adds models one after the other to all rounds at once; a
state is pruned once it cannot exceed the threshold. Memory is ignored, so the bound also holds for modes that do not
fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.modes import Mode, ModeCatalog

Array = NDArray[np.float64]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

ROUND_LENGTH_STEP = 0.02  # relative width of an interval of round lengths
CELLS = 100  # of a round, in which latencies are counted for bounds
MIN_BEAM_WIDTH, MAX_BEAM_WIDTH = 100, 10_000  # states kept at each level; the least promising beyond only bound
# Where modes may be worth much more than the threshold, the first search is for the best ones, with few states.
FAR = 1.05  # times the threshold
SEARCHED = 0.95  # of the highest value
FIRST_BEAM_WIDTH = 300
MAX_PRICED_MODES = 20  # modes returned, each of a different set of models
SECONDS_PER_SLOT = 6e-4  # of work, each time
SECONDS_PER_ROUND_AND_OPTION = 2e-8  # and to list the options that a demand makes useful
SECONDS_PER_USEFUL_OPTION = 2e-8  # and for each of these
SECONDS_PER_CELL = 1.2e-9  # and for each of these and cell of a round
SECONDS_PER_LEVEL = 5e-5  # of a search, for each model
SECONDS_PER_STATE = 1.2e-8  # and for each state and model or option
FLOAT_ROUNDING = 1e-5  # relative, by which sums of floats of 32 bits may be off
CELL_ROUNDING = 1e-9  # of a cell, by which others may be
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

    def average(self) -> Array:
        """Return the value of a request/s of each model where all of its demand is served."""
        value = self.full.copy()
        for step in self.steps:
            value[step.model] += step.value * math.ceil(step.multiplier)
        return np.divide(value, self.demand, out=np.zeros(len(value)), where=self.demand > 0)

    def earning(self) -> IntArray:
        """Return the models that are requested and earn something."""
        earning = self.full > 0
        earning[[step.model for step in self.steps if step.value > 0]] = True
        return np.flatnonzero(earning & (self.demand > 0))

    def worth(self, mode: Mode) -> float:
        """Return the value of what a mode serves."""
        fractions = (min(rate / self.demand[i], 1.0) for i, rate in zip(mode.models, mode.rates, strict=True))
        return sum(float(self.value(i, np.array(f))) for i, f in zip(mode.models, fractions, strict=True))

    def value(self, i: int, fraction: Array) -> Array:
        """Return the value of serving some fractions of model i's demand, from 0 to 1."""
        value: Array = self.full[i] * fraction
        for step in self.steps:
            if step.model == i:
                value = value + step.value * np.ceil(step.multiplier * fraction)
        return value


class _States(msgspec.Struct):
    """Hold partly filled rounds.

    round: index of the interval, of those kept; left: seconds; value: so far; chosen[·, i]: 1 + the option of each
    model; 0: none.
    """

    round: IntArray
    left: Array
    value: Array
    chosen: NDArray[np.int16]


class SlotPricer:
    """Price the modes of one slot for a demand (requests/s of each model).

    Useful options of models in rounds stand in one row, by model and by round: those that fit, and may earn more than
    the one before. work: seconds that listing them took.
    """

    def __init__(self, catalog: ModeCatalog, s: int, demand: Array) -> None:
        self._catalog, self._slot, self._demand = catalog, s, demand
        # With slack for planners that sum the same round in another order.
        self._latest: Array = catalog.slo * (1 + ROUNDING_TOLERANCE)
        latency, work = catalog.options.latency[s], SECONDS_PER_SLOT
        # A round is no shorter than any of its batches.
        self._depth = int((2 * latency <= self._latest[:, None]).sum(axis=1).max())
        if self._depth:
            shortest, longest = float(latency[:, 0].min()), float((self._latest - latency[:, 0]).max())
            count = int(math.log(longest / shortest) / math.log1p(ROUND_LENGTH_STEP)) + 1
            self._list_options(shortest * np.power(1 + ROUND_LENGTH_STEP, np.arange(count)))
            work += SECONDS_PER_ROUND_AND_OPTION * count * len(demand) * self._depth
        # Of very many options some are listed.
        self._left_out = bool((catalog.options.rows_below[s] > catalog.options.rows[s]).any())
        self.work = work

    def _list_options(self, lower: Array) -> None:
        """List the useful options of rounds that begin at these lengths (seconds)."""
        options, s, depth = self._catalog.options, self._slot, self._depth
        upper = self._length = lower * (1 + ROUND_LENGTH_STEP)
        rounds, chosen, fractions, seconds = [], [], [], []
        self._count = np.zeros((len(self._demand), len(lower)), dtype=np.int64)
        for i, demand in enumerate(self._demand.tolist()):
            latency, rows, below = (each[s, i, :depth] for each in (options.latency, options.rows, options.rows_below))
            fits = latency <= np.minimum(self._latest[i] - lower, upper)[:, None]
            fraction = np.minimum(below / lower[:, None] / demand, 1.0)
            # At least: fewer rows may earn less in the round that they are really in than in the interval's shortest.
            fewer = np.minimum(np.append(0.0, rows[:-1]) / upper[:, None] / demand, 1.0)
            useful = fits & (fraction > fewer)
            n, b = np.nonzero(useful)
            rounds.append(n)
            chosen.append(b)
            fractions.append(fraction[n, b])
            seconds.append(latency[b])
            self._count[i] = useful.sum(axis=1)
        self._option, self._fraction = np.concatenate(chosen), np.concatenate(fractions)
        self._seconds = np.concatenate(seconds)
        cells = self._seconds / upper[np.concatenate(rounds)] * CELLS - CELL_ROUNDING
        # The last one stands for no option.
        self._cells = np.append(np.maximum(cells, 0.0).astype(np.int64), 0)
        self._first = (np.cumsum(self._count) - self._count.ravel()).reshape(self._count.shape)

    def price(
        self, prices: DualPrices, threshold: float, budget: WorkBudget | None = None
    ) -> tuple[float, list[tuple[float, Mode]]]:
        """Bound the value of any mode from above, and return the best modes with their values.

        Values up to `threshold` are not told apart: the bound is at least the threshold, and modes exceed it. budget:
        what this may take about; with less, fewer states are kept and the bound is looser.
        """
        if not self._depth:
            return threshold, []
        value = self._values(prices)
        kept, order = self._relaxed(value, threshold)
        rest, work = self._completions(value, kept, order)
        work += SECONDS_PER_SLOT + SECONDS_PER_USEFUL_OPTION * len(value)
        highest = float(rest[0][:, CELLS].max(initial=0.0))
        bound, modes = threshold, list[tuple[float, Mode]]()
        for least in (SEARCHED * highest, threshold) if highest > FAR * threshold else (threshold,):
            if highest <= threshold:
                break
            left = math.inf if budget is None else budget.left() - work
            beam_width = self._beam_width(left) if least == threshold else FIRST_BEAM_WIDTH
            states, bound, more = self._search(value, kept, rest, order, least, beam_width)
            work += more
            chosen = states.chosen.astype(np.int64)
            found = self._modes(chosen, prices, least)
            bound = max([bound, self._most(chosen, kept[states.round], prices), *(each for each, _ in found)])
            modes = [each for each in found if each[1].memory <= self._catalog.slots[self._slot].memory]
            if modes:
                break
        if budget is not None:
            budget.spend(work)
        return bound, modes

    def _beam_width(self, seconds_left: float) -> int:
        models = len(self._demand)
        affordable = seconds_left / (SECONDS_PER_STATE * (self._depth + models) * models)
        return int(np.clip(affordable, MIN_BEAM_WIDTH, MAX_BEAM_WIDTH))

    def _values(self, prices: DualPrices) -> Array:
        """Return an upper bound on what each option earns in its round."""
        values = np.full(len(self._cells), -math.inf)
        for i in range(len(self._demand)):
            first = int(self._first[i, 0])
            own = slice(first, first + int(self._count[i].sum()))
            values[own] = prices.value(i, self._fraction[own])
        return values

    def _relaxed(self, value: Array, threshold: float) -> tuple[IntArray, list[int]]:
        """Return the rounds that may be worth more than the threshold, and the models by what they earn for a second.

        The bound is that of a fractional knapsack: most valuable per second first, the last one in part.
        """
        shape = self._count.shape
        most, per_s = np.zeros(shape[0] * shape[1]), np.zeros(shape[0] * shape[1])
        present = np.flatnonzero(self._count.ravel())
        first = self._first.ravel()[present]
        most[present] = np.maximum.reduceat(value[:-1], first)
        per_s[present] = np.maximum.reduceat(value[:-1] / self._seconds, first)
        most, per_s = most.reshape(shape), per_s.reshape(shape)
        by_value = np.argsort(-per_s, axis=0)
        most_sorted, per_s_sorted = (np.take_along_axis(each, by_value, axis=0) for each in (most, per_s))
        seconds = most_sorted / np.maximum(per_s_sorted, TINY)
        left = np.maximum(self._length - (np.cumsum(seconds, axis=0) - seconds), 0.0)
        bound = (most_sorted * np.minimum(left / np.maximum(seconds, TINY), 1.0)).sum(axis=0)
        kept = np.flatnonzero(bound > threshold)
        worth = per_s[:, kept].sum(axis=1)
        return kept, [i for i in np.argsort(-worth, kind="stable").tolist() if worth[i] > 0]

    def _completions(self, value: Array, kept: IntArray, order: Sequence[int]) -> tuple[list[FloatArray], float]:
        """Bound what the models from each level on can add to each of some rounds: [level][n, cells that are left].
        Returns the work as well."""
        width, work = CELLS + 1, 0.0
        value = value.astype(np.float32)
        tables = [np.zeros((len(kept), width), dtype=np.float32)]
        rows = np.arange(len(kept))
        padded = np.full((len(kept), 2 * width), -math.inf, dtype=np.float32)
        shifted = sliding_window_view(padded, width, axis=1)  # [n, width - w]: the last table with w cells less left
        for i in reversed(order):
            padded[:, width:] = tables[-1]
            table = tables[-1].copy()
            counts, first = self._count[i, kept], self._first[i, kept]
            for k in range(int(counts.max(initial=0))):
                option = np.where(counts > k, first + k, -1)
                taken = shifted[rows, width - self._cells[option]]
                taken += value[option][:, None]
                np.maximum(table, taken, out=table)
                work += SECONDS_PER_CELL * table.size
            tables.append(table)
        for table in tables:
            table *= 1 + FLOAT_ROUNDING
        return tables[::-1], work

    def _search(
        self,
        value: Array,
        kept: IntArray,
        rest: Sequence[FloatArray],
        order: Sequence[int],
        threshold: float,
        beam_width: int,
    ) -> tuple[_States, float, float]:
        """Return all rounds that may be worth more than the threshold, a bound on those left out, and the work."""
        models = len(self._demand)
        at = np.flatnonzero(rest[0][:, CELLS] > threshold)  # of the rounds kept
        states = _States(at, self._length[kept[at]], np.zeros(len(at)), np.zeros((len(at), models), dtype=np.int16))
        bound, work = threshold, SECONDS_PER_LEVEL * len(order)
        for level, i in enumerate(order):
            origin, option, left, earned = self._branched(states, kept, value, i)
            row = states.round[origin]
            cell = (left / self._length[kept[row]] * CELLS + CELL_ROUNDING).astype(np.int64)
            most = earned + rest[level + 1][row, cell]
            open_states = np.flatnonzero(most > threshold)
            if len(open_states) > beam_width:
                open_states = open_states[np.argsort(-most[open_states], kind="stable")]
                bound = max(bound, float(most[open_states[beam_width]]))
                open_states = open_states[:beam_width]
            work += SECONDS_PER_STATE * (len(most) * 4 + len(open_states) * models)
            chosen = states.chosen[origin[open_states]]
            chosen[:, i] = option[open_states]
            states = _States(row[open_states], left[open_states], earned[open_states], chosen)
        return states, bound, work

    def _branched(
        self, states: _States, kept: IntArray, value: Array, i: int
    ) -> tuple[IntArray, IntArray, Array, Array]:
        """Return states without one more model, and with each of its options: the state that each comes from, 1 + the
        option, the seconds that are left, and the value."""
        rounds = kept[states.round]
        counts, first = self._count[i, rounds], self._first[i, rounds]
        parent = np.repeat(np.arange(len(counts)), counts)
        option = np.arange(len(parent)) + (first - np.cumsum(counts) + counts)[parent]
        left = states.left[parent] - self._seconds[option]
        fits = left >= 0
        parent, option = parent[fits], option[fits]
        without = np.arange(len(counts))
        return (
            np.concatenate([without, parent]),
            np.concatenate([np.zeros(len(counts), dtype=np.int64), self._option[option] + 1]),
            np.concatenate([states.left, left[fits]]),
            np.concatenate([states.value, states.value[parent] + value[option]]),
        )

    def _modes(self, chosen: IntArray, prices: DualPrices, threshold: float) -> list[tuple[float, Mode]]:
        """Return the best modes of these options that meet their targets and are really worth more than the
        threshold."""
        present = chosen > 0
        length, feasible = self._lengths(chosen)
        value = self._worth(chosen, self._catalog.options.rows, length, prices)
        return [
            (
                float(value[n]),
                self._catalog.mode(self._slot, [(int(i), int(chosen[n, i]) - 1) for i in np.flatnonzero(present[n])]),
            )
            for n in _best_of_each_set(present, np.where(feasible & (value > threshold), value, -math.inf))
        ]

    def _most(self, chosen: IntArray, rounds: IntArray, prices: DualPrices) -> float:
        """Bound the value of modes with options that are not listed, which these listed ones stand for; 0 where there
        are none: those take as long as the listed ones or longer, in the same interval."""
        if not self._left_out or not len(chosen):
            return 0.0
        length, feasible = self._lengths(chosen)
        shortest = np.maximum(length, self._length[rounds] / (1 + ROUND_LENGTH_STEP))
        value = self._worth(chosen, self._catalog.options.rows_below, shortest, prices)
        return float(np.where(feasible, value, 0.0).max())

    def _lengths(self, chosen: IntArray) -> tuple[Array, NDArray[np.bool_]]:
        """Return how long rounds of these options take, and whether they meet all targets."""
        latency = self._of(chosen, self._catalog.options.latency)
        length = latency.sum(axis=1)
        return length, ((chosen == 0) | (length[:, None] + latency <= self._latest)).all(axis=1)

    def _worth(self, chosen: IntArray, rows: Array, length: Array, prices: DualPrices) -> Array:
        """Return the values of rounds of these options, which serve so many rows and take so long."""
        rates = self._of(chosen, rows) / np.maximum(length, TINY)[:, None]
        fractions = np.minimum(rates / self._demand, 1.0)
        value = np.zeros(len(chosen))
        for i in np.flatnonzero(chosen.any(axis=0)).tolist():
            value += prices.value(i, fractions[:, i])
        return value

    def _of(self, chosen: IntArray, table: Array) -> Array:
        """Return what a table of options has for those chosen, by state and model; 0 for none."""
        entries = table[self._slot][np.arange(len(self._demand)), np.maximum(chosen - 1, 0)]
        return np.where(chosen > 0, entries, 0.0)


def _best_of_each_set(present: NDArray[np.bool_], value: Array) -> list[int]:
    """Return the best row for each set of models, best first, at most `MAX_PRICED_MODES`; rows of -inf never."""
    order = np.argsort(-value, kind="stable")
    order = order[np.isfinite(value[order])]
    found: dict[bytes, int] = {}
    packed = np.packbits(present, axis=1)
    for n in order.tolist():
        found.setdefault(packed[n].tobytes(), n)
        if len(found) == MAX_PRICED_MODES:
            break
    return list(found.values())
