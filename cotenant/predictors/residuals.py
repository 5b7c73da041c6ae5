"""Correct the Gaussian process (gp_regression.py) by the residuals of the samples of a load.

A process averages whatever is similar. But runs of one load may fall into groups (in published A100 measurements
latencies jump by 4 to 5 ms from run to run), and the mean of two groups is near neither. So the mean is moved to a mode
of the residuals of the same victim, batch and share, and from there some way towards their mean, which costs most runs
little and spares those of the other group the largest errors. The mode is found by mean shift (Comaniciu and Meer, IEEE
Transactions on Pattern Analysis and Machine Intelligence 24, 2002), in which samples with the same co-located models
weigh more. These were often measured one after another, and belong to one group. It also removes errors of the latency
alone, to which all samples of a load are relative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.predictors import Load
from cotenant.predictors.gp_regression import GpRegression, Matrix
from cotenant.predictors.samples import Sample

MIN_SAMPLES = 3  # minimum samples of a load
# Chosen on ten random splits of the A100's pairs, with seed 0; those with seed 7 were held back.
GROUP_WIDTH = 2.3  # bandwidth, in standard deviations of the prior's noise
SAME_COLOCATED_WEIGHT = 5.0  # weight of a sample with the same co-located models; others weigh 1
TOWARDS_MEAN = 0.15  # of the way from mode to mean
MEAN_SHIFT_STEPS = 5  # maximum iterations of the mode search

ModelNames = tuple[str, ...]


class ResidualModes:
    """Hold the residuals of one load. values: residuals of its samples; colocated: their co-located models."""

    def __init__(self, values: Matrix, colocated: Sequence[ModelNames], width: float) -> None:
        self._values = values
        self._beside = colocated
        self._width = width
        self._mode_cache: dict[ModelNames, float] = {}

    def of(self, colocated: ModelNames) -> float:
        """Return what to add to the mean under co-location with these models."""
        modes = self._mode_cache.get(colocated)
        if modes is None:
            modes = self._mode_cache[colocated] = _centre(self._values, self._weights(colocated), self._width)
        return modes

    def without_each(self) -> Matrix:
        """Return for each sample what the others add to its mean."""
        modes = np.zeros(len(self._values))
        for i, colocated in enumerate(self._beside):
            weights = self._weights(colocated)
            weights[i] = 0.0
            if len(self._values) > MIN_SAMPLES:
                modes[i] = _centre(self._values, weights, self._width)
        return modes

    def _weights(self, colocated: ModelNames) -> Matrix:
        same = np.array([each == colocated for each in self._beside])
        return np.where(same, SAME_COLOCATED_WEIGHT, 1.0)


def fit_residual_modes(process: GpRegression, samples: Sequence[Sample]) -> dict[Load, ResidualModes]:
    """Return the residual modes of each load with MIN_SAMPLES or more. samples: those of the process."""
    residuals = process.noises * process.alpha
    width = GROUP_WIDTH * process.prior.noise
    return {
        load: ResidualModes(residuals[indices], [names(samples[i].colocated) for i in indices], width)
        for load, indices in _indices_by_victim(samples).items()
        if len(indices) >= MIN_SAMPLES
    }


def without_each(process: GpRegression, samples: Sequence[Sample]) -> Matrix:
    """Return for each sample what the others of its load add to its mean."""
    modes = np.zeros(len(samples))
    indices = _indices_by_victim(samples)
    for load, modes_of_load in fit_residual_modes(process, samples).items():
        modes[indices[load]] = modes_of_load.without_each()
    return modes


def names(colocated: Sequence[Load]) -> ModelNames:
    """Return the sorted names of co-located models."""
    if len(colocated) == 1:
        return (colocated[0].model,)
    return tuple(sorted(load.model for load in colocated))


def _indices_by_victim(samples: Sequence[Sample]) -> dict[Load, NDArray[np.int64]]:
    indices: dict[Load, list[int]] = {}
    for i, sample in enumerate(samples):
        indices.setdefault(sample.victim, []).append(i)
    return {load: np.array(indices) for load, indices in indices.items()}


def _centre(values: Matrix, weights: Matrix, width: float) -> float:
    """Return the mode of weighted values, by mean shift from the value of highest density, moved towards their mean."""
    kernel = np.exp(-0.5 * ((values[:, None] - values) / width) ** 2)
    mode = float(values[(kernel @ weights).argmax()])
    for _ in range(MEAN_SHIFT_STEPS):
        kernel = weights * np.exp(-0.5 * ((values - mode) / width) ** 2)
        mode = float(kernel @ values / kernel.sum())
    mean = float(weights @ values / weights.sum())
    return mode + TOWARDS_MEAN * (mean - mode)
