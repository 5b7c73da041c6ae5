"""List what each model may run on each slot: batches, and numbers of workers, without those that others dominate.

Products over options (pairs of models, rounds of several) cost the square of their number or more: a model profiled
with eight numbers of workers and batches to 512 has 4,096 choices, of which some dozens matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.capacity import latency_curve
from cotenant.planners.problem import Problem

Array = NDArray[np.float64]
Slot = tuple[int, int, int]  # kind, share in ‰, bytes
Fastest = Mapping[tuple[int, int], tuple[float, int, int, int]]

MAX_OPTIONS = 128  # of a model on a slot
MAX_VARIANT_OPTIONS = 48  # of one number of workers, where there are several


class Choice(msgspec.Struct, frozen=True):
    """Describe batches 1, 2, … of a model with some number of workers: their seconds, and bytes of all workers."""

    curve: tuple[float, ...]
    memory: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, name: str, slot: Slot, procs: int, slowdown: float) -> Choice:
        kind, share, most = slot
        curve = latency_curve(problem, name, problem.fleet[kind].name, share, procs)
        memory = tuple(procs * size for size in _footprints(problem, name, kind, len(curve)).tolist())
        known = sum(latency < math.inf and size <= most for latency, size in zip(curve, memory, strict=True))
        return cls(tuple(latency * slowdown for latency in curve[:known]), memory[:known])


class BatchOptions(msgspec.Struct, frozen=True):
    """Hold the options of each model on each slot, by ascending latency; [s, i, n] is option n of model i on slot s.

    latency: seconds of a batch (inf: no such option). rows: of all workers' batches together; batch: of one; procs:
    workers; memory: bytes of all. rows_below: the most rows of any option, listed or left out, that takes less than the
    next one, so that bounds hold for what was left out.
    """

    latency: Array
    rows: Array
    rows_below: Array
    batch: Array
    procs: Array
    memory: Array

    def choice(self, s: int, i: int, n: int) -> tuple[float, int, int, int]:
        """Return the rate of an option alone on its partition, its batch, workers and bytes."""
        rate = float(self.rows[s, i, n] / self.latency[s, i, n])
        return rate, int(self.batch[s, i, n]), int(self.procs[s, i, n]), int(self.memory[s, i, n])


def batch_options(
    problem: Problem, names: Sequence[str], slots: Sequence[Slot], slowdowns: Array
) -> tuple[BatchOptions, Fastest]:
    """Return the options of models on slots, and the option of highest rate alone within the target, by slot and model.

    slowdowns[s, i]: a factor on latencies. That option is chosen among all, also those that are not listed.
    """
    listed: dict[tuple[int, int], Array] = {}
    fastest: dict[tuple[int, int], tuple[float, int, int, int]] = {}
    sizes = {
        (kind, i): _footprints(problem, name, kind) for kind in {k for k, _, _ in slots} for i, name in enumerate(names)
    }
    procs = [_procs(problem, name) for name in names]
    slos = [problem.model(name).slo for name in names]
    for s, (kind, share, most) in enumerate(slots):
        for i, name in enumerate(names):
            variants = []
            for workers in procs[i]:
                curve = np.array(latency_curve(problem, name, problem.fleet[kind].name, share, workers))
                if not len(curve) or curve[0] == math.inf:
                    continue
                batch = np.arange(1.0, len(curve) + 1)
                table = np.stack(
                    [
                        curve * slowdowns[s, i],
                        batch * workers,
                        batch,
                        np.full(len(curve), float(workers)),
                        sizes[kind, i][: len(curve)] * workers,
                    ]
                )
                variants.append(table[:, np.isfinite(curve) & (table[4] <= most)])
            if any(table.shape[1] for table in variants):
                _keep_fastest(fastest, (s, i), variants, slos[i])
                listed[s, i] = _undominated(variants)
    return _padded(listed, (len(slots), len(names))), fastest


def _keep_fastest(
    fastest: dict[tuple[int, int], tuple[float, int, int, int]],
    key: tuple[int, int],
    variants: Sequence[Array],
    slo: float,
) -> None:
    for table in variants:
        alone = table[:, 2 * table[0] <= slo]
        if not alone.shape[1]:
            continue
        rates = alone[1] / alone[0]
        n = int(rates.argmax())
        if key not in fastest or rates[n] > fastest[key][0]:
            fastest[key] = float(rates[n]), int(alone[2, n]), int(alone[3, n]), int(alone[4, n])


def _undominated(variants: Sequence[Array]) -> Array:
    """Return a table of options (latency, rows, batch, procs, memory, rows below) by ascending latency.

    Left out are those that take as long as another of at least as many rows and no more memory, and where very many
    remain, all but some in even ratios of their rows.
    """
    if len(variants) == 1:
        (every,) = variants
        options = every
    else:
        every = np.concatenate(variants, axis=1)
        options = np.concatenate([_thinned(table, MAX_VARIANT_OPTIONS) for table in variants], axis=1)
        options = options[:, np.lexsort((options[4], -options[1], options[0]))]
        latency, rows, memory = options[0], options[1], options[4]
        better = (latency[:, None] <= latency) & (rows[:, None] >= rows) & (memory[:, None] <= memory)
        options = options[:, ~np.triu(better, 1).any(axis=0)]
    options = _thinned(options, MAX_OPTIONS)
    if options.shape[1] == every.shape[1]:
        return np.concatenate([options, options[1:2]])
    order = np.argsort(every[0], kind="stable")
    most_rows = np.maximum.accumulate(every[1, order])
    next_latency = np.append(options[0, 1:], math.inf)
    faster = np.searchsorted(every[0, order], next_latency, side="left")
    below = np.maximum(options[1], most_rows[np.maximum(faster, 1) - 1])
    return np.concatenate([options, below[None]])


def _thinned(table: Array, most: int) -> Array:
    """Return at most so many options in about even ratios of their rows, the first and the last among them."""
    if table.shape[1] <= most:
        return table
    wanted = np.geomspace(1, table.shape[1], most)
    kept = np.unique(np.rint(wanted).astype(int)) - 1
    return table[:, kept]


def _padded(listed: Mapping[tuple[int, int], Array], shape: tuple[int, int]) -> BatchOptions:
    most = max((table.shape[1] for table in listed.values()), default=1)
    arrays = np.zeros((6, *shape, most))
    arrays[0] = math.inf
    for (s, i), table in listed.items():
        arrays[:, s, i, : table.shape[1]] = table
    latency, rows, batch, procs, memory, below = arrays
    return BatchOptions(latency, rows, below, batch, procs, memory)


def _procs(problem: Problem, name: str) -> list[int]:
    """Return the numbers of concurrent workers with which a model was profiled, on any kind."""
    profiles = [problem.profile(name, kind.name) for kind in problem.fleet]
    return sorted({point.procs for profile in profiles if profile is not None for point in profile.points})


def _footprints(problem: Problem, name: str, kind: int, most: int | None = None) -> Array:
    """Return the bytes of one worker with batches 1, 2, … up to `most`, or to the largest profiled."""
    profile = problem.profile(name, problem.fleet[kind].name)
    if profile is None:
        return np.zeros(0)
    largest = profile.max_batch if most is None else most
    return np.array([profile.memory(batch) for batch in range(1, largest + 1)], dtype=float)
