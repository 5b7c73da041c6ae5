"""Cut off fractional covers of single models: Chvátal-Gomory cuts on each model's demand.

Partitions that serve fractions a_c of a model's demand must satisfy Σ a_c ≥ 1, so Σ ⌈u · a_c⌉ ≥ ⌈u⌉ for any u > 0: of
partitions that each serve less than half, three are needed. A cut depends only on the fraction that a mode serves, so
modes can still be priced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

REL_SLACK = 1e-7  # margin of a multiplier for fractions that are off by rounding
MAX_NUMERATOR = 6  # multipliers are 1 to this, over a fraction that some partition serves
MAX_MULTIPLIER = 40.0
MAX_FRACTIONS = 40  # of a model, from which multipliers are made: those that most partitions serve
FRACTION_DIGITS = 9  # to which fractions count as equal
MIN_VIOLATION = 1e-3  # relative to a cut's right-hand side

Cut = tuple[int, float]  # a model, and u: each is Σ ⌈u · fraction⌉ · modes ≥ ⌈u⌉


def violated_cuts(models: IntArray, fractions: Array, counts: Array) -> list[Cut]:
    """Return each model's most violated cut, of those that are violated.

    Entry n: of `counts[n]` partitions each serves the fraction `fractions[n]` of the demand for `models[n]`.
    """
    if not len(models):
        return []
    keys, same = np.unique(np.stack([models, np.round(fractions, FRACTION_DIGITS)]), axis=1, return_inverse=True)
    counts = np.bincount(same.ravel(), weights=counts, minlength=keys.shape[1]).astype(float)
    models, fractions = keys[0].astype(np.int64), keys[1]
    order = np.lexsort((-counts, models))
    models, fractions, counts = models[order], fractions[order], counts[order]
    own, first, row = np.unique(models, return_index=True, return_inverse=True)
    place = np.arange(len(models)) - first[row]
    padded = np.zeros((2, len(own), int(place.max()) + 1))
    padded[0, row, place], padded[1, row, place] = fractions, counts
    fraction, count = padded
    tried = fraction[:, :MAX_FRACTIONS, None]
    with np.errstate(divide="ignore"):
        multipliers = np.arange(1, MAX_NUMERATOR + 1) / tried * (1 - REL_SLACK)
    multipliers = multipliers.reshape(len(own), -1)
    usable = multipliers <= MAX_MULTIPLIER
    multipliers = np.where(usable, multipliers, 1.0)
    served = np.zeros(multipliers.shape)
    for n in range(fraction.shape[1]):
        served += np.ceil(multipliers * fraction[:, n, None]) * count[:, n, None]
    violation = np.where(usable, 1 - served / np.ceil(multipliers), 0.0)
    best = violation.argmax(axis=1)
    at = np.arange(len(own))
    found = violation[at, best] > MIN_VIOLATION
    return [(int(own[n]), float(multipliers[n, best[n]])) for n in np.flatnonzero(found)]


class DemandCuts:
    """Hold cuts, and find those of a model."""

    def __init__(self) -> None:
        self.models = np.zeros(0, dtype=np.int64)
        self.multipliers = np.zeros(0)

    def __len__(self) -> int:
        return len(self.models)

    def extend(self, cuts: Sequence[Cut]) -> IntArray:
        """Add cuts and return their numbers."""
        first = len(self)
        self.models = np.append(self.models, [model for model, _ in cuts]).astype(np.int64)
        self.multipliers = np.append(self.multipliers, [multiplier for _, multiplier in cuts])
        return np.arange(first, len(self))

    def entries(self, models: IntArray, fractions: Array, numbers: IntArray | None = None) -> tuple[IntArray, ...]:
        """Return, for each serving of a model and each cut of that model: the place of the serving, the number of the
        cut, and ⌈u · fraction⌉. numbers: cuts, where not all count."""
        chosen = np.arange(len(self)) if numbers is None else numbers
        chosen = chosen[np.argsort(self.models[chosen], kind="stable")]
        cut_models = self.models[chosen]
        first = np.searchsorted(cut_models, models, side="left")
        many = np.searchsorted(cut_models, models, side="right") - first
        owner = np.repeat(np.arange(len(models)), many)
        cut = chosen[np.repeat(first - (np.cumsum(many) - many), many) + np.arange(len(owner))]
        return owner, cut, np.ceil(self.multipliers[cut] * fractions[owner]).astype(np.int64)
