"""How many requests arrive in a while: Poisson counts, of all or of every p-th, in a dozen points."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from cotenant.planners.forecast.queue_batch import Array, Indices

POOL = 8  # lanes of a model beyond these change little

NODES = 10  # of a distribution of counts
TAIL = 1e-4  # what the first and the last of them stand for
STEPS = 16  # rows of the table of nodes for each unit of √mean
ROWS = 14 * STEPS  # where that ends, queues do


@cache
def _table() -> Array:
    """How often every p-th of a Poisson stream comes, p = 1 … POOL, counts in at most NODES runs of whole numbers.

    For means from (r / STEPS)² to ((r + 1) / STEPS)²: how likely each run is and its part of the mean, both at the
    lower end, and by how much each grows to the upper one (4 · NODES, p and r).
    """
    mean = (np.arange(ROWS + 1) / STEPS)[:, None] ** 2
    top = math.ceil(mean[-1, 0] + 7 * math.sqrt(mean[-1, 0]))
    every = np.arange(POOL * (top + 1))
    factorial = np.concatenate(([0.0], np.cumsum(np.log(every[1:]))))
    count = np.arange(top + 1)
    table = np.empty((4, NODES, POOL, ROWS))
    for pool in range(1, POOL + 1):
        k = every[: pool * (top + 1)]
        spread = np.maximum(mean * pool, 1e-300)
        cumulated = np.cumsum(np.exp(k * np.log(spread) - spread - factorial[: len(k)]), axis=-1)
        # An arrival is the lane's with a phase that is uniform in 0 … pool - 1.
        below = cumulated.reshape(ROWS + 1, top + 1, pool).mean(axis=-1)
        below[:, -1] = 1.0
        chance = np.diff(below, axis=-1, prepend=0.0)
        chance[:, -1] = 0.0
        moment = np.cumsum(chance * count, axis=-1)
        # The tail makes the mean exact.
        moment[:, -1] = mean[:, 0]
        low = (below[1:] < TAIL).sum(axis=-1)
        high = np.minimum((below[1:] < 1 - TAIL).sum(axis=-1), top - 1)
        width = np.maximum((high - low) / (NODES - 1), 1.0)
        ends = low[:, None] + np.ceil(width[:, None] * np.arange(NODES)).astype(np.int64)
        ends = np.minimum(ends, top)
        ends[:, -1] = top
        for part, source in enumerate((below, moment)):
            now, then = (np.take_along_axis(rows, ends, axis=1) for rows in (source[:-1], source[1:]))
            now, then = (np.diff(rows, axis=1, prepend=0.0).T for rows in (now, then))
            table[part, :, pool - 1] = now
            table[2 + part, :, pool - 1] = then - now
    return table.reshape(4 * NODES, POOL * ROWS)


def poisson_nodes(mean: Array, pool: Indices | int) -> tuple[Array, Array]:
    """Counts of arrivals with such a mean, and how likely each is, on a new first axis."""
    mean = np.minimum(mean, (ROWS / STEPS) ** 2)
    row = np.minimum(np.sqrt(mean) * STEPS, ROWS - 1).astype(np.int64)
    part = (mean * STEPS**2 - row * row) / (2 * row + 1)
    found = _table().take(row + (pool - 1) * ROWS, axis=1)
    found = found[: 2 * NODES] + part * found[2 * NODES :]
    chance = found[:NODES]
    return found[NODES:] / np.maximum(chance, 1e-9), chance
