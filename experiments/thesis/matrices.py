"""Hold what the thesis' workloads reach on its two GPUs: what was measured, and what its scheduler knew.

Two versions of the table of configurations were published. Pods run as one has it, and the scheduler knows the other;
they differ by 4 % on average, by 18 for a whole V100. Losses are one measurement, known to the scheduler; where none
was published (on the A30 workloads beside themselves) the collaborative filter fills them in, as chapter 8 has it.

A loss is in queries/s, and the thesis' scheduler subtracts it from what a workload reaches alone, wherever that is. But
it was measured where that was another number (`experiments.data.thesis`), on the V100 a much lower one. `relative`
losses are the same part of what a workload reaches.

A query's latency is taken to be linear in the number of parts that a GPU is divided into: time on the host, and time on
the GPU in proportion. That gives throughput on less than a quarter, where the measurements end, and the part of time in
which a workload keeps the GPU busy, which was not published.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.predictors import svd
from experiments.data import thesis

Matrix = NDArray[np.float64]

A30, V100 = "A30", "V100"
PARTS = (1, 2, 4)  # that a GPU was divided into
MAX_LOST = svd.MAX_LOSS  # of a workload's throughput that one other takes, where they can run together
MIN_BUSY = 0.01  # part of the time that a workload keeps a GPU busy, at least


class Losses(msgspec.Struct, frozen=True):
    """Describe the losses on one GPU, workloads (rows) beside others (columns).

    alone: queries/s of each without others, when losses were measured; part: of those that is lost, 1 where two cannot
    run together.
    """

    alone: Matrix
    part: Matrix


class Matrices(msgspec.Struct, frozen=True):
    """Describe workloads by index.

    rates: queries/s alone by GPU, workloads × `PARTS`. relative: whether a loss is a part of what a workload reaches,
    rather than a number of queries/s.
    """

    rates: Mapping[str, Matrix]
    losses: Mapping[str, Losses]
    relative: bool = False

    def alone(self, workload: int, gpu: str, parts: int) -> float:
        """Return the queries/s of a workload alone on one of `parts` equal parts of a GPU."""
        if parts in PARTS:
            return float(self.rates[gpu][workload, PARTS.index(parts)])
        half, quarter = 1 / self.rates[gpu][workload, 1:]
        return float(1 / (quarter + (parts - 4) * max(0.0, quarter - half) / 2))

    def beside(self, workload: int, gpu: str, parts: int, others: Sequence[int]) -> float:
        """Return its queries/s beside other workloads, whose effects add up; 0 where nothing is left."""
        alone, losses = self.alone(workload, gpu, parts), self.losses[gpu]
        if not all(self.together(gpu, workload, other) for other in others):
            return 0.0
        lost = float(losses.part[workload, list(others)].sum())
        return max(0.0, alone - lost * (alone if self.relative else float(losses.alone[workload])))

    def busy(self, workload: int, gpu: str, parts: int) -> float:
        """Return the part of time in which a workload keeps its part of a GPU busy."""
        whole, quarter = 1 / self.rates[gpu][workload, 0], 1 / self.rates[gpu][workload, 2]
        on_gpu = max(0.0, quarter - whole) / 3  # seconds of a query on a whole GPU
        return float(min(1.0, max(MIN_BUSY, parts * on_gpu * self.alone(workload, gpu, parts))))

    def together(self, gpu: str, one: int, other: int) -> bool:
        """Return whether two workloads can run in one partition."""
        part = self.losses[gpu].part
        return bool(max(part[one, other], part[other, one]) < 1)


@functools.cache
def measured(*, relative: bool = False) -> Matrices:
    """Return what pods do."""
    return Matrices(_rates(thesis.first_configurations()[2]), _losses(), relative)


@functools.cache
def known(*, relative: bool = False) -> Matrices:
    """Return what the scheduler knows."""
    return Matrices(_rates(thesis.alone()[2]), _losses(), relative)


def _rates(table: Matrix) -> dict[str, Matrix]:
    return {A30: table[:, :3], V100: table[:, 3:]}


@functools.cache
def _losses() -> dict[str, Losses]:
    losses = {}
    for gpu in (A30, V100):
        names, alone, lost = thesis.alone_and_lost(gpu)
        cannot = np.zeros(lost.shape, bool)
        for row, column in thesis.cannot():
            if row.endswith(gpu):
                cannot[names.index(row.removesuffix(f"_{gpu}")), names.index(column)] = True
        part = np.clip(lost / alone[:, None], 0, MAX_LOST)  # gains are chance
        filled = svd.complete(np.where(cannot, 1.0, part))
        losses[gpu] = Losses(alone, np.where(cannot, 1.0, np.clip(filled, 0, MAX_LOST)))
    return losses
