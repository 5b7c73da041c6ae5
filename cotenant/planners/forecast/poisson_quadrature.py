"""Represent arrival counts by a few weighted nodes: Poisson, or of every p-th arrival of a Poisson stream."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from cotenant.planners.forecast.queue_batch import Array, Indices

MAX_STRIDE = 8  # more lanes of a model hardly change the result

NODES = 10  # nodes of a distribution of counts
TAIL = 1e-4  # probability beyond the first and the last node
STEPS = 16  # table rows for each unit of √mean
ROWS = 14 * STEPS  # means beyond the last row are clipped: queues are shorter


@cache
def _table() -> Array:
    """Tabulate counts of every p-th arrival of a Poisson stream, p = 1 … MAX_STRIDE, in at most NODES runs of integers.

    For means from (r / STEPS)² to ((r + 1) / STEPS)²: probability of each run and its contribution to the mean, both at
    the lower end, and their increase to the upper end. Shape (4 · NODES, p and r).
    """
    mean = (np.arange(ROWS + 1) / STEPS)[:, None] ** 2
    largest = math.ceil(mean[-1, 0] + 7 * math.sqrt(mean[-1, 0]))
    integers = np.arange(MAX_STRIDE * (largest + 1))
    factorial = np.concatenate(([0.0], np.cumsum(np.log(integers[1:]))))
    count = np.arange(largest + 1)
    table = np.empty((4, NODES, MAX_STRIDE, ROWS))
    for stride in range(1, MAX_STRIDE + 1):
        k = integers[: stride * (largest + 1)]
        spread = np.maximum(mean * stride, 1e-300)
        cumulated = np.cumsum(np.exp(k * np.log(spread) - spread - factorial[: len(k)]), axis=-1)
        # Every stride-th arrival, at a phase that is uniform in 0 … stride - 1.
        below = cumulated.reshape(ROWS + 1, largest + 1, stride).mean(axis=-1)
        below[:, -1] = 1.0
        probability = np.diff(below, axis=-1, prepend=0.0)
        probability[:, -1] = 0.0
        moment = np.cumsum(probability * count, axis=-1)
        # The last run makes the mean exact.
        moment[:, -1] = mean[:, 0]
        low = (below[1:] < TAIL).sum(axis=-1)
        high = np.minimum((below[1:] < 1 - TAIL).sum(axis=-1), largest - 1)
        width = np.maximum((high - low) / (NODES - 1), 1.0)
        ends = low[:, None] + np.ceil(width[:, None] * np.arange(NODES)).astype(np.int64)
        ends = np.minimum(ends, largest)
        ends[:, -1] = largest
        for part, source in enumerate((below, moment)):
            lower, upper = (np.take_along_axis(rows, ends, axis=1) for rows in (source[:-1], source[1:]))
            lower, upper = (np.diff(rows, axis=1, prepend=0.0).T for rows in (lower, upper))
            table[part, :, stride - 1] = lower
            table[2 + part, :, stride - 1] = upper - lower
    return table.reshape(4 * NODES, MAX_STRIDE * ROWS)


def poisson_nodes(mean: Array, stride: Indices | int) -> tuple[Array, Array]:
    """Return nodes of the count of arrivals with some means, and their probabilities, on a new first axis.

    stride: count every p-th arrival of a Poisson stream of `stride` times the rate.
    """
    mean = np.minimum(mean, (ROWS / STEPS) ** 2)
    row = np.minimum(np.sqrt(mean) * STEPS, ROWS - 1).astype(np.int64)
    part = (mean * STEPS**2 - row * row) / (2 * row + 1)
    entries = _table().take(row + (stride - 1) * ROWS, axis=1)
    entries = entries[: 2 * NODES] + part * entries[2 * NODES :]
    probability = entries[:NODES]
    return entries[NODES:] / np.maximum(probability, 1e-9), probability
