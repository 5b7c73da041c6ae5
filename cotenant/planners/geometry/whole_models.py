"""Plan one device with each model on one partition, by dynamic programming over sets of models.

Which models share a partition matters most where one device serves many: ruin and recreate changes a set at a time and
gets stuck, an integer program has no columns for most sets. At some multiple of the rates each set of models needs some
smallest share, and the dynamic program finds the sets that need the least together. The largest multiple is found by
bisection. Ruin and recreate also starts from this plan, and splits models where that serves more.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.planners.capacity import RoundShare, smallest_batches
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.modes import Mode, ModeCatalog

Array = NDArray[np.float64]

MAX_MODELS = 10  # up to which all sets are considered
SCALE_TOLERANCE = 1e-3  # relative precision of the multiple
SECONDS_PER_SET = 2e-5  # of work, for one set on one share
SECONDS_PER_SPLIT = 1e-6  # and for one set next to what another leaves


def whole_model_modes(
    catalog: ModeCatalog, slots: list[int], rates: Array, limit: float, budget: WorkBudget
) -> list[Mode]:
    """Return modes of the partitions of one device that serve the largest multiple of the rates with each model on one
    partition; [] where no multiple is served so.

    slots: of that device's kind, which may be cut into any that add up to it. limit: on the multiple; it is tried
    first. As far as the budget allows.
    """
    search = _Search(catalog, sorted(slots, key=lambda s: catalog.slots[s].share), rates, budget)
    low, high, best = 0.0, limit, search.partition(limit)
    if best:
        return search.modes(best, limit)
    multiple = limit / 2
    while high - low > SCALE_TOLERANCE * high and high > SCALE_TOLERANCE * limit and budget.left():
        sets = search.partition(multiple)
        if sets:
            low, best = multiple, sets
        else:
            high = multiple
        multiple = (low + high) / 2
    return search.modes(best, low) if best else []


class _Search:
    def __init__(self, catalog: ModeCatalog, slots: list[int], rates: Array, budget: WorkBudget) -> None:
        self.catalog, self.slots, self.rates, self.budget = catalog, slots, rates, budget
        models = range(len(catalog.names))
        self.curves = [[catalog.curve(s, i) for i in models] for s in slots]
        # The largest multiple at which a set on a slot is known to be served, and the least at which it is not.
        self.known: dict[tuple[int, int], tuple[float, float]] = {}

    def partition(self, multiple: float) -> list[tuple[int, int]]:
        """Return sets of models, as bits, with the index of the smallest slot of each, that serve a multiple of the
        rates on one device with the least share; [] where none do."""
        all_models = (1 << len(self.catalog.names)) - 1
        smallest = self._smallest_slots(multiple, all_models)
        least = [0.0] + [math.inf] * all_models
        chosen = [0] * (all_models + 1)
        for models in range(1, all_models + 1):
            first = models & -models
            others = rest = models ^ first
            while True:
                own = others | first
                if (n := smallest.get(own)) is not None:
                    share = self.catalog.slots[self.slots[n]].share + least[models ^ own]
                    if share < least[models]:
                        least[models], chosen[models] = share, own
                if not others:
                    break
                others = (others - 1) & rest
        self.budget.spend(SECONDS_PER_SPLIT * 3 ** len(self.catalog.names) / 2)
        if least[all_models] > WHOLE:
            return []
        sets, left = [], all_models
        while left:
            sets.append((chosen[left], smallest[chosen[left]]))
            left ^= chosen[left]
        return sets

    def modes(self, sets: list[tuple[int, int]], multiple: float) -> list[Mode]:
        """Return the mode of each set on its slot: at the largest multiple there, which is at least the given one."""
        modes = []
        for models, n in sets:
            members = tuple(i for i in range(len(self.catalog.names)) if models >> i & 1)
            rates = [multiple * float(self.rates[i]) for i in members]
            mode = self.catalog.proportional_mode(self.slots[n], members, rates, (1,) * len(members))
            if mode is None:
                return []
            modes.append(mode)
        return modes

    def _smallest_slots(self, multiple: float, all_models: int) -> dict[int, int]:
        """Return for each set of models that some slot serves the index of the smallest one that does."""
        smallest: dict[int, int] = {}
        for models in range(1, all_models + 1):
            # A slot that serves a set serves each of its subsets.
            subsets = [smallest.get(models ^ bit) for bit in _bits(models) if bit != models]
            if None in subsets:
                continue
            low, high = max((n for n in subsets if n is not None), default=0), len(self.slots)
            while low < high:
                middle = (low + high) // 2
                if self._serves(middle, models, multiple):
                    high = middle
                else:
                    low = middle + 1
            if low < len(self.slots):
                smallest[models] = low
        return smallest

    def _serves(self, n: int, models: int, multiple: float) -> bool:
        low, high = self.known.get((n, models), (0.0, math.inf))
        if low < multiple < high:
            self.budget.spend(SECONDS_PER_SET)
            works = [
                RoundShare(curve, multiple * float(self.rates[i]), float(self.catalog.slo[i]))
                for i, curve in enumerate(self.curves[n])
                if models >> i & 1
            ]
            low, high = (low, multiple) if smallest_batches(works) is None else (multiple, high)
            self.known[n, models] = low, high
        return multiple <= low


def _bits(models: int) -> list[int]:
    return [1 << i for i in range(models.bit_length()) if models >> i & 1]
