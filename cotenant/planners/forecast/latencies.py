"""Represent distributions of latencies as cumulated mass at fixed edges, which are fractions of the target."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from cotenant.planners.forecast.queue_batch import Array, Indices

BINS = 96  # edges of a distribution of latencies
BELOW = (np.arange(BINS + 1) / BINS) ** 2
EDGES: list[float] = BELOW.tolist()


def mass_below(owner: Indices, weight: Array, low: Array, width: Array, slo: Array) -> Array:
    """Return the exact mass below each edge of mixtures of uniforms, one mixture (row) for each target in `slo`.

    owner: row of each uniform; weight: its mass; low, width: where it lies, in seconds.
    """
    width = np.maximum(width, 1e-9)
    slope = weight / width
    corner = np.concatenate((low, low + width))
    slope = np.concatenate((slope, -slope))
    owner = np.concatenate((owner, owner))
    bin_index = np.minimum(np.sqrt(corner / slo.take(owner)) * BINS, BINS - 1).astype(np.int64) + owner * (BINS + 1) + 1
    shape = (len(slo), BINS + 1)
    slopes = np.bincount(bin_index, slope, len(slo) * (BINS + 1)).reshape(shape).cumsum(axis=1)
    offset = np.bincount(bin_index, slope * corner, len(slo) * (BINS + 1)).reshape(shape).cumsum(axis=1)
    result: Array = np.maximum.accumulate(np.maximum(slopes * slo[:, None] * BELOW - offset, 0.0), axis=1)
    return result


def quantiles(below: list[float], atoms: Sequence[tuple[float, float]], fractions: Sequence[float]) -> list[float]:
    """Return quantiles of a distribution: mass `below` each of EDGES, and `atoms` (position, mass), ascending."""
    total = below[-1] + sum([weight for _, weight in atoms])
    values = []
    for fraction in fractions:
        mass = fraction * total
        exact = None
        for position, weight in atoms:
            reached = _interpolated(EDGES, below, position)
            if reached < mass <= reached + weight:
                exact = position
                break
            if reached < mass:
                mass -= weight
        values.append(_interpolated(below, EDGES, mass) if exact is None else exact)
    return values


def _interpolated(x: list[float], y: list[float], at: float) -> float:
    """Interpolate linearly, constant beyond the ends: `np.interp` without an array for one number."""
    i = bisect_left(x, at)
    if i == 0 or i == len(x):
        return y[min(i, len(x) - 1)]
    return y[i] - (y[i] - y[i - 1]) * (x[i] - at) / (x[i] - x[i - 1])
