"""Fill rounds with the most valuable models by dynamic programming: columns of any number of models.

For a round of length D, a model with an option of latency L takes L of it and serves its rows over D, up to the demand;
one option of each model at most. That is a multiple-choice knapsack, solved here for several lengths and all slots at
once, over a round divided into equal steps. Latencies are rounded to whole steps, which is right on average; modes that
then miss a target are left out, and better ones may be missed: bounds are proven in pricing.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.pricing import DualPrices

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

ROUND_LENGTHS = 24  # of each slot, in even ratios; others in each call
STEPS = 40  # of a round
OPTIONS = (1.0, 0.6, 0.3, 0.0)  # of a model that are tried, as parts of the largest useful one's index
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it fall evenly between whole numbers
SECONDS_PER_CELL = 7e-9  # of work, for each round, model, option and step
MARGIN = 1e-6  # relative, by which a mode is worth more than its price


class RoundKnapsack:
    """Find valuable modes of a catalog on some slots."""

    def __init__(self, catalog: ModeCatalog, slots: Sequence[int]) -> None:
        self._catalog, self._slots = catalog, slots
        self._latest = catalog.slo * (1 + ROUNDING_TOLERANCE)
        self._shift = 0.0

    def valuable_modes(self, prices: DualPrices, least: Array, budget: WorkBudget) -> list[Mode]:
        """Return modes worth more than `least` of their slot."""
        wanted = prices.earning()
        slot, length = self._rounds(wanted)
        budget.spend(SECONDS_PER_CELL * len(slot) * len(wanted) * len(OPTIONS) * STEPS)
        rounds, width = np.arange(len(slot))[:, None], STEPS + 1
        worth = np.zeros((len(slot), width))
        # For each model, round and steps used so far: 1 + the option taken, 0 for none; options are indices of these.
        taken = np.zeros((len(wanted), len(slot), width), dtype=np.int8)
        tried = np.zeros((len(wanted), len(slot), len(OPTIONS)), dtype=np.int64)
        sizes = np.zeros(tried.shape, dtype=np.int64)
        padded = np.full((len(slot), 2 * width), -math.inf)
        shifted = sliding_window_view(padded, width, axis=1)  # [round, width - n]: what n steps less are worth
        for n, i in enumerate(wanted.tolist()):
            tried[n], sizes[n], gain = self._options(i, slot, length, prices)
            padded[:, width:] = worth
            after = shifted[rounds, width - sizes[n]]
            after += gain[:, :, None]
            best = after.max(axis=1)
            taken[n] = np.where(best > worth, after.argmax(axis=1) + 1, 0)
            worth = np.maximum(worth, best)
        modes: dict[Mode, None] = {}
        for r in np.flatnonzero(worth[:, STEPS] > least[slot]).tolist():
            left, members = STEPS, []
            for n in range(len(wanted) - 1, -1, -1):
                if option := int(taken[n, r, left]):
                    members.append((int(wanted[n]), int(tried[n, r, option - 1])))
                    left -= int(sizes[n, r, option - 1])
            mode = self._feasible(int(slot[r]), members)
            if mode is not None and prices.worth(mode) > float(least[slot[r]]) * (1 + MARGIN):
                modes[mode] = None
        return list(modes)

    def _options(self, i: int, slot: IntArray, length: Array, prices: DualPrices) -> tuple[IntArray, IntArray, Array]:
        """Return options of a model for each round: their indices, the steps that they take, and what they earn."""
        latency, rows = self._catalog.options.latency[slot, i], self._catalog.options.rows[slot, i]
        demand = float(prices.demand[i])
        fits = latency <= np.minimum(self._latest[i] - length, length)[:, None]
        enough = rows >= demand * length[:, None] * (1 - ROUNDING_TOLERANCE)
        # The first that serves the demand, else the last that fits; and smaller ones.
        last = np.minimum(np.where(enough.any(axis=1), enough.argmax(axis=1), rows.shape[1]), fits.sum(axis=1) - 1)
        index = np.maximum(np.rint(last[:, None] * np.array(OPTIONS)), 0).astype(np.int64)
        sizes = np.minimum(np.rint(np.take_along_axis(latency, index, axis=1) / length[:, None] * STEPS), STEPS + 1)
        sizes = np.where(last[:, None] >= 0, sizes, STEPS + 1).astype(np.int64)
        rates = np.take_along_axis(rows, index, axis=1) / length[:, None]
        return index, sizes, prices.value(i, np.minimum(rates / demand, 1.0))

    def _feasible(self, s: int, members: Sequence[tuple[int, int]]) -> Mode | None:
        """Return the mode of these options; None where it misses a target or does not fit the memory."""
        latency = self._catalog.options.latency[s]
        length = math.fsum(float(latency[i, option]) for i, option in members)
        if any(length + latency[i, option] > self._latest[i] for i, option in members):
            return None
        mode = self._catalog.mode(s, members)
        return mode if mode.memory <= self._catalog.slots[s].memory else None

    def _rounds(self, models: IntArray) -> tuple[IntArray, Array]:
        """Return rounds to fill: the slot and the length (seconds) of each."""
        self._shift = (self._shift + GOLDEN) % 1.0
        part = (np.arange(ROUND_LENGTHS) + self._shift) / ROUND_LENGTHS
        slots, lengths = [], [np.zeros(0)]
        for s in self._slots:
            latency = self._catalog.options.latency[s, models, 0]
            usable = 2 * latency <= self._latest[models]
            if usable.any():
                shortest, longest = latency[usable].min(), (self._latest[models] - latency)[usable].max()
                slots += [s] * ROUND_LENGTHS
                lengths.append(shortest * (longest / shortest) ** part)
        return np.array(slots, dtype=np.int64), np.concatenate(lengths)
