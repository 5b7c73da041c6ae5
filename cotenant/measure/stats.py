"""What came of the requests: exact counts, and latencies in a histogram that stays small however long the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.request import Outcome, Request

FLOOR = 1e-6  # seconds; what is shorter counts as this
GROWTH = 1.02  # of the buckets' bounds: the middle of a bucket is within 1 % of all that fell in
_BUCKETS = math.ceil(math.log(1e10) / math.log(GROWTH))  # 1 µs to 10,000 s
_PENDING = 4096


class Histogram:
    """Durations in seconds. Quantiles are within 1 % (or 1 µs); count, mean, least and largest are exact.

    Buckets of equal width on a logarithmic scale, as in DDSketch (Masson et al., VLDB 2019). `extend` only appends:
    numpy counts some thousands at a time.
    """

    def __init__(self) -> None:
        self.sum = 0.0
        self.largest = 0.0
        self.least = math.inf
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
    def mean(self) -> float:
        """nan where nothing was added."""
        self._count()
        count = self.count
        return self.sum / count if count else math.nan

    def quantile(self, q: float) -> float:
        """The least value that is not exceeded by a fraction q of all; nan where nothing was added."""
        self._count()
        cumulative = np.cumsum(self._counts)
        count = int(cumulative[-1])
        if not count:
            return math.nan
        rank = max(1, math.ceil(q * count))
        if rank == count:
            return self.largest
        bucket = int(np.searchsorted(cumulative, rank))
        middle = FLOOR * math.pow(GROWTH, bucket + 0.5)
        return min(max(middle, self.least), self.largest)

    def _count(self) -> None:
        if not self._pending:
            return
        values: NDArray[np.float64] = np.fromiter(self._pending, np.float64, len(self._pending))
        self._pending.clear()
        self.sum += float(values.sum())
        self.least = min(self.least, float(values.min()))
        self.largest = max(self.largest, float(values.max()))
        buckets = (np.log(np.maximum(values, FLOOR) / FLOOR) / math.log(GROWTH)).astype(np.intp)
        self._counts += np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS)


class Tally:
    """The ends of one model's requests, and its batches.

    latency: of the served, from arrival to answer; refusal: of the refused, likewise. on_time: how many of the served
    met their deadline.
    ends: the others, by outcome. batches, rows: run so far; predicted, observed: seconds that they took together.
    """

    def __init__(self) -> None:
        self.latency = Histogram()
        self.refusal = Histogram()
        self.on_time = 0
        self.outcomes = {outcome: 0 for outcome in Outcome if outcome is not Outcome.SERVED}
        self.batches = 0
        self.rows = 0
        self.predicted = 0.0
        self.observed = 0.0

    def ended(self, requests: Sequence[Request], outcome: Outcome, now: float) -> None:
        if outcome is Outcome.SERVED:
            latencies: list[float] = []
            for request in requests:
                latencies.append(now - request.arrived)
                if request.deadline >= now:
                    self.on_time += 1
            self.latency.extend(latencies)
        else:
            self.outcomes[outcome] += len(requests)
            if outcome is Outcome.REJECTED:
                self.refusal.extend([now - request.arrived for request in requests])

    def ran(self, rows: int, predicted: float, observed: float) -> None:
        """A batch is done. predicted, observed: how long it was to take and took, in seconds."""
        self.batches += 1
        self.rows += rows
        self.predicted += predicted
        self.observed += observed

    @property
    def served(self) -> int:
        return self.latency.count

    @property
    def arrived(self) -> int:
        """All that have ended, however they did."""
        return self.served + sum(self.outcomes.values())

    @property
    def stayed(self) -> int:
        """Of those all whose caller did not leave."""
        return self.arrived - self.outcomes[Outcome.CANCELLED]

    @property
    def attainment(self) -> float:
        """Of all that arrived and stayed, the fraction answered in time; nan where there was none."""
        stayed = self.stayed
        return self.on_time / stayed if stayed else math.nan
