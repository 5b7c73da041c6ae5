"""Compose the slowdown beside several loads from the slowdowns beside each of them.

A device that processes several loads in turn makes a victim wait, between its own kernels, for those of each other load
(discriminatory processor sharing: Altman, Avrachenkov and Ayesta, Queueing Systems 53, 2006). The waits add up:

    slowdown = baseline + sum over co-located loads of (slowdown beside that load - baseline)

The baseline is the slowdown beside the load that interferes least. It is not 1 where the latency alone, to which all
slowdowns are relative, was measured under other conditions; such an error counts once, not once for each load.

Two facts bound and correct the sum. Loads that wait for each other keep the device busier than each does alone, so that
a set costs a little more than the sum, and a larger one more (mean value analysis: Reiser and Lavenberg, Journal of the
ACM 27, 1980). On average `Excess` knows that without measured sets; from these it learns by how much the composed
slowdowns of a model are off, which is no more in larger sets. And a device that always works does at
least as much for several loads as it does for one at a time: the throughputs relative to the baselines sum up to at
least 1. In KACE's runs of two to four models they sum up to at least 1.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cotenant.predictors import Load
from cotenant.predictors.gp_regression import Matrix

# For `waiting` 1. Chosen on KACE's sets of three; its sets of four were held back.
MEAN_EXCESS = 0.14  # of the log of a slowdown over the composed one, for two co-located loads; see `_growth`
EFFECT = 0.07  # standard deviation of each effect on it
NOISE = 0.2  # standard deviation of a sample, for two co-located loads
MAX_EXCESS = 1.0  # beyond this a sample counts as this far from the mean: an outlier does not decide
MIN_WAITING = 0.2  # sets that hardly interfere count as this: their excess says nothing

Effect = tuple[str, str | Load]  # role, and model or load


class MeasuredSet(NamedTuple):
    """Describe a measured set. waiting: see there; excess: log of its measured over its composed slowdown."""

    victim: Load
    colocated: Sequence[Load]
    waiting: float
    excess: float


def composed(baseline: float, slowdowns: Sequence[float]) -> tuple[float, list[float]]:
    """Return the slowdown beside several loads, without their excess, and its elasticity to that beside each.

    slowdowns: beside each load; none counts less than the baseline.
    """
    beside = [max(slowdown, baseline) for slowdown in slowdowns]
    total = sum(beside) - (len(beside) - 1) * baseline
    return total, [slowdown / total for slowdown in beside]


def waiting(baseline: float, total: float) -> float:
    """Return how an excess grows with the fraction of time spent waiting; beside loads that do not interfere there is
    none. total: the composed slowdown.
    """
    return math.sqrt(max(0.0, 1 - baseline / total))


class Excess:
    """Predict the log of the slowdown beside several loads over the composed one, by random effects.

    The victim's model and load, the co-located models and loads, and all sets each have an effect of prior mean 0 that
    is added to MEAN_EXCESS. leave_out_errors, leave_out_variances: of each measured set, from the others.
    """

    def __init__(self, sets: Sequence[MeasuredSet]) -> None:
        weights = [dict(_weights(each.victim, each.colocated)) for each in sets]
        self._index = {effect: i for i, effect in enumerate(dict.fromkeys(each for row in weights for each in row))}
        design = np.zeros((len(sets), len(self._index)))
        for i, row in enumerate(weights):
            for effect, weight in row.items():
                design[i, self._index[effect]] = weight
        waits = np.array([max(each.waiting, MIN_WAITING) for each in sets])
        growths = np.array([_growth(each.colocated) for each in sets])
        over_mean = np.array([each.excess for each in sets]) / waits - MEAN_EXCESS * growths
        # The noise of a set grows with it, too: so divided all have the same.
        residuals = np.clip(over_mean, -MAX_EXCESS, MAX_EXCESS) / growths
        design /= growths[:, None]
        self._covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(len(self._index)) / EFFECT**2)
        effects = self._covariance @ design.T @ residuals / NOISE**2
        self._effects: list[float] = effects.tolist()
        remaining = 1 - ((design @ self._covariance) * design).sum(axis=1) / NOISE**2
        self.leave_out_errors: Matrix = waits * growths * (residuals - design @ effects) / remaining
        self.leave_out_variances: Matrix = (waits * growths * NOISE) ** 2 / remaining

    def of(self, victim: Load, colocated: Sequence[Load]) -> tuple[float, float]:
        """Return mean and variance of the excess of a set, for `waiting` 1."""
        growth = _growth(colocated)
        mean, variance = MEAN_EXCESS * growth, (NOISE * growth) ** 2
        known, known_weights = [], []
        for effect, weight in _weights(victim, colocated):
            i = self._index.get(effect)
            if i is None:
                variance += (EFFECT * weight) ** 2
            else:
                mean += self._effects[i] * weight
                known.append(i)
                known_weights.append(weight)
        if known:
            weights = np.array(known_weights)
            variance += float(weights @ self._covariance[np.ix_(known, known)] @ weights)
        return mean, variance


def _growth(colocated: Sequence[Load]) -> float:
    """Return how the mean excess and the noise grow with a set: 0 for one co-located load, 1 for two."""
    return math.log2(len(colocated))


def _weights(victim: Load, colocated: Sequence[Load]) -> Iterator[tuple[Effect, float]]:
    yield ("all", ""), 1.0
    yield ("victim", victim.model), 1.0
    yield ("victim", victim), 1.0
    counts: dict[Effect, int] = {}
    for load in colocated:
        effects: tuple[Effect, Effect] = (("colocated", load.model), ("colocated", load))
        for effect in effects:
            counts[effect] = counts.get(effect, 0) + 1
    for effect, count in counts.items():
        yield effect, count / len(colocated)
