"""The queues of some lanes as arrays, an entry each, and how long their batches take."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class QueueBatch(msgspec.Struct):
    """The queues of some lanes, an entry each. seconds: of batches 0, 1, …, the last repeated; where batches are very
    large, a group of requests counts as one. lanes: of the model; pool: as many times less do its arrivals vary.
    caution: by how much all is taken to last longer when requests are admitted."""

    lane: Indices
    batch: Indices
    rate: Array
    slo: Array
    pool: Indices
    lanes: Array
    seconds: Array
    caution: Array


def interpolation_index(table: Array, index: Indices, part: Array) -> Array:
    """Entries of a table, by their index in it flat, and how far on the way to the next one."""
    low = table.take(index)
    result: Array = low + part * (table.take(index + 1) - low)
    return result


def batch_seconds(seconds: Array, chain: Indices, rows: Array) -> Array:
    """Of batches of the chains given, linear between whole numbers of rows."""
    whole = rows.astype(np.int64)
    return interpolation_index(seconds, whole + chain * seconds.shape[1], rows - whole)
