"""Hold the queues of several lanes as arrays with an entry for each queue."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class QueueBatch(msgspec.Struct):
    """Hold queues of several lanes, one entry each; where batches are very large, a group of requests counts as one.

    lane: index; seconds: of batches 0, 1, …, the last repeated; lanes: that hold the model; stride: the factor by which
    the variance of its arrivals is smaller than Poisson; caution: the factor on latencies at admission.
    """

    lane: Indices
    batch: Indices
    rate: Array
    slo: Array
    stride: Indices
    lanes: Array
    seconds: Array
    caution: Array


def interpolate(table: Array, index: Indices, part: Array) -> Array:
    """Interpolate in a table between a flat index and the next, at a fraction `part` of the way."""
    low = table.take(index)
    result: Array = low + part * (table.take(index + 1) - low)
    return result


def batch_seconds(seconds: Array, queue: Indices, rows: Array) -> Array:
    """Return the seconds of batches of some queues, linear between whole numbers of rows."""
    whole = rows.astype(np.int64)
    return interpolate(seconds, whole + queue * seconds.shape[1], rows - whole)
