"""What a process (process.py) leaves of the samples of a load, where most of them agree.

A process averages whatever is alike. But runs of one load may fall into groups (on the A100 of others' data latencies
jump by 4 to 5 ms from run to run), and what lies between two groups is near nobody. So the mean is moved by a mode of
what is left of the samples of the same victim, batch and share: found by mean shift (Comaniciu and Meer, IEEE
Transactions on Pattern Analysis and Machine Intelligence 24, 2002), where those beside the same models count more. Runs
of those often followed each other, and are of one group. It also takes away what was wrong with the latency alone,
which all samples of a load are measured against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.predictors import Load
from cotenant.predictors.gp_regression import GpRegression, Matrix
from cotenant.predictors.samples import Sample

FEWEST = 3  # samples of a load
WIDTH = 1.5  # of a group, in standard deviations of the usual noise
BESIDE_SAME = 5.0  # what a sample beside the same models counts, where one beside others counts 1
STEPS = 5  # of mean shift

Names = tuple[str, ...]


class ResidualModes:
    """Of one load. values: what is left of the log of each sample's slowdown. beside: whom, by name."""

    def __init__(self, values: Matrix, beside: Sequence[Names], width: float) -> None:
        self._values = values
        self._beside = beside
        self._width = width
        self._known: dict[Names, float] = {}

    def of(self, beside: Names) -> float:
        found = self._known.get(beside)
        if found is None:
            found = self._known[beside] = _mode(self._values, self._weights(beside), self._width)
        return found

    def without_each(self) -> Matrix:
        """For each sample, what the others say."""
        found = np.zeros(len(self._values))
        for i, beside in enumerate(self._beside):
            weights = self._weights(beside)
            weights[i] = 0.0
            if len(self._values) > FEWEST:
                found[i] = _mode(self._values, weights, self._width)
        return found

    def _weights(self, beside: Names) -> Matrix:
        same = np.array([each == beside for each in self._beside])
        return np.where(same, BESIDE_SAME, 1.0)


def fit_residual_modes(process: GpRegression, samples: Sequence[Sample]) -> dict[Load, ResidualModes]:
    """Of loads with FEWEST samples or more. samples: those of the process."""
    left = process.noises * process.pull
    width = WIDTH * process.prior.noise
    return {
        load: ResidualModes(left[places], [names(samples[i].colocated) for i in places], width)
        for load, places in _places(samples).items()
        if len(places) >= FEWEST
    }


def without_each(process: GpRegression, samples: Sequence[Sample]) -> Matrix:
    """For each sample, what the others of its load say."""
    found = np.zeros(len(samples))
    places = _places(samples)
    for load, remainder in fit_residual_modes(process, samples).items():
        found[places[load]] = remainder.without_each()
    return found


def names(colocated: Sequence[Load]) -> Names:
    if len(colocated) == 1:
        return (colocated[0].model,)
    return tuple(sorted(load.model for load in colocated))


def _places(samples: Sequence[Sample]) -> dict[Load, NDArray[np.int64]]:
    found: dict[Load, list[int]] = {}
    for i, sample in enumerate(samples):
        found.setdefault(sample.victim, []).append(i)
    return {load: np.array(places) for load, places in found.items()}


def _mode(values: Matrix, weights: Matrix, width: float) -> float:
    """Where most weight lies within a width or so of a value."""
    near = np.exp(-0.5 * ((values[:, None] - values) / width) ** 2)
    mode = float(values[(near @ weights).argmax()])
    for _ in range(STEPS):
        pulls = weights * np.exp(-0.5 * ((values - mode) / width) ** 2)
        mode = float(pulls @ values / pulls.sum())
    return mode
