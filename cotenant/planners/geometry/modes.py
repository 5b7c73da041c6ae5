"""Enumerate modes, what one partition can run: the columns of the integer program.

A mode is a set of models on a partition of some share, with the rates that it sustains: with batches b_i a round takes
D = Σ L_i(b_i), model i is served at b_i / D, and D + L_i(b_i) ≤ SLO_i must hold.

Two facts keep their number small.

- As long as demand is unlimited, a mode of several models is a convex combination of single-model modes: model i has
  L_i(b_i) / D of the time, and may use the same batch alone, since 2 · L_i(b_i) ≤ D + L_i(b_i) ≤ SLO_i. So single-model
  modes give the linear relaxation, whatever partitions really hold. Where demand is limited, the same holds for lower
  rates (`ModeCatalog.with_demand`).
- In the same way a mode of k > 2 models is a convex combination of the modes of its pairs, with weights
  (L_i + L_j) / (k - 1) / D. So modes of pairs show the cost of time-sharing, and those of larger sets never do better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.planners import Problem
from cotenant.planners.capacity import ROUNDING_TOLERANCE, RoundShare, max_throughput_batch, smallest_batches
from cotenant.planners.geometry.batch_options import Choice, batch_options
from cotenant.planners.geometry.budget import WorkBudget

Array = NDArray[np.float64]

ROUND_LENGTHS = 8  # round lengths tried for larger sets
MAX_LARGE_SETS = 400  # combinations of slot and three or more models that are tried
SECONDS_PER_PAIR = 2e-4  # of work, for the modes of two models on a slot
SECONDS_PER_PAIR_OF_OPTIONS = 1.2e-7  # and for each two options of them
MAX_PAIRED_OPTIONS = 32  # of a model, of which every two are paired at once
MIN_RATE_RATIO = 1.01  # modes of a pair whose rates differ by a smaller factor count as one


class PartitionSize(msgspec.Struct, frozen=True):
    """Describe a slot: what partitions of one size offer.

    kind: index in the fleet; share: ‰; memory: bytes for all workers.
    """

    kind: int
    share: int
    memory: int


class Mode(msgspec.Struct, frozen=True):
    """Describe a set of models that time-share a partition, with feasible batches.

    slot: index of its size; models: ascending indices; for each model rates: requests/s, batches: rows, procs: workers;
    memory: bytes of all workers.
    """

    slot: int
    models: tuple[int, ...]
    rates: tuple[float, ...]
    batches: tuple[int, ...]
    procs: tuple[int, ...]
    memory: int


class ModeCatalog:
    """Enumerate modes of the models in `names`. slowdowns[s, i]: a factor on the latencies of model i on slot s.

    options: what the models may run on each slot (`BatchOptions`).
    """

    def __init__(
        self, problem: Problem, names: Sequence[str], slots: Sequence[PartitionSize], slowdowns: Array
    ) -> None:
        self.problem = problem
        self.names = tuple(names)
        self.slots = tuple(slots)
        self.slo = np.array([problem.model(name).slo for name in names])
        self.options, self._fastest = batch_options(
            problem, names, [(slot.kind, slot.share, slot.memory) for slot in slots], slowdowns
        )
        self._slowdowns = slowdowns
        self._frontiers: dict[tuple[int, int, int], list[Mode]] = {}

    def single_model_modes(self, *, low_memory: bool) -> list[Mode]:
        """Return for each slot and model the mode of highest rate; low_memory: also those that need less memory."""
        modes = []
        for (s, i), fastest in self._fastest.items():
            if not low_memory:
                modes.append(_single(s, i, fastest))
                continue
            options = self.options
            alone = np.flatnonzero(2 * options.latency[s, i] <= self.slo[i]).tolist()
            modes += _memory_efficient(
                [_single(s, i, fastest), *(_single(s, i, options.choice(s, i, n)) for n in alone)]
            )
        return modes

    def with_demand(self, modes: Iterable[Mode], demand: Array) -> list[Mode]:
        """Return single-model modes with at most the rates that are useful where no more than the demand counts.

        A mode of several models stays a convex combination of these. A batch of b rows that takes L has the fraction
        L / D of a round, in which it serves at most min(b / D, demand), and D ≤ SLO - L: for each second of the
        partition at most min(b, demand · (SLO - L)) / L. A model of low demand never fills the batches that would make
        it efficient. demand: requests/s of each model.
        """
        latency, latest = self.options.latency, (self.slo * (1 + ROUNDING_TOLERANCE))[:, None]
        alone = 2 * latency <= latest
        rows = np.minimum(self.options.rows_below, demand[:, None] * (latest - np.where(alone, latency, 0.0)))
        useful = np.where(alone, rows / latency, 0.0).max(axis=2) * (1 + ROUNDING_TOLERANCE)
        return [
            msgspec.structs.replace(mode, rates=(min(mode.rates[0], float(useful[mode.slot, mode.models[0]])),))
            for mode in modes
        ]

    def pair_frontiers(self, slots: Iterable[int], budget: WorkBudget | None = None) -> list[Mode]:
        """Return the Pareto-optimal modes of every two models on some slots, up to a factor of `MIN_RATE_RATIO`.

        budget: of work; where it runs out, pairs are left out.
        """
        modes: list[Mode] = []
        for s in slots:
            for a, b in combinations(range(len(self.names)), 2):
                if budget is not None and (s, a, b) not in self._frontiers:
                    if not budget.left():
                        return modes
                    budget.spend(SECONDS_PER_PAIR + SECONDS_PER_PAIR_OF_OPTIONS * self.options.latency.shape[2] ** 2)
                modes += self.pair_frontier(s, a, b)
        return modes

    def pair_frontier(self, s: int, a: int, b: int) -> list[Mode]:
        """Return the Pareto-optimal modes of two models on a slot, up to a factor of `MIN_RATE_RATIO`; each is made
        once."""
        if (s, a, b) not in self._frontiers:
            self._frontiers[s, a, b] = self._pair_frontier(s, a, b)
        return self._frontiers[s, a, b]

    def best_pairs(
        self, s: int, models: Sequence[int], value: Array, demand: Array, least: float, most: int
    ) -> list[Mode]:
        """Return modes of two of these models on a slot that are worth more than `least`, the best first, at most so
        many: for each option of one model the best of the other. Of more than `MAX_PAIRED_OPTIONS` some are left out.

        value: of a request/s of each model, up to the demand.
        """
        options = self.options
        depth = int((2 * options.latency[s, models] <= self.slo[models, None]).sum(axis=1).max())
        if not depth:
            return []
        chosen = np.arange(depth)
        if depth > MAX_PAIRED_OPTIONS:
            chosen = np.unique(np.rint(np.geomspace(1, depth, MAX_PAIRED_OPTIONS)).astype(np.int64)) - 1
        a, b = np.triu_indices(len(models), 1)
        own = np.array(models)
        latency, rows, memory = (each[s, own][:, chosen] for each in (options.latency, options.rows, options.memory))
        slo = self.slo[own] * (1 + ROUNDING_TOLERANCE)
        latency_a, latency_b = latency[a][:, :, None], latency[b][:, None, :]
        length = latency_a + latency_b
        fits = (length + latency_a <= slo[a, None, None]) & (length + latency_b <= slo[b, None, None])
        fits &= memory[a][:, :, None] + memory[b][:, None, :] <= self.slots[s].memory
        length = np.where(fits, length, 1.0)
        worth = (value[own][a, None, None]) * np.minimum(rows[a][:, :, None] / length, demand[own][a, None, None])
        worth += (value[own][b, None, None]) * np.minimum(rows[b][:, None, :] / length, demand[own][b, None, None])
        worth[~fits] = -math.inf
        best = (worth == worth.max(axis=1, keepdims=True)) | (worth == worth.max(axis=2, keepdims=True))
        at = np.flatnonzero(best & (worth > least))
        at = at[np.argsort(-worth.ravel()[at], kind="stable")[:most]]
        pair, first, second = np.unravel_index(at, worth.shape)
        return [
            self.mode(s, ((models[a[n]], int(chosen[x])), (models[b[n]], int(chosen[y]))))
            for n, x, y in zip(pair.tolist(), first.tolist(), second.tolist(), strict=True)
        ]

    def _pair_frontier(self, s: int, a: int, b: int) -> list[Mode]:
        options = self.options
        depth_a, depth_b = (int((2 * options.latency[s, i] <= self.slo[i]).sum()) for i in (a, b))
        if not depth_a or not depth_b:
            return []
        latency_a, latency_b = options.latency[s, a, :depth_a, None], options.latency[s, b, None, :depth_b]
        length = latency_a + latency_b
        fits = (length + latency_a <= self.slo[a]) & (length + latency_b <= self.slo[b])
        fits &= options.memory[s, a, :depth_a, None] + options.memory[s, b, None, :depth_b] <= self.slots[s].memory
        rows_a, rows_b = np.nonzero(fits)
        length = length[rows_a, rows_b]
        x, y = options.rows[s, a, rows_a] / length, options.rows[s, b, rows_b] / length
        # From the most of the first model to the most of the second.
        order = np.lexsort((-y, -x))
        sorted_y = y[order]
        before = np.concatenate([[0.0], np.maximum.accumulate(sorted_y)[:-1]]) if len(order) else sorted_y
        frontier, largest_y = [], 0.0
        for n in order[sorted_y > before].tolist():
            if y[n] > largest_y * MIN_RATE_RATIO:
                largest_y = float(y[n])
                frontier.append(self.mode(s, ((a, int(rows_a[n])), (b, int(rows_b[n])))))
        return frontier

    def mode(self, s: int, chosen: Iterable[tuple[int, int]]) -> Mode:
        """Return the mode of some models with one option each, as (model, index of the option)."""
        options, ordered = self.options, sorted(chosen)
        length = math.fsum(float(options.latency[s, i, n]) for i, n in ordered)
        return Mode(
            s,
            tuple(i for i, _ in ordered),
            tuple(float(options.rows[s, i, n]) / length for i, n in ordered),
            tuple(int(options.batch[s, i, n]) for i, n in ordered),
            tuple(int(options.procs[s, i, n]) for i, n in ordered),
            int(sum(options.memory[s, i, n] for i, n in ordered)),
        )

    def proportional_modes(self, slots: Sequence[int], rates: Array) -> list[Mode]:
        """Return modes of three or more models, in proportion to their rates, and with each in turn doubled.

        Larger slots and smaller sets come first; at most `MAX_LARGE_SETS` are tried.
        """
        indices = range(len(self.names))
        model_sets = [models for size in range(3, len(self.names) + 1) for models in combinations(indices, size)]
        largest = sorted(slots, key=lambda s: -self.slots[s].share)
        modes: dict[Mode, None] = {}
        cases = (
            (s, models, [float(rates[i]) * (2 if i == doubled else 1) for i in models])
            for doubled in (None, *indices)
            for models in model_sets
            if doubled is None or doubled in models
            for s in largest
        )
        for s, models, weights in islice(cases, MAX_LARGE_SETS):
            mode = self.proportional_mode(s, models, weights, (1,) * len(models))
            if mode is not None:
                modes[mode] = None
        return list(modes)

    def knapsack_modes(
        self, slots: Iterable[int], value: Array, demand: Array, price: Array | None = None
    ) -> list[Mode]:
        """Return valuable modes of any number of models, at `value` for each request/s up to `demand`.

        A greedy knapsack for each of several round lengths: models in order of value per second fill one round after
        the other, so that each model is in some mode. price: of each slot; only modes worth more are returned.
        """
        modes: dict[Mode, None] = {}
        for s in slots:
            shortest, longest = self.options.latency[s, :, 0].min(initial=math.inf), self.slo.max(initial=0.0)
            if not shortest < longest:
                continue
            for length in np.geomspace(shortest, longest, ROUND_LENGTHS):
                least = 0.0 if price is None else float(price[s])
                for mode in self._rounds_of(s, float(length), value, demand, least):
                    modes[mode] = None
        return list(modes)

    def _rounds_of(self, s: int, length: float, value: Array, demand: Array, least: float) -> list[Mode]:
        """Return modes of rounds of about a length that are worth more than `least`: each model is in at most one."""
        options = self.options
        fits = options.latency[s] <= np.minimum(self.slo - length, length)[:, None]
        enough = options.rows[s] >= demand[:, None] * length * (1 - ROUNDING_TOLERANCE)
        # The first option that serves the demand, else the last that fits.
        last = fits.sum(axis=1) - 1
        first = np.where(enough.any(axis=1), enough.argmax(axis=1), options.latency.shape[2])
        chosen = np.minimum(first, last)
        usable = np.flatnonzero((chosen >= 0) & (demand > 0) & (value > 0))
        if not len(usable):
            return []
        took = options.latency[s, usable, chosen[usable]]
        memory = options.memory[s, usable, chosen[usable]]
        worth = value[usable] * np.minimum(options.rows[s, usable, chosen[usable]] / length, demand[usable])
        order = np.argsort(-worth / took, kind="stable")
        took, memory, worth, usable = took[order], memory[order], worth[order], usable[order]
        modes = []
        left = np.ones(len(usable), dtype=bool)
        for start in range(len(usable)):
            if not left[start]:
                continue
            if worth[start] / took[start] * length <= least:
                break
            members = _greedy_fill(start, left, took, memory, length, float(self.slots[s].memory))
            left[members] = False
            if len(members) > 1 and worth[members].sum() > least:
                modes.append(self.mode(s, [(int(usable[m]), int(chosen[usable[m]])) for m in members]))
        return modes

    def proportional_mode(
        self, s: int, models: tuple[int, ...], rates: Sequence[float], procs: tuple[int, ...]
    ) -> Mode | None:
        """Return the mode with the largest multiple of some rates, to a thousandth; None where no mode is feasible."""
        slot = self.slots[s]
        choices = [self._choice(s, i, n) for i, n in zip(models, procs, strict=True)]
        curves = [choice.curve for choice in choices]
        solo_rates = [
            max_throughput_batch(curve, float(self.slo[i]))[1] for i, curve in zip(models, curves, strict=True)
        ]
        if not all(solo_rates):
            return None
        busy = sum(rate / (n * solo_rate) for rate, n, solo_rate in zip(rates, procs, solo_rates, strict=True))
        low, high, best = 0.0, 1 / busy, None
        first = True
        while high - low > 1e-3 / busy:
            # So that the rates of the current plan are matched exactly.
            multiple = 1.0 if first and busy < 1 + ROUNDING_TOLERANCE else (low + high) / 2
            first = False
            batches = smallest_batches(
                [
                    RoundShare(curve, multiple * rate / n, float(self.slo[i]))
                    for i, rate, n, curve in zip(models, rates, procs, curves, strict=True)
                ]
            )
            if batches is None:
                high = multiple
            else:
                low, best = multiple, batches
        if best is None:
            return None
        round_length = sum(curve[b - 1] for curve, b in zip(curves, best, strict=True))
        memory = sum(choice.memory[b - 1] for choice, b in zip(choices, best, strict=True))
        if memory > slot.memory:
            return None
        return Mode(
            s, models, tuple(n * b / round_length for n, b in zip(procs, best, strict=True)), tuple(best), procs, memory
        )

    def curve(self, s: int, i: int) -> tuple[float, ...]:
        """Return the seconds of batches 1, 2, … of one worker of a model on a slot, as far as they are known."""
        return self._choice(s, i, 1).curve

    def _choice(self, s: int, i: int, procs: int) -> Choice:
        slot = self.slots[s]
        return Choice.of(
            self.problem, self.names[i], (slot.kind, slot.share, slot.memory), procs, float(self._slowdowns[s, i])
        )


def _single(s: int, i: int, choice: tuple[float, int, int, int]) -> Mode:
    rate, batch, procs, memory = choice
    return Mode(s, (i,), (rate,), (batch,), (procs,), memory)


def _greedy_fill(
    start: int, left: NDArray[np.bool_], took: Array, memory: Array, length: float, memory_left: float
) -> list[int]:
    """Return who fills a round: `start`, then the next ones that are left and fit its length and memory."""
    members, time_left = [start], length - float(took[start])
    memory_left -= float(memory[start])
    at = start + 1
    while at < len(took):
        fitting = np.flatnonzero(left[at:] & (took[at:] <= time_left) & (memory[at:] <= memory_left))
        if not len(fitting):
            break
        at += int(fitting[0])
        members.append(at)
        time_left -= float(took[at])
        memory_left -= float(memory[at])
        at += 1
    return members


def partition_sizes(problem: Problem) -> list[PartitionSize]:
    """Return a slot for each legal share of each kind; for MIG, for each instance profile."""
    return [
        PartitionSize(k, share, min(memory, kind.memory))
        for k, kind in enumerate(problem.fleet)
        for share, memory in _sizes(kind)
    ]


def _sizes(kind: Kind) -> list[tuple[int, int]]:
    if kind.geometry is None:
        return [(share, kind.memory) for share in kind.cuts]
    return [
        (instance.share, instance.memory) for instance in mig.instances(kind.geometry) if instance.share in kind.cuts
    ]


def _memory_efficient(modes: Sequence[Mode]) -> list[Mode]:
    """Return the mode of highest rate, then those of lower rate that need less memory than all before."""
    efficient: list[Mode] = []
    for mode in sorted(modes, key=lambda mode: (-mode.rates[0], mode.memory)):
        if not efficient or mode.memory < efficient[-1].memory:
            efficient.append(mode)
    return efficient
