"""Model the time that the other models of a partition take between two turns of one, as a mean field.

Each other model k finds min(Poisson(λ_k · c), b_k) requests, where c is the length of that same round, independently of
the rest. The distribution is represented by four atoms: no requests, or three around the mean.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cotenant.planners.forecast.poisson_quadrature import poisson_nodes
from cotenant.planners.forecast.queue_batch import Array, Indices, QueueBatch, batch_seconds

LENGTHS = 12  # round lengths at which the mean field is tabulated
RAMP = (np.arange(LENGTHS + 1) / LENGTHS) ** 1.5


class MeanField(msgspec.Struct):
    """Tabulate for each queue what the other models of its lane do in a round, by the length of the round: (queue,
    length).

    tables: flattened (6, queue, length): the length in seconds; mean seconds that they run, the sum of their second
    moments, and the variance of the total; expected number that have requests, and the probability that any has. own:
    seconds of the queue's own batch for which rounds have that mean length. empty: below 0 as long as a round without
    the queue would be longer. total: requests/s.
    """

    tables: Array
    own: Array
    empty: Array
    total: Array


def first_crossing(table: Array, value: Array) -> tuple[Indices, Array]:
    """Return where ascending rows of a table first reach values (row, any), as for `interpolate`."""
    steps = table.shape[1] - 1
    at = (table.T[1:, :, None] < value).sum(axis=0)
    index = np.minimum(at, steps - 1) + np.arange(len(table))[:, None] * (steps + 1)
    low = table.take(index)
    part = (value - low) / np.maximum(table.take(index + 1) - low, 1e-300)
    return index, np.minimum(part, 1.0)


def mean_field_of(queues: QueueBatch) -> MeanField:
    lane, rate, batch, seconds = queues.lane, queues.rate, queues.batch, queues.seconds
    every = np.arange(len(lane))
    same = (lane[:, None] == lane).astype(np.float64)
    others = same - np.eye(len(lane))
    # The longest round has full batches only.
    length = (same @ seconds[every, batch])[:, None] * RAMP
    mean = rate[:, None] * length
    counts, probability = poisson_nodes(mean, 1)
    rows = np.minimum(counts, batch[:, None])
    first = (probability * batch_seconds(seconds, every[:, None], rows)).sum(axis=0)
    second = (probability * batch_seconds(seconds * seconds, every[:, None], rows)).sum(axis=0)
    total = others @ rate
    tables = np.empty((6, *length.shape))
    tables[0] = length
    np.matmul(others, np.stack((first, second, second - first * first, -np.expm1(-mean))), out=tables[1:5])
    tables[5] = -np.expm1(-total[:, None] * length)
    # A round lasts own + first(round); without a batch of its own, the least fixed point of the others' alone.
    empty = length - tables[1] / np.maximum(tables[5], 1e-300)
    empty[:, 0] = -(others @ (rate * seconds[:, 1])) / np.maximum(total, 1e-300)
    return MeanField(
        tables=tables.reshape(6, -1),
        own=np.maximum.accumulate(length - tables[1], axis=1),
        empty=np.maximum.accumulate(empty, axis=1),
        total=total,
    )


def round_lengths(queues: QueueBatch, field: MeanField, own: Array) -> tuple[Array, Array, Array]:
    """Return seconds between turns where the model runs for `own` (queue, any; 0 first), and their probabilities.

    Both have a new first axis with four atoms. Third, the probability that the lane is idle when the model's turn comes
    and none of its requests waits.
    """
    index, part = first_crossing(field.own, own)
    index[:, :1], part[:, :1] = first_crossing(field.empty, np.zeros((len(own), 1)))
    low = field.tables.take(index, axis=1)
    step = field.tables.take(index + 1, axis=1) - low
    _, first, second, variance, some, busy = low + part * step
    # A longer round lengthens the next by a fraction g of that. To first order the variance grows by a factor between 1
    # (successive rounds) and 1 + 2 g (their sum); the simulator agrees with the middle.
    grows = np.minimum(step[1] / np.maximum(step[0], 1e-300), 1.0)
    square = first * first + variance * (1 + grows)
    # An empty queue waits for one batch of the others, not for a round of them.
    square[:, 0] = second[:, 0]
    likely = busy.copy()
    likely[:, 0] = some[:, 0]
    likely = np.maximum(likely, 1e-300)
    mean = first / likely
    # Three-point Gauss-Hermite quadrature.
    apart = np.sqrt(np.maximum(3 * (square / likely - mean * mean), 0.0))
    time = np.stack((0 * own, np.maximum(mean - apart, 0.0), mean, mean + apart)) + own
    probability = np.stack((1 - busy, busy * (1 / 6), busy * (2 / 3), busy * (1 / 6)))
    return time, probability, (1 - busy[:, 0]) * queues.rate / (queues.rate + field.total)
