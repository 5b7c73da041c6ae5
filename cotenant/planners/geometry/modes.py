"""Enumerate modes, what one partition can run: the columns of the integer program.

A mode is a set of models on a partition of some share, with the rates that it sustains: with batches b_i a round takes
D = Σ L_i(b_i), model i is served at b_i / D, and D + L_i(b_i) ≤ SLO_i must hold.

Two facts keep their number small.

- As long as demand is unlimited, a mode of several models is a convex combination of single-model modes: model i has
  L_i(b_i) / D of the time, and may use the same batch alone, since 2 · L_i(b_i) ≤ D + L_i(b_i) ≤ SLO_i. So single-model
  modes give the linear relaxation, whatever partitions really hold.
- In the same way a mode of k > 2 models is a convex combination of the modes of its pairs, with weights
  (L_i + L_j) / (k - 1) / D. So modes of pairs show the cost of time-sharing, and those of larger sets never do better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    RoundShare,
    footprint,
    latency_curve,
    max_throughput_batch,
    smallest_batches,
)

Array = NDArray[np.float64]

DIRECTIONS = 12  # ratios of a pair's rates for which the extreme mode is kept
ROUND_LENGTHS = 8  # round lengths tried for larger sets
MAX_LARGE_SETS = 400  # combinations of slot and three or more models that are tried
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

    latency[s, v, b - 1]: seconds of a batch of b on slot s, where variant v is a model (`owner[v]`) with a number of
    workers (`procs[v]`); inf where not profiled or too large for the memory.
    """

    def __init__(
        self, problem: Problem, names: Sequence[str], slots: Sequence[PartitionSize], slowdowns: Array
    ) -> None:
        self.problem = problem
        self.names = tuple(names)
        self.slots = tuple(slots)
        self.slo = np.array([problem.model(name).slo for name in names])
        variants = [(i, n) for i, name in enumerate(names) for n in _procs(problem, name)]
        self.owner = np.array([i for i, _ in variants], dtype=np.int64)
        self.procs = np.array([n for _, n in variants], dtype=np.int64)
        max_batch = max((_max_batch(problem, name) for name in names), default=1)
        self.latency = np.full((len(slots), len(variants), max_batch), math.inf)
        self.memory = np.zeros((len(problem.fleet), len(variants), max_batch))
        for k, kind in enumerate(problem.fleet):
            for v, (i, n) in enumerate(variants):
                self.memory[k, v] = [n * footprint(problem, kind.name, names[i], b + 1) for b in range(max_batch)]
        for s, slot in enumerate(slots):
            kind = problem.fleet[slot.kind]
            for v, (i, n) in enumerate(variants):
                curve = latency_curve(problem, names[i], kind.name, slot.share, n)
                self.latency[s, v, : len(curve)] = curve
                self.latency[s, v] *= slowdowns[s, i]
            self.latency[s][self.memory[slot.kind] > slot.memory] = math.inf

    def single_model_modes(self, *, low_memory: bool) -> list[Mode]:
        """Return for each slot and model the mode of highest rate; low_memory: also those that need less memory."""
        batch = np.arange(1, self.latency.shape[2] + 1)
        modes = []
        for s, slot in enumerate(self.slots):
            meets_slo = 2 * self.latency[s] <= self.slo[self.owner][:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                rates = np.where(meets_slo, self.procs[:, None] * batch / self.latency[s], 0.0)
            for i in range(len(self.names)):
                options = [
                    Mode(
                        s,
                        (i,),
                        (float(rates[v, b]),),
                        (int(b) + 1,),
                        (int(self.procs[v]),),
                        int(self.memory[slot.kind, v, b]),
                    )
                    for v in np.flatnonzero(self.owner == i)
                    for b in (np.flatnonzero(meets_slo[v]) if low_memory else [int(rates[v].argmax())])
                    if rates[v, b] > 0
                ]
                modes += _memory_efficient(options)[: None if low_memory else 1]
        return modes

    def pair_modes(self, slots: Iterable[int]) -> list[Mode]:
        """Return modes of every two models: for each of some ratios of their rates, the extreme one."""
        return [
            mode
            for s in slots
            for a, b in combinations(range(len(self.owner)), 2)
            if self.owner[a] != self.owner[b]
            for mode in self._extreme_pair_modes(s, a, b)
        ]

    def _extreme_pair_modes(self, s: int, a: int, b: int) -> list[Mode]:
        x, y, memory, batches = self._feasible_pairs(s, a, b)
        if not len(x):
            return []
        models = int(self.owner[a]), int(self.owner[b])
        procs = int(self.procs[a]), int(self.procs[b])
        angles = np.linspace(0.0, math.pi / 2, DIRECTIONS)
        most_x, most_y = float(x.max()), float(y.max())
        directions = np.stack([np.cos(angles) / most_x, np.sin(angles) / most_y])
        projections = directions.T @ np.stack([x, y])
        extreme = projections.argmax(axis=1)
        return [
            Mode(s, models, (float(x[n]), float(y[n])), batches[n], procs, int(memory[n]))
            for n in dict.fromkeys(extreme.tolist())
        ]

    def _feasible_pairs(self, s: int, a: int, b: int) -> tuple[Array, Array, Array, list[tuple[int, int]]]:
        """Return all batch pairs that meet both targets: the rates of either model, bytes, and batches."""
        kind = self.slots[s].kind
        latency_a, latency_b = self.latency[s, a][:, None], self.latency[s, b][None, :]
        round_length = latency_a + latency_b
        memory = self.memory[kind, a][:, None] + self.memory[kind, b][None, :]
        fits = (round_length + latency_a <= self.slo[self.owner[a]]) & (
            round_length + latency_b <= self.slo[self.owner[b]]
        )
        fits &= memory <= self.slots[s].memory
        rows, columns = np.nonzero(fits)
        round_length = round_length[rows, columns]
        return (
            self.procs[a] * (rows + 1) / round_length,
            self.procs[b] * (columns + 1) / round_length,
            memory[rows, columns],
            list(zip((rows + 1).tolist(), (columns + 1).tolist(), strict=True)),
        )

    def pair_frontiers(self, slots: Iterable[int]) -> list[Mode]:
        """Return the Pareto-optimal modes of every two models on some slots, up to a factor of `MIN_RATE_RATIO`."""
        curves = [[tuple(row[np.isfinite(row)].tolist()) for row in variants] for variants in self.latency]
        modes = []
        for s in slots:
            kind, memory_limit = self.slots[s].kind, self.slots[s].memory
            for a, b in combinations(range(len(self.owner)), 2):
                curve_a, curve_b = curves[s][a], curves[s][b]
                if self.owner[a] == self.owner[b] or not curve_a or not curve_b:
                    continue
                models = int(self.owner[a]), int(self.owner[b])
                procs = int(self.procs[a]), int(self.procs[b])
                for x, y, batches in _pair_frontier(
                    curve_a, curve_b, float(self.slo[models[0]]), float(self.slo[models[1]])
                ):
                    memory = self.memory[kind, a, batches[0] - 1] + self.memory[kind, b, batches[1] - 1]
                    if memory <= memory_limit:
                        modes.append(Mode(s, models, (procs[0] * x, procs[1] * y), batches, procs, int(memory)))
        return modes

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

    def knapsack_modes(self, slots: Iterable[int], value: Array, demand: Array) -> list[Mode]:
        """Return valuable modes of any number of models, at `value` for each request/s up to `demand`.

        A greedy knapsack for each of several round lengths: models in order of value per second, each once the first.
        """
        modes: dict[Mode, None] = {}
        for s in slots:
            slot = self.slots[s]
            shortest = self.latency[s, :, 0].min(initial=math.inf)
            if not shortest < self.slo.max(initial=0.0):
                continue
            for length in np.geomspace(shortest, self.slo.max(), ROUND_LENGTHS):
                fits = self.latency[s] <= np.minimum(self.slo[self.owner] - length, length)[:, None]
                useful_rows = np.ceil(demand[self.owner] * length / self.procs)
                batch = np.minimum(fits.sum(axis=1), np.minimum(useful_rows, self.latency.shape[2])).astype(np.int64)
                usable = np.flatnonzero(batch)
                if len(usable) < 2:
                    continue
                rates = np.minimum(self.procs[usable] * batch[usable] / length, demand[self.owner[usable]])
                value_per_s = value[self.owner[usable]] * rates / self.latency[s, usable, batch[usable] - 1]
                order = usable[np.argsort(-value_per_s, kind="stable")]
                for first in order:
                    mode = self._fill_round(s, slot, [first, *order[order != first]], batch, float(length))
                    if mode is not None:
                        modes[mode] = None
        return list(modes)

    def _fill_round(
        self, s: int, slot: PartitionSize, order: Sequence[int], batch: NDArray[np.int64], length: float
    ) -> Mode | None:
        time_left = length
        memory_left = float(slot.memory)
        chosen: list[tuple[int, int, int]] = []
        placed: set[int] = set()
        for v in order:
            i = int(self.owner[v])
            if i in placed:
                continue
            largest = int(np.searchsorted(self.latency[s, v, : batch[v]], time_left, side="right"))
            if largest == 0 or self.memory[slot.kind, v, largest - 1] > memory_left:
                continue
            placed.add(i)
            chosen.append((i, int(v), largest))
            time_left -= float(self.latency[s, v, largest - 1])
            memory_left -= float(self.memory[slot.kind, v, largest - 1])
        if len(chosen) < 2:
            return None
        chosen.sort()
        round_length = sum(float(self.latency[s, v, b - 1]) for _, v, b in chosen)
        return Mode(
            s,
            tuple(i for i, _, _ in chosen),
            tuple(float(self.procs[v]) * b / round_length for _, v, b in chosen),
            tuple(b for _, _, b in chosen),
            tuple(int(self.procs[v]) for _, v, _ in chosen),
            int(sum(self.memory[slot.kind, v, b - 1] for _, v, b in chosen)),
        )

    def _variants(self, models: Sequence[int], procs: Sequence[int]) -> list[int]:
        pairs = zip(models, procs, strict=True)
        return [int(v) for i, n in pairs for v in np.flatnonzero((self.owner == i) & (self.procs == n))]

    def proportional_mode(
        self, s: int, models: tuple[int, ...], rates: Sequence[float], procs: tuple[int, ...]
    ) -> Mode | None:
        """Return the mode with the largest multiple of some rates, to a thousandth; None where no mode is feasible."""
        variants = self._variants(models, procs)
        if len(variants) < len(models):
            return None
        curves = [tuple(self.latency[s, v][np.isfinite(self.latency[s, v])].tolist()) for v in variants]

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
        kind = self.slots[s].kind
        memory = sum(int(self.memory[kind, v, b - 1]) for v, b in zip(variants, best, strict=True))
        if memory > self.slots[s].memory:
            return None
        return Mode(
            s, models, tuple(n * b / round_length for n, b in zip(procs, best, strict=True)), tuple(best), procs, memory
        )


@lru_cache(maxsize=8192)
def _pair_frontier(
    curve_a: tuple[float, ...], curve_b: tuple[float, ...], slo_a: float, slo_b: float
) -> list[tuple[float, float, tuple[int, int]]]:
    """Return Pareto-optimal (rate, rate, batches) of two models, one worker each. curves: seconds of batches 1, 2, …"""
    round_length = np.array(curve_a)[:, None] + np.array(curve_b)[None, :]
    fits = (round_length + np.array(curve_a)[:, None] <= slo_a) & (round_length + np.array(curve_b)[None, :] <= slo_b)
    rows, columns = np.nonzero(fits)
    round_length = round_length[rows, columns]
    x, y = (rows + 1) / round_length, (columns + 1) / round_length
    frontier = []
    largest_y = 0.0
    for n in np.lexsort((-y, -x)):
        if y[n] > largest_y * MIN_RATE_RATIO:
            largest_y = float(y[n])
            frontier.append((float(x[n]), largest_y, (int(rows[n]) + 1, int(columns[n]) + 1)))
    return frontier


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


def _procs(problem: Problem, name: str) -> list[int]:
    """Return the numbers of concurrent workers with which a model was profiled, on any kind."""
    profiles = [problem.profile(name, kind.name) for kind in problem.fleet]
    return sorted({point.procs for profile in profiles if profile is not None for point in profile.points})


def _max_batch(problem: Problem, name: str) -> int:
    """Return the largest batch of a model on any kind."""
    profiles = [problem.profile(name, kind.name) for kind in problem.fleet]
    largest = max((profile.max_batch for profile in profiles if profile is not None), default=0)
    return min(largest, problem.model(name).max_batch or largest)


def _memory_efficient(modes: Sequence[Mode]) -> list[Mode]:
    """Return the mode of highest rate, then those of lower rate that need less memory than all before."""
    efficient: list[Mode] = []
    for mode in sorted(modes, key=lambda mode: (-mode.rates[0], mode.memory)):
        if not efficient or mode.memory < efficient[-1].memory:
            efficient.append(mode)
    return efficient
