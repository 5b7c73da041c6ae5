"""Fill the rounds of a partition with models that come short: modes of any number of models, made for what is left.

A catalog can list the modes of every one and two models, but not of every set. Where there are several times as many
models as partitions, and batches take about as long on a small share as on a large one, a plan needs modes of many
models with batches that are small enough for all targets at once. Which models these are depends on what the other
partitions serve already, so such modes are made during the search.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.modes import Mode, ModeCatalog

PARTS = (1.0, 0.5, 0.25, 0.125)  # of a model's demand to try in turn, where one partition may not carry all of it
ALIKE_PROBABILITY = 0.5  # of adding models in order of how close their targets are to that of the first


class _Curve(NamedTuple):
    """Hold the options of a model on a slot that serve more rows than all faster ones, the fastest first: their
    indices, rows, seconds and bytes.

    fastest: seconds of the first (inf where there is none); latest: of the longest round that it may be in.
    """

    options: list[int]
    rows: list[float]
    latency: list[float]
    memory: list[float]
    fastest: float
    latest: float


class RoundFiller:
    """Make modes of the models that come short, in random orders that are the same in every run."""

    def __init__(self, catalog: ModeCatalog) -> None:
        self._catalog = catalog
        self._rng = np.random.default_rng(0)
        self._slo: list[float] = catalog.slo.tolist()
        self._log_slo: list[float] = np.log(catalog.slo).tolist()
        self._curves: list[dict[int, _Curve]] = [{} for _ in catalog.slots]
        self._made: dict[tuple[int, tuple[tuple[int, int], ...]], Mode] = {}

    def fill(
        self,
        s: int,
        demand: Mapping[int, float],
        memory: float,
        first: Sequence[int] = (),
        *,
        in_part: bool = False,
    ) -> Mode | None:
        """Return a mode of a slot for this demand, in requests/s of each model that is short, within its memory and so
        many bytes of the device; None where none of these models can be served there.

        Models are added one after the other, each with its whole demand, as long as every target holds. Batches are the
        smallest that keep up. first: models that are added before the others; in_part: with a part of their demand
        where the whole does not fit.
        """
        memory = min(memory, float(self._catalog.slots[s].memory))
        curves = self._curves[s]
        chosen: dict[int, int] = {}
        demands: dict[int, float] = {}
        length, latest = 0.0, math.inf  # seconds of the round, and what it may take for the targets of those chosen
        for i in self._order(demand, first):
            curve = curves.get(i) or self._curve(s, i)
            # Most models do not even fit with their fastest option.
            round_length = length + curve.fastest
            if round_length > latest or round_length > curve.latest:
                continue
            for part in PARTS if not chosen or (in_part and i in first) else (1.0,):
                demands[i] = part * demand[i]
                own = self._least(curve, i, length, latest, demands[i])
                if own is None:
                    continue
                grown = self._grown(curves, chosen | {i: own}, length + curve.latency[own], demands)
                if grown is not None and sum([curves[j].memory[n] for j, n in grown[0].items()]) <= memory:
                    chosen, length = grown
                    latest = min([self._slo[j] - curves[j].latency[n] for j, n in chosen.items()])
                    break
        if not chosen:
            return None
        key = s, tuple(sorted((i, curves[i].options[n]) for i, n in chosen.items()))
        if key not in self._made:
            self._made[key] = self._catalog.mode(*key)
        return self._made[key]

    def _order(self, demand: Mapping[int, float], first: Sequence[int]) -> list[int]:
        """Return the models that are short: those given first as they are, the others at random."""
        log_slo, others = self._log_slo, [i for i in demand if i not in first]
        # All at once: for a single number numpy's generator takes as long.
        alike, *keys = self._rng.random(1 + len(others)).tolist()
        order = [i for _, i in sorted(zip(keys, others, strict=True))]
        if len(order) > 2 and alike < ALIKE_PROBABILITY:
            target = log_slo[order[0]]
            order.sort(key=lambda i: abs(log_slo[i] - target))
        return [*(i for i in first if i in demand), *order]

    def _least(self, curve: _Curve, i: int, others: float, latest: float, demand: float) -> int | None:
        """Return the least option of a model that keeps up if the others take so many seconds of a round; None where
        the round then lasts beyond `latest`, or beyond the model's own target."""
        n = 0
        while True:
            own = curve.latency[n]
            length = others + own
            if length > latest or length + own > self._slo[i]:
                return None
            least = bisect_left(curve.rows, demand * length * (1 - ROUNDING_TOLERANCE), lo=n)
            if least == n:
                return n
            if least == len(curve.rows):
                return None
            n = least

    def _grown(
        self, curves: Mapping[int, _Curve], chosen: dict[int, int], length: float, demands: Mapping[int, float]
    ) -> tuple[dict[int, int], float] | None:
        """Return the least options that keep up, from `chosen` on, and the seconds of their round, from `length` on;
        None where some target does not hold.

        This is `smallest_batches`, begun where a smaller set of models ended: more models only need larger batches.
        """
        slo = self._slo
        grew = True
        while grew:
            grew = False
            for i, n in chosen.items():
                _, rows, latency, *_ = curves[i]
                own = latency[n]
                if length + own > slo[i]:
                    return None
                needed = demands[i] * length * (1 - ROUNDING_TOLERANCE)
                if rows[n] >= needed:
                    continue
                least = bisect_left(rows, needed, lo=n)
                if least == len(rows):
                    return None
                chosen[i] = least
                length += latency[least] - own
                grew = True
        return chosen, length

    def _curve(self, s: int, i: int) -> _Curve:
        options = self._catalog.options
        rows = options.rows[s, i]
        before = np.concatenate([[0.0], np.maximum.accumulate(rows)[:-1]])
        kept = np.flatnonzero(np.isfinite(options.latency[s, i]) & (rows > before))
        latency, memory = options.latency[s, i, kept], options.memory[s, i, kept]
        fastest = float(latency[0]) if len(kept) else math.inf
        curve = self._curves[s][i] = _Curve(
            kept.tolist(), rows[kept].tolist(), latency.tolist(), memory.tolist(), fastest, self._slo[i] - fastest
        )
        return curve
