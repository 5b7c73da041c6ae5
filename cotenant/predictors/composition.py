"""Compose the slowdown beside several loads from the slowdowns beside each of them.

A device that processes several loads in turn makes a victim wait, between its own kernels, for those of each other load
(discriminatory processor sharing: Altman, Avrachenkov and Ayesta, Queueing Systems 53, 2006). The waits add up:

    slowdown = baseline + sum over co-located loads of (slowdown beside that load - baseline)

The baseline is the slowdown beside the load that interferes least. It is not 1 where the latency alone, to which all
slowdowns are relative, was measured under other conditions; such an error counts once, not once for each load.

Two facts bound and correct the sum. Loads that wait for each other keep the device busier than each does alone, so that
a set costs a little more than the sum (mean value analysis: Reiser and Lavenberg, Journal of the ACM 27, 1980).
`Excess` learns how much from measured sets, and knows an average without any. And a device that always works does at
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

# For `growth` 1. Chosen on KACE's sets of three; its sets of four were held back.
MEAN_EXCESS = 0.14  # of the log of a slowdown over the composed one
EFFECT = 0.1  # standard deviation of each effect on it
NOISE = 0.2  # standard deviation of a sample
MAX_EXCESS = 1.0  # beyond this a sample counts as this far from the mean: an outlier does not decide
MIN_GROWTH = 0.2  # sets that hardly interfere count as this: their excess says nothing

Effect = tuple[str, str | Load]  # role, and model or load


class MeasuredSet(NamedTuple):
    """Describe a measured set. growth: see there; excess: log of its measured over its composed slowdown."""

    victim: Load
    colocated: Sequence[Load]
    growth: float
    excess: float


def composed(baseline: float, slowdowns: Sequence[float]) -> tuple[float, list[float]]:
    """Return the slowdown beside several loads, without their excess, and its elasticity to that beside each.

    slowdowns: beside each load; none counts less than the baseline.
    """
    beside = [max(slowdown, baseline) for slowdown in slowdowns]
    total = sum(beside) - (len(beside) - 1) * baseline
    return total, [slowdown / total for slowdown in beside]


def growth(count: int, baseline: float, total: float) -> float:
    """Return how an excess grows: with the number of co-located loads, and with the fraction of time spent waiting.

    Beside one load, or beside loads that do not interfere, there is none. total: the composed slowdown.
    """
    return math.log2(count) * math.sqrt(max(0.0, 1 - baseline / total))


class Excess:
    """Predict the log of the slowdown beside several loads over the composed one, by random effects.

    The victim's model and load, and the co-located models and loads, each have an effect of prior mean 0; all sets have
    one of prior mean MEAN_EXCESS. leave_out_errors, leave_out_variances: of each measured set, from the others.
    """

    def __init__(self, sets: Sequence[MeasuredSet]) -> None:
        weights = [dict(_weights(each.victim, each.colocated)) for each in sets]
        self._index = {effect: i for i, effect in enumerate(dict.fromkeys(each for row in weights for each in row))}
        design = np.zeros((len(sets), len(self._index)))
        for i, row in enumerate(weights):
            for effect, weight in row.items():
                design[i, self._index[effect]] = weight
        growths = np.array([max(each.growth, MIN_GROWTH) for each in sets])
        residuals = np.clip(np.array([each.excess for each in sets]) / growths - MEAN_EXCESS, -MAX_EXCESS, MAX_EXCESS)
        self._covariance = np.linalg.inv(design.T @ design / NOISE**2 + np.eye(len(self._index)) / EFFECT**2)
        means = self._covariance @ design.T @ residuals / NOISE**2
        self._means: list[float] = means.tolist()
        remaining = 1 - ((design @ self._covariance) * design).sum(axis=1) / NOISE**2
        self.leave_out_errors: Matrix = growths * (residuals - design @ means) / remaining
        self.leave_out_variances: Matrix = (growths * NOISE) ** 2 / remaining

    def of(self, victim: Load, colocated: Sequence[Load]) -> tuple[float, float]:
        """Return mean and variance of the excess of a set of growth 1."""
        mean, variance = MEAN_EXCESS, NOISE**2
        known, known_weights = [], []
        for effect, weight in _weights(victim, colocated):
            i = self._index.get(effect)
            if i is None:
                variance += (EFFECT * weight) ** 2
            else:
                mean += self._means[i] * weight
                known.append(i)
                known_weights.append(weight)
        if known:
            weights = np.array(known_weights)
            variance += float(weights @ self._covariance[np.ix_(known, known)] @ weights)
        return mean, variance


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
