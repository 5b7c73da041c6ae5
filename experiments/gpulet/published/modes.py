"""Define the modes of the published program and the schedules that it returns."""

from __future__ import annotations

import msgspec


class Mode(msgspec.Struct, frozen=True):
    """Configure the program.

    sizes: of gpulets in percent, ascending; layouts: ways to partition a GPU, all of which are tried; if empty, GPUs
    are partitioned as models need it.
    """

    sizes: tuple[int, ...] = (20, 40, 50, 60, 80, 100)
    interference: bool = True
    layouts: tuple[tuple[int, ...], ...] = ()
    gpus: int = 4


ELASTIC = Mode()
ELASTIC_ALONE = Mode(interference=False)
SBP = Mode(sizes=(100,), interference=False)  # time sharing only
# Exhaustive over layouts, with the same greedy loop in each: "ideal" refers to the partitioning only (1.11).
IDEAL = Mode(layouts=((50, 50), (60, 40), (80, 20), (100,)))
HALVES = Mode(sizes=(50,), interference=False, layouts=((50, 50),))  # Figure 5's 1:1


class Gpulet(msgspec.Struct, frozen=True):
    """Place one model on one gpulet. dedup: distinguishes two halves of a GPU; duty: ms; throughput: requests/s."""

    gpu: int
    size: int
    dedup: int
    model: str
    batch: int
    duty: float
    throughput: float


class Schedule(msgspec.Struct, frozen=True):
    """Report whether all rates can be served, and the gpulets if so."""

    schedulable: bool
    gpulets: tuple[Gpulet, ...] = ()

    def text(self) -> str:
        """Format the schedule as in golden_glet: gpu:size:dedup:model:batch:duty, joined by semicolons."""
        return ";".join(f"{g.gpu}:{g.size}:{g.dedup}:{g.model}:{g.batch}:{g.duty:.6f}" for g in self.gpulets)
