"""Arrange samples for the regression of the Gaussian process: which ones it is fitted to, their terms and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cotenant.predictors import Load
from cotenant.predictors.gp_regression import Matrix, Terms
from cotenant.predictors.samples import Sample

# What is further from the median, in logs and in median absolute deviations, counts as this far.
MIN_OUTLYING = math.log(4)
MAX_DEVIATIONS = 10


def split_samples(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return the samples that the process is fitted to, and those with several co-located loads."""
    measured = {sample.victim.model for sample in samples if len(sample.colocated) == 1}
    return (
        [sample for sample in samples if len(sample.colocated) == 1 or sample.victim.model not in measured],
        [sample for sample in samples if len(sample.colocated) > 1],
    )


def name_numbers(samples: Sequence[Sample]) -> dict[str, int]:
    models = (load.model for sample in samples for load in (sample.victim, *sample.colocated))
    return {model: number for number, model in enumerate(dict.fromkeys(models))}


def runs_of(samples: Sequence[Sample]) -> list[tuple[Load, Sequence[Load]]]:
    return [(sample.victim, sample.colocated) for sample in samples]


def terms_of(
    runs: Sequence[tuple[Load, Sequence[Load]]], names: Mapping[str, int], of: Callable[[Load], Matrix]
) -> Terms:
    """Build the terms of runs; a model without a number is like no other."""
    pairs = [(i, victim, load) for i, (victim, beside) in enumerate(runs) for load in beside]
    return Terms(
        columns=np.array([np.concatenate((of(victim), of(load))) for _, victim, load in pairs]),
        victims=np.array([names.get(victim.model, -1) for _, victim, _ in pairs]),
        colocated=np.array([names.get(load.model, -1) for _, _, load in pairs]),
        owners=np.array([i for i, _, _ in pairs]),
    )


def log_slowdowns(samples: Sequence[Sample]) -> Matrix:
    """Return the logs of slowdowns; what lies far beyond the others is brought nearer, so that it does not decide."""
    values: Matrix = np.log([sample.slowdown for sample in samples])
    if not len(values):
        return values
    middle = np.median(values)
    bound = max(MIN_OUTLYING, MAX_DEVIATIONS * float(np.median(np.abs(values - middle))))
    clipped: Matrix = np.clip(values, middle - bound, middle + bound)
    return clipped
