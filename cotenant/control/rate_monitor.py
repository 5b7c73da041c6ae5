"""Estimate the rate at which requests of a model are offered, and notice at once when it has changed.

Counts of short intervals are kept. The estimate is the mean over the longest recent window in which the rate did not
change: whenever some latest part of the window differs from the rest by more than chance explains, the window shrinks
to that part (a generalised likelihood ratio over suffixes whose lengths grow by half; Lai, "Sequential Changepoint
Detection in Quality Control and Dynamical Systems", 1995, section 3; the shrinking window is that of ADWIN, Bifet and
Gavaldà, 2007). So a step is seen within a few dozen requests, and a constant rate is averaged over minutes.

Arrivals that come in bursts vary by more than Poisson arrivals do. Their index of dispersion divides every likelihood
ratio, as in a quasi-Poisson model: what bursts do is no change of rate. An index that Poisson arrivals may have by
chance, or by a step of their rate, divides nothing: a step would hide itself.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

import msgspec

from cotenant.control.successive_differences import SuccessiveDifferences

DISPERSION_EVERY = 4  # intervals between two estimates of the dispersion, which cost more than the rest
POOLED = 8  # intervals that are added up for a second estimate: bursts are longer than one
CHANCE = 2.0  # standard deviations by which the dispersion of Poisson counts is thought to exceed 1


class RateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """horizon: seconds of the longest window. threshold: log-likelihood ratio above which a change is no chance; in a
    test of Poisson counts, chance alone exceeds 12 once in some million times. dispersion_intervals: latest intervals
    that dispersion is estimated from."""

    horizon: float = 120.0
    threshold: float = 12.0
    dispersion_intervals: int = 120


class RateEstimate(msgspec.Struct, frozen=True):
    """rate: requests/s. seconds: of the window that it is the mean of. dispersion: variance over mean of the counts, at
    least 1, which is that of Poisson arrivals. before, before_seconds: the rate in the rest of the horizon, before the
    change with which the window begins, and its length; None where it begins with none."""

    rate: float
    seconds: float
    dispersion: float
    before: float | None = None
    before_seconds: float = 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the estimate, in requests/s."""
        return math.sqrt(max(self.rate * self.seconds, 1.0) * self.dispersion) / self.seconds if self.seconds else 0.0

    def exceeds(self, rate: float, threshold: float) -> bool:
        """Tell whether requests come faster than `rate`, by a log-likelihood ratio above the threshold."""
        if self.rate <= rate:
            return False
        return log_likelihood_ratio(self.rate * self.seconds, rate * self.seconds) > threshold * self.dispersion

    def rose(self, threshold: float, least: float = 0.0) -> bool:
        """Tell whether the rate is higher than before the change, by a log-likelihood ratio above the threshold that
        allows for either being an estimate. least: requests/s that the rate before is taken to have had."""
        if self.before is None or self.rate <= (before := max(self.before, least)):
            return False
        counts = before * self.before_seconds, self.rate * self.seconds
        return _change_ratio(counts[0], self.before_seconds, counts[1], self.seconds) > threshold * self.dispersion


class RateMonitor:
    """Estimate the rate of one model from counts of successive intervals."""

    def __init__(self, options: RateOptions | None = None) -> None:
        self._options = options or RateOptions()
        self._counts = SuccessiveDifferences(self._options.dispersion_intervals)
        # Seconds and requests before the end of each interval of the horizon, the first being its beginning.
        self._ends: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._window = 0  # latest intervals in which the rate did not change
        self._dispersion = self._recent_dispersion = 1.0
        self._observations = 0

    def observe(self, count: int, seconds: float, dispersion: float = 1.0) -> RateEstimate:
        """Count the requests of the next interval; return the estimate now. seconds: its length, above 0. dispersion:
        that is known from longer ago, which is the least."""
        self._counts.append(count)
        last_time, last_total = self._ends[-1]
        now = last_time + seconds
        ends = self._ends
        ends.append((now, last_total + count))
        while now - ends[1][0] >= self._options.horizon:
            ends.popleft()
        self._window = min(self._window + 1, len(ends) - 1)
        if self._observations % DISPERSION_EVERY == 0:
            self._recent_dispersion = _dispersion(self._counts)
        self._dispersion = max(self._recent_dispersion, dispersion)
        self._observations += 1
        self._forget_before_change()
        (first, remembered), (begin, before), (end, total) = ends[0], ends[-1 - self._window], ends[-1]
        known = begin - first
        earlier = (before - remembered) / known if known else None
        return RateEstimate((total - before) / (end - begin), end - begin, self._dispersion, earlier, known)

    def _forget_before_change(self) -> None:
        """Shrink the window to the suffix that differs most from what is before it, where one does."""
        ends = self._ends
        (begin, before), (end, total) = ends[-1 - self._window], ends[-1]
        whole, seconds = total - before, end - begin
        most, changed = self._options.threshold * self._dispersion, self._window
        length = 1
        while length < self._window:
            time, count = ends[-1 - length]
            expected = whole * (end - time) / seconds
            # Chi-squared bounds the likelihood ratio from above, and takes no logarithm.
            if (total - count - expected) ** 2 * whole > most * expected * (whole - expected):
                ratio = _change_ratio(count - before, time - begin, total - count, end - time)
                if ratio > most:
                    most, changed = ratio, length
            length += (length + 1) // 2
        self._window = changed


def log_likelihood_ratio(count: float, expected: float) -> float:
    """Return the log-likelihood ratio of a Poisson count's own mean over the expected one."""
    if not count:
        return expected
    return count * math.log(count / expected) - (count - expected) if expected else math.inf


def _change_ratio(before: float, before_seconds: float, after: float, after_seconds: float) -> float:
    """Return the log-likelihood ratio of two rates over one rate."""
    rate = (before + after) / (before_seconds + after_seconds)
    if not rate:
        return 0.0
    return log_likelihood_ratio(before, rate * before_seconds) + log_likelihood_ratio(after, rate * after_seconds)


def _dispersion(counts: SuccessiveDifferences) -> float:
    """Estimate variance over mean from successive differences, at two lengths of interval; 1 where it exceeds that by
    no more than chance explains."""
    remaining = iter(counts.values)
    pooled = SuccessiveDifferences(max(len(counts.values), 2))
    for _ in range(len(counts.values) // POOLED):
        pooled.append(sum(islice(remaining, POOLED)))
    return max(_beyond_chance(counts), _beyond_chance(pooled))


def _beyond_chance(counts: SuccessiveDifferences) -> float:
    """Return variance over mean; 1 for fewer than 8 counts, and where chance explains it."""
    known = len(counts.values)
    if known < 8 or not (total := sum(counts.values)):
        return 1.0
    # A step within an interval makes two large differences.
    dispersion = counts.variance(max(2, (known - 1) // 50)) / (total / known)
    # The mean of n squared differences of normal values has a relative variance of 3 / n (von Neumann et al., 1941).
    return dispersion if dispersion > 1.0 + CHANCE * math.sqrt(3.0 / known) else 1.0
