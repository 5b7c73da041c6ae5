"""Distributions of latencies, as what lies below each of a row of edges, which are parts of the target."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from cotenant.planners.forecast.queue_batch import Array, Indices

BINS = 96  # of a distribution of latencies
BELOW = (np.arange(BINS + 1) / BINS) ** 2
EDGES: list[float] = BELOW.tolist()


def mass_below(owner: Indices, weight: Array, low: Array, width: Array, slo: Array) -> Array:
    """Mixtures of uniforms, one for each target: how much lies below each of its edges, exactly."""
    width = np.maximum(width, 1e-9)
    slope = weight / width
    corner = np.concatenate((low, low + width))
    slope = np.concatenate((slope, -slope))
    owner = np.concatenate((owner, owner))
    place = np.minimum(np.sqrt(corner / slo.take(owner)) * BINS, BINS - 1).astype(np.int64) + owner * (BINS + 1) + 1
    shape = (len(slo), BINS + 1)
    slopes = np.bincount(place, slope, len(slo) * (BINS + 1)).reshape(shape).cumsum(axis=1)
    offset = np.bincount(place, slope * corner, len(slo) * (BINS + 1)).reshape(shape).cumsum(axis=1)
    result: Array = np.maximum.accumulate(np.maximum(slopes * slo[:, None] * BELOW - offset, 0.0), axis=1)
    return result


def quantiles(below: list[float], atoms: Sequence[tuple[float, float]], parts: Sequence[float]) -> list[float]:
    """Of what lies below EDGES, and in some atoms, by where they are."""
    total = below[-1] + sum([weight for _, weight in atoms])
    found = []
    for part in parts:
        wanted = part * total
        exact = None
        for place, weight in atoms:
            reached = _line(EDGES, below, place)
            if reached < wanted <= reached + weight:
                exact = place
                break
            if reached < wanted:
                wanted -= weight
        found.append(_line(below, EDGES, wanted) if exact is None else exact)
    return found


def _line(x: list[float], y: list[float], at: float) -> float:
    """Between points that ascend, and beyond them as at the last; as `np.interp`, without an array for a number."""
    i = bisect_left(x, at)
    if i == 0 or i == len(x):
        return y[min(i, len(x) - 1)]
    return y[i] - (y[i] - y[i - 1]) * (x[i] - at) / (x[i] - x[i - 1])
