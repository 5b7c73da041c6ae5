"""Fill the rounds of a partition with models that come short: modes of any number of models, made for what is left.

A catalog can list the modes of every one and two models, but not of every set. Where there are several times as many
models as partitions, and batches take about as long on a small share as on a large one, a plan needs modes of many
models with batches that are small enough for all targets at once. Which models these are depends on what the other
partitions serve already, so such modes are made during the search.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.modes import Mode, ModeCatalog

Array = NDArray[np.float64]

PARTS = (1.0, 0.5, 0.25, 0.125)  # of a model's demand to try in turn, where one partition may not carry all of it
ALIKE_PROBABILITY = 0.5  # of adding models in order of how close their targets are to that of the first


class RoundFiller:
    """Make modes of the models that come short, in random orders that are the same in every run."""

    def __init__(self, catalog: ModeCatalog) -> None:
        self._catalog = catalog
        self._rng = np.random.default_rng(0)
        self._slo: list[float] = catalog.slo.tolist()
        self._log_slo = np.log(catalog.slo)
        self._curves: dict[tuple[int, int], tuple[list[int], list[float], list[float]]] = {}
        self._made: dict[tuple[int, tuple[tuple[int, int], ...]], Mode] = {}

    def fill(
        self, s: int, demand: Array, memory: float, first: Sequence[int] = (), *, in_part: bool = False
    ) -> Mode | None:
        """Return a mode of a slot for this demand, in requests/s of each model, within its memory and so many bytes of
        the device; None where the first model of the order cannot be served there.

        Models are added one after the other, each with its whole demand, as long as every target holds. Batches are the
        smallest that keep up. first: models that are added before the others; in_part: with a part of their demand
        where the whole does not fit.
        """
        memory = min(memory, float(self._catalog.slots[s].memory))
        order = [*(i for i in first if demand[i] > 0), *self._order(demand, first)]
        chosen: dict[int, int] = {}
        demands = demand.tolist()
        for i in order:
            for part in PARTS if not chosen or (in_part and i in first) else (1.0,):
                demands[i] = part * float(demand[i])
                grown = self._grown(s, chosen | {i: 0}, demands)
                if grown is not None and self._memory(s, grown) <= memory:
                    chosen = grown
                    break
        if not chosen:
            return None
        key = s, tuple(sorted((i, self._curve(s, i)[0][n]) for i, n in chosen.items()))
        if key not in self._made:
            self._made[key] = self._catalog.mode(*key)
        return self._made[key]

    def _order(self, demand: Array, but: Sequence[int]) -> list[int]:
        short = np.array([i for i in np.flatnonzero(demand > 0).tolist() if i not in but], dtype=np.int64)
        order = self._rng.permutation(short)
        if len(order) > 2 and self._rng.random() < ALIKE_PROBABILITY:
            distance = np.abs(self._log_slo[order] - self._log_slo[order[0]])
            order = order[np.argsort(distance, kind="stable")]
        return [int(i) for i in order]

    def _grown(self, s: int, chosen: dict[int, int], demands: Sequence[float]) -> dict[int, int] | None:
        """Return the least options that keep up, from `chosen` on; None where some target does not hold.

        This is `smallest_batches`, begun where a smaller set of models ended: more models only need larger batches.
        """
        curves = {i: self._curve(s, i) for i in chosen}
        if not all(rows for _, rows, _ in curves.values()):
            return None
        chosen = dict(chosen)
        length = math.fsum(curves[i][2][n] for i, n in chosen.items())
        grew = True
        while grew:
            grew = False
            for i, n in chosen.items():
                _, rows, latency = curves[i]
                if length + latency[n] > self._slo[i]:
                    return None
                least = bisect_left(rows, demands[i] * length * (1 - ROUNDING_TOLERANCE), lo=n)
                if least == len(rows):
                    return None
                if least > n:
                    chosen[i] = least
                    length += latency[least] - latency[n]
                    grew = True
        return chosen

    def _memory(self, s: int, chosen: dict[int, int]) -> float:
        memory = self._catalog.options.memory
        return float(sum(memory[s, i, self._curve(s, i)[0][n]] for i, n in chosen.items()))

    def _curve(self, s: int, i: int) -> tuple[list[int], list[float], list[float]]:
        """Return the options of a model on a slot that serve more rows than all faster ones: their indices, rows and
        seconds."""
        if (s, i) not in self._curves:
            options = self._catalog.options
            rows = options.rows[s, i]
            before = np.concatenate([[0.0], np.maximum.accumulate(rows)[:-1]])
            kept = np.flatnonzero(np.isfinite(options.latency[s, i]) & (rows > before))
            self._curves[s, i] = kept.tolist(), rows[kept].tolist(), options.latency[s, i, kept].tolist()
        return self._curves[s, i]
