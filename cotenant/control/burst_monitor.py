"""Estimate the capacity that a model needs for its bursts: what the recent ones would have needed.

Requests that come in bursts, with nothing between them, have a mean rate that no plan should be made for: capacity for
the mean serves the gaps. Nor does any estimate of the rate of now help where devices take longer to launch than a burst
takes to pass. What is learnt instead is the burstiness of late: the smallest capacity at which, over a window, no more
requests would have come in excess of it, interval by interval, than may miss their target. For Poisson arrivals plans
have headroom anyway, so only what they do not explain is counted.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.control.successive_differences import SuccessiveDifferences

MIN_BINS = 20  # that tell anything
STEPS = 0.03  # of the differences between intervals, that may be steps of the rate
CHANCE = 4.0  # standard deviations of the dispersion of Poisson counts that are no burstiness


class BurstOptions(msgspec.Struct, frozen=True, kw_only=True):
    """interval: seconds over which requests may wait for their turn, and counts are summed. window: seconds that are
    remembered. excess: of a window's requests, the part that may come in excess of the capacity."""

    interval: float = 2.0
    window: float = 600.0
    excess: float = 0.02


class BurstMonitor:
    """Count the requests of one model."""

    def __init__(self, options: BurstOptions | None = None) -> None:
        self._options = options or BurstOptions()
        self._rates = SuccessiveDifferences(max(MIN_BINS, round(self._options.window / self._options.interval)))
        self._count, self._seconds = 0, 0.0
        self.needed = 0.0  # requests/s; 0 where arrivals are no burstier than Poisson arrivals
        self.dispersion = 1.0  # variance over mean of the counts; 1 where they are no burstier

    def observe(self, count: int, seconds: float) -> None:
        """Take the requests of the next interval. seconds: its length, above 0."""
        self._count += count
        self._seconds += seconds
        if self._seconds < self._options.interval * (1 - 1e-9):
            return
        self._rates.append(self._count / self._seconds)
        self._count, self._seconds = 0, 0.0
        if len(self._rates.values) >= MIN_BINS:
            self.needed, self.dispersion = self._capacity()

    def _capacity(self) -> tuple[float, float]:
        total, bins = sum(self._rates.values), len(self._rates.values)
        if not total:
            return 0.0, 1.0
        mean = total / bins
        # A step of the rate, or a few, are no bursts.
        variance = self._rates.variance(max(2, round(STEPS * (bins - 1))))
        dispersion = variance * self._options.interval / mean
        if dispersion <= 1.0 + CHANCE * math.sqrt(2.0 / bins):
            return 0.0, 1.0
        allowed = self._options.excess * total
        rates = sorted(self._rates.values, reverse=True)
        above, capacity = 0.0, rates[0]
        for n, rate in enumerate(rates, 1):
            above += rate
            following = rates[n] if n < len(rates) else 0.0
            if above - n * following > allowed:
                capacity = (above - allowed) / n
                break
        return mean + (capacity - mean) * math.sqrt(1.0 - 1.0 / dispersion), dispersion
