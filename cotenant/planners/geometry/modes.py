"""What one partition can run: modes, the columns of the integer program.

A mode is a set of models on a partition of some share, with the rates that it carries: with batches b_i a round takes
D = Σ L_i(b_i), model i gets b_i / D, and D + L_i(b_i) ≤ SLO_i must hold.

Two facts keep their number small.

- Without a limit on what is useful, a mode of several models is a convex combination of modes of one: model i has
  L_i(b_i) / D of the time, and may use the same batch alone, since 2 · L_i(b_i) ≤ D + L_i(b_i) ≤ SLO_i. So modes of one
  model give the linear relaxation, whatever else partitions may hold.
- A mode of k > 2 models is in the same way a convex combination of the modes of its pairs, each with weight
  (L_i + L_j) / (k - 1) / D. So modes of pairs tell what time-sharing costs, and those of larger sets never do better.
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

DIRECTIONS = 12  # in which the rates of a pair are looked at
ROUND_LENGTHS = 8  # lengths of a round that are tried for larger sets
MAX_LARGE_SETS = 400  # sets of three models or more that are tried on slots, where models are few
MIN_RATE_RATIO = 1.01  # rates of a pair that differ by less are taken for one


class PartitionSize(msgspec.Struct, frozen=True):
    """A place for a partition. kind: index in the fleet; share: ‰; memory: bytes that its workers may take."""

    kind: int
    share: int
    memory: int


class Mode(msgspec.Struct, frozen=True):
    """slot, models: indices; of each model rates: requests/s, batches: rows, procs: workers; memory: bytes of all."""

    slot: int
    models: tuple[int, ...]
    rates: tuple[float, ...]
    batches: tuple[int, ...]
    procs: tuple[int, ...]
    memory: int


class ModeCatalog:
    """What can be put where, of the models in `names`. slow[s, i]: a factor on the latencies of model i on slot s.

    latency[s, v, b - 1]: seconds of a batch of b on slot s, where v numbers pairs of a model (`owner`) and how many
    workers of it run (`procs`); inf where that is unknown or does not fit the memory.
    """

    def __init__(self, problem: Problem, names: Sequence[str], slots: Sequence[PartitionSize], slow: Array) -> None:
        self.problem = problem
        self.names = tuple(names)
        self.slots = tuple(slots)
        self.slo = np.array([problem.model(name).slo for name in names])
        variants = [(i, n) for i, name in enumerate(names) for n in _procs(problem, name)]
        self.owner = np.array([i for i, _ in variants], dtype=np.int64)
        self.procs = np.array([n for _, n in variants], dtype=np.int64)
        depth = max((_deepest(problem, name) for name in names), default=1)
        self.latency = np.full((len(slots), len(variants), depth), math.inf)
        self.memory = np.zeros((len(problem.fleet), len(variants), depth))
        for k, kind in enumerate(problem.fleet):
            for v, (i, n) in enumerate(variants):
                self.memory[k, v] = [n * footprint(problem, kind.name, names[i], b + 1) for b in range(depth)]
        for s, slot in enumerate(slots):
            kind = problem.fleet[slot.kind]
            for v, (i, n) in enumerate(variants):
                known = latency_curve(problem, names[i], kind.name, slot.share, n)
                self.latency[s, v, : len(known)] = known
                self.latency[s, v] *= slow[s, i]
            self.latency[s][self.memory[slot.kind] > slot.memory] = math.inf

    def single_model_modes(self, *, low_memory: bool) -> list[Mode]:
        """For each slot and model the mode that carries most; light: and those that do with less memory."""
        batch = np.arange(1, self.latency.shape[2] + 1)
        found = []
        for s, slot in enumerate(self.slots):
            fits = 2 * self.latency[s] <= self.slo[self.owner][:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                rates = np.where(fits, self.procs[:, None] * batch / self.latency[s], 0.0)
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
                    for b in (np.flatnonzero(fits[v]) if low_memory else [int(rates[v].argmax())])
                    if rates[v, b] > 0
                ]
                found += _lightest(options)[: None if low_memory else 1]
        return found

    def pair_modes(self, slots: Iterable[int]) -> list[Mode]:
        """Modes of every two models: those that carry most in some direction."""
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
        proportional_mode = np.stack([np.cos(angles) / most_x, np.sin(angles) / most_y])
        along = proportional_mode.T @ np.stack([x, y])
        best = along.argmax(axis=1)
        return [
            Mode(s, models, (float(x[n]), float(y[n])), batches[n], procs, int(memory[n]))
            for n in dict.fromkeys(best.tolist())
        ]

    def _feasible_pairs(self, s: int, a: int, b: int) -> tuple[Array, Array, Array, list[tuple[int, int]]]:
        """Rates of both models, bytes, and batches: all that hold both targets."""
        kind = self.slots[s].kind
        first, second = self.latency[s, a][:, None], self.latency[s, b][None, :]
        length = first + second
        memory = self.memory[kind, a][:, None] + self.memory[kind, b][None, :]
        fits = (length + first <= self.slo[self.owner[a]]) & (length + second <= self.slo[self.owner[b]])
        fits &= memory <= self.slots[s].memory
        rows, columns = np.nonzero(fits)
        length = length[rows, columns]
        return (
            self.procs[a] * (rows + 1) / length,
            self.procs[b] * (columns + 1) / length,
            memory[rows, columns],
            list(zip((rows + 1).tolist(), (columns + 1).tolist(), strict=True)),
        )

    def pair_frontiers(self, slots: Iterable[int]) -> list[Mode]:
        """Of every two models on every slot the modes that no other beats in both rates, but for small differences."""
        curves = [[tuple(row[np.isfinite(row)].tolist()) for row in rows] for rows in self.latency]
        found = []
        for s in slots:
            kind, room = self.slots[s].kind, self.slots[s].memory
            for a, b in combinations(range(len(self.owner)), 2):
                first, second = curves[s][a], curves[s][b]
                if self.owner[a] == self.owner[b] or not first or not second:
                    continue
                models = int(self.owner[a]), int(self.owner[b])
                procs = int(self.procs[a]), int(self.procs[b])
                for x, y, batches in _pair_frontier(
                    first, second, float(self.slo[models[0]]), float(self.slo[models[1]])
                ):
                    memory = self.memory[kind, a, batches[0] - 1] + self.memory[kind, b, batches[1] - 1]
                    if memory <= room:
                        found.append(Mode(s, models, (procs[0] * x, procs[1] * y), batches, procs, int(memory)))
        return found

    def proportional_modes(self, slots: Sequence[int], rates: Array) -> list[Mode]:
        """Modes of every three models or more, in proportion to their rates, and with each of them twice as much.

        The larger slots and smaller sets come first, and no more than `MAX_LARGE_SETS` in all.
        """
        number = range(len(self.names))
        sets = [chosen for size in range(3, len(self.names) + 1) for chosen in combinations(number, size)]
        largest = sorted(slots, key=lambda s: -self.slots[s].share)
        found: dict[Mode, None] = {}
        wanted = (
            (s, chosen, [float(rates[i]) * (2 if i == more else 1) for i in chosen])
            for more in (None, *number)
            for chosen in sets
            if more is None or more in chosen
            for s in largest
        )
        for s, chosen, weights in islice(wanted, MAX_LARGE_SETS):
            mode = self.proportional_mode(s, chosen, weights, (1,) * len(chosen))
            if mode is not None:
                found[mode] = None
        return list(found)

    def knapsack_modes(self, slots: Iterable[int], value: Array, clip: Array) -> list[Mode]:
        """Modes of any number of models that are worth most, at `value` per request/s of which `clip` are useful.

        For rounds of several lengths, models are taken in order of worth per time, each once as the first.
        """
        found: dict[Mode, None] = {}
        for s in slots:
            slot = self.slots[s]
            quickest = self.latency[s, :, 0].min(initial=math.inf)
            if not quickest < self.slo.max(initial=0.0):
                continue
            for length in np.geomspace(quickest, self.slo.max(), ROUND_LENGTHS):
                fits = self.latency[s] <= np.minimum(self.slo[self.owner] - length, length)[:, None]
                wanted = np.ceil(clip[self.owner] * length / self.procs)
                batch = np.minimum(fits.sum(axis=1), np.minimum(wanted, self.latency.shape[2])).astype(np.int64)
                able = np.flatnonzero(batch)
                if len(able) < 2:
                    continue
                rates = np.minimum(self.procs[able] * batch[able] / length, clip[self.owner[able]])
                worth = value[self.owner[able]] * rates / self.latency[s, able, batch[able] - 1]
                order = able[np.argsort(-worth, kind="stable")]
                for first in order:
                    mode = self._fill_round(s, slot, [first, *order[order != first]], batch, float(length))
                    if mode is not None:
                        found[mode] = None
        return list(found)

    def _fill_round(
        self, s: int, slot: PartitionSize, order: Sequence[int], batch: NDArray[np.int64], length: float
    ) -> Mode | None:
        left = length
        room = float(slot.memory)
        chosen: list[tuple[int, int, int]] = []
        taken: set[int] = set()
        for v in order:
            i = int(self.owner[v])
            if i in taken:
                continue
            most = int(np.searchsorted(self.latency[s, v, : batch[v]], left, side="right"))
            if most == 0 or self.memory[slot.kind, v, most - 1] > room:
                continue
            taken.add(i)
            chosen.append((i, int(v), most))
            left -= float(self.latency[s, v, most - 1])
            room -= float(self.memory[slot.kind, v, most - 1])
        if len(chosen) < 2:
            return None
        chosen.sort()
        took = sum(float(self.latency[s, v, b - 1]) for _, v, b in chosen)
        return Mode(
            s,
            tuple(i for i, _, _ in chosen),
            tuple(float(self.procs[v]) * b / took for _, v, b in chosen),
            tuple(b for _, _, b in chosen),
            tuple(int(self.procs[v]) for _, v, _ in chosen),
            int(sum(self.memory[slot.kind, v, b - 1] for _, v, b in chosen)),
        )

    def _variants(self, models: Sequence[int], procs: Sequence[int]) -> list[int]:
        wanted = zip(models, procs, strict=True)
        return [int(v) for i, n in wanted for v in np.flatnonzero((self.owner == i) & (self.procs == n))]

    def proportional_mode(
        self, s: int, models: tuple[int, ...], rates: Sequence[float], procs: tuple[int, ...]
    ) -> Mode | None:
        """The mode that carries the largest multiple of some rates, to a thousandth; None where none carries any."""
        variants = self._variants(models, procs)
        if len(variants) < len(models):
            return None
        curves = [tuple(self.latency[s, v][np.isfinite(self.latency[s, v])].tolist()) for v in variants]
        # Alone in turn, each would take this part of the time.
        most = [max_throughput_batch(known, float(self.slo[i]))[1] for i, known in zip(models, curves, strict=True)]
        if not all(most):
            return None
        busy = sum(rate / (n * alone) for rate, n, alone in zip(rates, procs, most, strict=True))
        low, high, best = 0.0, 1 / busy, None
        first = True
        while high - low > 1e-3 / busy:
            # Rates that a plan in force has are carried exactly.
            multiple = 1.0 if first and busy < 1 + ROUNDING_TOLERANCE else (low + high) / 2
            first = False
            batches = smallest_batches(
                [
                    RoundShare(known, multiple * rate / n, float(self.slo[i]))
                    for i, rate, n, known in zip(models, rates, procs, curves, strict=True)
                ]
            )
            if batches is None:
                high = multiple
            else:
                low, best = multiple, batches
        if best is None:
            return None
        took = sum(known[b - 1] for known, b in zip(curves, best, strict=True))
        kind = self.slots[s].kind
        memory = sum(int(self.memory[kind, v, b - 1]) for v, b in zip(variants, best, strict=True))
        if memory > self.slots[s].memory:
            return None
        return Mode(
            s, models, tuple(n * b / took for n, b in zip(procs, best, strict=True)), tuple(best), procs, memory
        )


@lru_cache(maxsize=8192)
def _pair_frontier(
    first: tuple[float, ...], second: tuple[float, ...], slo: float, other: float
) -> list[tuple[float, float, tuple[int, int]]]:
    """Rates of two models and their batches, of one worker each; `first` and `second` are seconds of batches 1, 2, …"""
    length = np.array(first)[:, None] + np.array(second)[None, :]
    fits = (length + np.array(first)[:, None] <= slo) & (length + np.array(second)[None, :] <= other)
    rows, columns = np.nonzero(fits)
    length = length[rows, columns]
    x, y = (rows + 1) / length, (columns + 1) / length
    found = []
    most = 0.0
    for n in np.lexsort((-y, -x)):
        if y[n] > most * MIN_RATE_RATIO:
            most = float(y[n])
            found.append((float(x[n]), most, (int(rows[n]) + 1, int(columns[n]) + 1)))
    return found


def partition_sizes(problem: Problem) -> list[PartitionSize]:
    """A slot for each legal share of each kind; for one that MIG cuts, for each kind of instance."""
    return [
        PartitionSize(k, share, min(memory, kind.memory))
        for k, kind in enumerate(problem.fleet)
        for share, memory in _sizes(kind)
    ]


def _sizes(kind: Kind) -> list[tuple[int, int]]:
    if kind.geometry is None:
        return [(share, kind.memory) for share in kind.cuts]
    return [(one.share, one.memory) for one in mig.instances(kind.geometry) if one.share in kind.cuts]


def _procs(problem: Problem, name: str) -> list[int]:
    """How many workers of a model were measured to run at once, on any kind."""
    profiles = [problem.profile(name, kind.name) for kind in problem.fleet]
    return sorted({point.procs for profile in profiles if profile is not None for point in profile.points})


def _deepest(problem: Problem, name: str) -> int:
    """The largest batch of a model on any kind."""
    profiles = [problem.profile(name, kind.name) for kind in problem.fleet]
    largest = max((profile.max_batch for profile in profiles if profile is not None), default=0)
    return min(largest, problem.model(name).max_batch or largest)


def _lightest(modes: Sequence[Mode]) -> list[Mode]:
    """Best first, and of the others those that need less memory than all before."""
    found: list[Mode] = []
    for mode in sorted(modes, key=lambda mode: (-mode.rates[0], mode.memory)):
        if not found or mode.memory < found[-1].memory:
            found.append(mode)
    return found
