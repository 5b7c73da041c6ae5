"""What the other models of a partition do between two turns of one: sharing in time.

That time is a mean field: each other model k finds min(Poisson(λ_k · c), b_k) requests, where c is the length of the
very round, whatever the rest found. It is carried as four atoms: nobody waits, or three around the mean.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cotenant.planners.forecast.poisson_quadrature import poisson_nodes
from cotenant.planners.forecast.queue_batch import Array, Indices, QueueBatch, batch_seconds

LENGTHS = 12  # of rounds, at which the mean field is reckoned
RAMP = (np.arange(LENGTHS + 1) / LENGTHS) ** 1.5


class MeanField(msgspec.Struct):
    """What the other models of its lane do in a round of each chain, by the length of the round (chain, length).

    tables, flat: that length in seconds; E of the seconds that they run, the sum of each one's E², and the variance
    of all together; how many have something to run, and how likely any has. own: what the chain itself ran in a round
    that is of that length on average. empty: below 0 as long as one without it would be longer. total: requests/s.
    """

    tables: Array
    own: Array
    empty: Array
    total: Array


def first_crossing(table: Array, value: Array) -> tuple[Indices, Array]:
    """Where rows that ascend first reach the values (row, any): see `_between`."""
    steps = table.shape[1] - 1
    at = (table.T[1:, :, None] < value).sum(axis=0)
    index = np.minimum(at, steps - 1) + np.arange(len(table))[:, None] * (steps + 1)
    low = table.take(index)
    part = (value - low) / np.maximum(table.take(index + 1) - low, 1e-300)
    return index, np.minimum(part, 1.0)


def mean_field_of(chains: QueueBatch) -> MeanField:
    lane, rate, batch, seconds = chains.lane, chains.rate, chains.batch, chains.seconds
    every = np.arange(len(lane))
    same = (lane[:, None] == lane).astype(np.float64)
    others = same - np.eye(len(lane))
    # No round is longer than one of full batches.
    length = (same @ seconds[every, batch])[:, None] * RAMP
    mean = rate[:, None] * length
    counts, chance = poisson_nodes(mean, 1)
    rows = np.minimum(counts, batch[:, None])
    first = (chance * batch_seconds(seconds, every[:, None], rows)).sum(axis=0)
    second = (chance * batch_seconds(seconds * seconds, every[:, None], rows)).sum(axis=0)
    total = others @ rate
    tables = np.empty((6, *length.shape))
    tables[0] = length
    np.matmul(others, np.stack((first, second, second - first * first, -np.expm1(-mean))), out=tables[1:5])
    tables[5] = -np.expm1(-total[:, None] * length)
    # A round lasts own + first(round), and with nothing of its own the model sees the others' alone: the least such.
    empty = length - tables[1] / np.maximum(tables[5], 1e-300)
    empty[:, 0] = -(others @ (rate * seconds[:, 1])) / np.maximum(total, 1e-300)
    return MeanField(
        tables=tables.reshape(6, -1),
        own=np.maximum.accumulate(length - tables[1], axis=1),
        empty=np.maximum.accumulate(empty, axis=1),
        total=total,
    )


def round_lengths(chains: QueueBatch, field: MeanField, own: Array) -> tuple[Array, Array, Array]:
    """Seconds from one turn to the next where the model runs for `own` (chain, any; 0 first), and their probabilities,
    on a new first axis: an atom alone, or four.

    Also how likely the lane is idle when the model's turn comes and nothing waits.
    """
    index, part = first_crossing(field.own, own)
    index[:, :1], part[:, :1] = first_crossing(field.empty, np.zeros((len(own), 1)))
    low = field.tables.take(index, axis=1)
    step = field.tables.take(index + 1, axis=1) - low
    _, first, second, variance, some, busy = low + part * step
    # A long round makes the next one longer, by a part g: to first order in g that adds from nothing (rounds that
    # follow one another) to 2 g (their sum) to the variance. The simulator finds the middle.
    grows = np.minimum(step[1] / np.maximum(step[0], 1e-300), 1.0)
    square = first * first + variance * (1 + grows)
    # An empty queue waits for one batch of the others, not for a round of them.
    square[:, 0] = second[:, 0]
    likely = busy.copy()
    likely[:, 0] = some[:, 0]
    likely = np.maximum(likely, 1e-300)
    mean = first / likely
    # Gauss and Hermite's three points.
    apart = np.sqrt(np.maximum(3 * (square / likely - mean * mean), 0.0))
    time = np.stack((0 * own, np.maximum(mean - apart, 0.0), mean, mean + apart)) + own
    chance = np.stack((1 - busy, busy * (1 / 6), busy * (2 / 3), busy * (1 / 6)))
    return time, chance, (1 - busy[:, 0]) * chains.rate / (chains.rate + field.total)
