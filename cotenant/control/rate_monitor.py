"""Estimate the rate at which requests of a model are offered, and notice at once when it has changed.

Counts of short intervals are kept. The estimate is the mean over the longest recent window in which the rate did not
change: whenever some latest part of the window differs from the rest by more than chance explains, the window shrinks
to that part (a generalised likelihood ratio over suffixes whose lengths double; Lai, "Sequential Changepoint Detection
in Quality Control and Dynamical Systems", 1995, section 3; the shrinking window is that of ADWIN, Bifet and Gavaldà,
2007). So a step is seen within a few dozen requests, and a constant rate is averaged over minutes.

Arrivals that come in bursts vary by more than Poisson arrivals do. Their index of dispersion divides every likelihood
ratio, as in a quasi-Poisson model: what bursts do is no change of rate.
"""

from __future__ import annotations

import itertools
import math
from collections import deque

import msgspec

DISPERSION_EVERY = 4  # intervals between two estimates of the dispersion, which cost more than the rest


class RateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """horizon: seconds of the longest window. threshold: log-likelihood ratio above which a change is no chance; in a
    test of Poisson counts, chance alone exceeds 14 once in some 4,000,000 times. dispersion_intervals: latest intervals
    that dispersion is estimated from."""

    horizon: float = 120.0
    threshold: float = 14.0
    dispersion_intervals: int = 120


class RateEstimate(msgspec.Struct, frozen=True):
    """rate: requests/s. seconds: of the window that it is the mean of. dispersion: variance over mean of the counts, at
    least 1, which is that of Poisson arrivals. before: the rate before the change with which the window begins; None
    where it begins with none."""

    rate: float
    seconds: float
    dispersion: float
    before: float | None = None

    @property
    def deviation(self) -> float:
        """Standard deviation of the estimate, in requests/s."""
        return math.sqrt(max(self.rate * self.seconds, 1.0) * self.dispersion) / self.seconds if self.seconds else 0.0

    def exceeds(self, rate: float, threshold: float) -> bool:
        """Tell whether requests come faster than `rate`, by a log-likelihood ratio above the threshold."""
        if self.rate <= rate:
            return False
        return log_likelihood_ratio(self.rate * self.seconds, rate * self.seconds) > threshold * self.dispersion


class RateMonitor:
    """Estimate the rate of one model from counts of successive intervals."""

    def __init__(self, options: RateOptions | None = None) -> None:
        self._options = options or RateOptions()
        self._counts: deque[int] = deque(maxlen=self._options.dispersion_intervals)
        # Seconds and requests before the end of each interval of the window, the first being its beginning.
        self._ends: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._dispersion = self._recent_dispersion = 1.0
        self._before: float | None = None
        self._observations = 0

    def observe(self, count: int, seconds: float, dispersion: float = 1.0) -> RateEstimate:
        """Count the requests of the next interval; return the estimate now. seconds: its length, above 0. dispersion:
        that is known from longer ago, which is the least."""
        self._counts.append(count)
        last_time, last_total = self._ends[-1]
        self._ends.append((last_time + seconds, last_total + count))
        while self._ends[-1][0] - self._ends[1][0] >= self._options.horizon:
            self._ends.popleft()
            self._before = None
        if self._observations % DISPERSION_EVERY == 0:
            self._recent_dispersion = _dispersion(list(self._counts))
        self._dispersion = max(self._recent_dispersion, dispersion)
        self._observations += 1
        self._forget_before_change()
        (begin, before), (end, total) = self._ends[0], self._ends[-1]
        return RateEstimate((total - before) / (end - begin), end - begin, self._dispersion, self._before)

    def _forget_before_change(self) -> None:
        """Shrink the window to the suffix that differs most from what is before it, where one does."""
        ends = self._ends
        (begin, before), (end, total) = ends[0], ends[-1]
        most, at = self._options.threshold * self._dispersion, 0
        length = 1
        while length < len(ends) - 1:
            time, count = ends[-1 - length]
            ratio = _change_ratio(count - before, time - begin, total - count, end - time)
            if ratio > most:
                most, at = ratio, length
            length *= 2
        if at:
            time, count = ends[-1 - at]
            self._before = (count - before) / (time - begin)
            kept = list(ends)[-1 - at :]
            ends.clear()
            ends.extend(kept)


def log_likelihood_ratio(count: float, expected: float) -> float:
    """Return the log-likelihood ratio of a Poisson count's own mean over the expected one."""
    if not count:
        return expected
    return count * math.log(count / expected) - (count - expected) if expected else math.inf


def _change_ratio(before: int, before_seconds: float, after: int, after_seconds: float) -> float:
    """Return the log-likelihood ratio of two rates over one rate."""
    rate = (before + after) / (before_seconds + after_seconds)
    if not rate:
        return 0.0
    return log_likelihood_ratio(before, rate * before_seconds) + log_likelihood_ratio(after, rate * after_seconds)


def _dispersion(counts: list[int]) -> float:
    """Estimate variance over mean from successive differences, on which a change of rate has little influence, at two
    lengths of interval: bursts are longer than one."""
    pooled = [sum(counts[i : i + 8]) for i in range(0, len(counts) - 7, 8)]
    return max(1.0, _successive_dispersion(counts), _successive_dispersion(pooled))


def _successive_dispersion(counts: list[int]) -> float:
    """Return half the trimmed mean square of successive differences over the mean count; 1 for fewer than 8 counts."""
    if len(counts) < 8 or not (total := sum(counts)):
        return 1.0
    squares = sorted((b - a) ** 2 for a, b in itertools.pairwise(counts))
    kept = squares[: len(squares) - max(1, len(squares) // 50)]  # the largest may be a step of the rate
    return sum(kept) / len(kept) / 2 / (total / len(counts))
