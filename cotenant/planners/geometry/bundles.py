"""Cover each model's demand with whole partitions of its own, at the least price: columns for large demands.

Where a model takes many partitions, the relaxation serves it with 19.6 of the best ones, and rounding wastes part of
the twentieth. Of partitions of other sizes there is nearly always a combination that fits. A bundle is such a
combination: partitions that serve one model's whole demand. In a program over bundles whole numbers of partitions are
part of the columns, so few models remain fractional: no more than there are slots and kinds (Dantzig-Wolfe
reformulation).

The cheapest bundle is a covering knapsack, solved for all models at once by dynamic programming over their demands in
steps. Most of a large demand is served by the best partitions alone; the rest, some of these, is what is combined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.covering import Column
from cotenant.planners.geometry.modes import Mode

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

STEPS = 240  # of the demand that is combined
COMBINED = 4  # partitions of the best size that the combined part amounts to, at least


class Bundler:
    """Find the cheapest bundles of some models. singles: their modes alone; the others are left out."""

    def __init__(self, singles: Sequence[Mode], demand: Array) -> None:
        self._modes: dict[int, list[Mode]] = {}
        for mode in singles:
            if demand[mode.models[0]] > 0:
                self._modes.setdefault(mode.models[0], []).append(mode)
        self.models = sorted(self._modes)
        width = max((len(modes) for modes in self._modes.values()), default=0)
        self._rates = np.zeros((len(self.models), width))
        self._slots = np.zeros((len(self.models), width), dtype=np.int64)
        for n, i in enumerate(self.models):
            own = self._modes[i]
            self._rates[n, : len(own)] = [mode.rates[0] for mode in own]
            self._slots[n, : len(own)] = [mode.slot for mode in own]
        self._demand = demand[self.models]

    def cheapest(self, slot_prices: Array) -> list[Column]:
        """Return the cheapest bundle of each model, given the price of a partition on each slot."""
        if not self.models:
            return []
        prices = np.where(self._rates > 0, np.maximum(slot_prices[self._slots], 1e-12), np.inf)
        every = np.arange(len(self.models))
        best = (prices / np.maximum(self._rates, 1e-300)).argmin(axis=1)
        best_rate = self._rates[every, best]
        base = np.maximum(0, np.floor(self._demand / best_rate) - COMBINED).astype(np.int64)
        rest = self._demand - base * best_rate
        covers = np.minimum(np.floor(self._rates * (1 + 1e-9) / (rest / STEPS)[:, None]), STEPS).astype(np.int64)
        prices = np.where(covers > 0, prices, np.inf)
        cost = np.full((len(self.models), STEPS + 1), np.inf)
        choice = np.zeros((len(self.models), STEPS + 1), dtype=np.int64)
        cost[:, 0] = 0.0
        for step in range(1, STEPS + 1):
            before = np.maximum(step - covers, 0)
            options = prices + cost[every[:, None], before]
            choice[:, step] = options.argmin(axis=1)
            cost[:, step] = options[every, choice[:, step]]
        bundles = []
        for n, i in enumerate(self.models):
            if not np.isfinite(cost[n, STEPS]):
                continue
            counts: dict[int, int] = {int(best[n]): int(base[n])} if base[n] else {}
            left = STEPS
            while left > 0:
                own = int(choice[n, left])
                counts[own] = counts.get(own, 0) + 1
                left -= int(covers[n, own])
            bundles.append(tuple((self._modes[i][own], many) for own, many in sorted(counts.items())))
        return bundles
