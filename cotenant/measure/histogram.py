"""Count durations in a histogram that stays small however long the run. A file of its own, to be compiled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

FLOOR = 1e-6  # seconds; shorter durations count as this
GROWTH = 1.02  # of the buckets' bounds: the middle of a bucket is within 1 % of all that fell in
_BUCKETS = math.ceil(math.log(1e10) / math.log(GROWTH))  # 1 µs to 10,000 s
_PENDING = 4096


class Histogram:
    """Count durations in seconds. Quantiles are within 1 % (or 1 µs); count, total, mean, least and largest are exact.

    Buckets of equal width on a logarithmic scale, as in DDSketch (Masson et al., VLDB 2019). `extend` only appends:
    numpy counts some thousands at a time, and before any result is computed.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._largest = 0.0
        self._least = math.inf
        self._counts = np.zeros(_BUCKETS, dtype=np.int64)
        self._pending: list[float] = []

    def extend(self, values: Iterable[float]) -> None:
        self._pending.extend(values)
        if len(self._pending) >= _PENDING:
            self._count()

    @property
    def count(self) -> int:
        return int(self._counts.sum()) + len(self._pending)

    @property
    def total(self) -> float:
        self._count()
        return self._total

    @property
    def least(self) -> float:
        """The least value; inf where nothing was added."""
        self._count()
        return self._least

    @property
    def largest(self) -> float:
        """The largest value; 0 where nothing was added."""
        self._count()
        return self._largest

    @property
    def mean(self) -> float:
        """The mean; nan where nothing was added."""
        count = self.count
        return self.total / count if count else math.nan

    def quantile(self, q: float) -> float:
        """Return the least value that is not exceeded by a fraction q of all; nan where nothing was added."""
        self._count()
        cumulative = np.cumsum(self._counts)
        count = int(cumulative[-1])
        if not count:
            return math.nan
        rank = max(1, math.ceil(q * count))
        if rank == count:
            return self._largest
        bucket = int(np.searchsorted(cumulative, rank))
        middle = FLOOR * math.pow(GROWTH, bucket + 0.5)
        return min(max(middle, self._least), self._largest)

    def counts(self) -> NDArray[np.int64]:
        """Return how many values each bucket has now. The difference of two such is what came between them, for
        `quantiles`."""
        self._count()
        return self._counts.copy()

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """Return how many values do not exceed each bound, in seconds; each bound is met within 1 %."""
        self._count()
        cumulative = np.cumsum(self._counts)
        below = [round(math.log(max(bound, FLOOR) / FLOOR) / math.log(GROWTH)) for bound in bounds]
        return [int(cumulative[min(buckets, _BUCKETS) - 1]) if buckets else 0 for buckets in below]

    def _count(self) -> None:
        if not self._pending:
            return
        values: NDArray[np.float64] = np.fromiter(self._pending, np.float64, len(self._pending))
        self._pending.clear()
        self._total += float(values.sum())
        self._least = min(self._least, float(values.min()))
        self._largest = max(self._largest, float(values.max()))
        buckets = (np.log(np.maximum(values, FLOOR) / FLOOR) / math.log(GROWTH)).astype(np.intp)
        self._counts += np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS)


def quantiles(counts: NDArray[np.int64], at: Sequence[float]) -> list[float]:
    """Return quantiles, in seconds, of values that buckets count as those of a `Histogram`; nan where there are
    none."""
    cumulative = np.cumsum(counts)
    count = int(cumulative[-1])
    if not count:
        return [math.nan] * len(at)
    ranks = [max(1, math.ceil(q * count)) for q in at]
    return [FLOOR * math.pow(GROWTH, int(np.searchsorted(cumulative, rank)) + 0.5) for rank in ranks]
