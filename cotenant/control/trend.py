"""Extrapolate a rate that rises, beyond chance, to when a plan that is made now will be in force.

The rise is that from one half of a window of recent seconds to the other: where it is more than chance explains, the
rate is continued along the line through both. A rate that falls is not extrapolated: plans for lower rates can wait.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 40.0  # seconds
DEVIATIONS = 5.0  # standard deviations of the difference between the halves that chance may account for


class Trend:
    """Follow the counts of one model. ahead: seconds to look ahead; 0: not at all."""

    def __init__(self, ahead: float) -> None:
        self._ahead = ahead
        self._counts: deque[tuple[float, int]] = deque()  # seconds and requests of each interval
        self._seconds = 0.0

    def observe(self, count: int, seconds: float, dispersion: float) -> float:
        """Count the requests of the next interval; return the rate to expect, 0 where it does not rise beyond chance.

        seconds: length of the interval, above 0. dispersion: variance of counts over their mean.
        """
        if not self._ahead:
            return 0.0
        self._counts.append((seconds, count))
        self._seconds += seconds
        while self._seconds - self._counts[0][0] >= WINDOW:
            self._seconds -= self._counts.popleft()[0]
        if self._seconds < WINDOW - seconds / 2:
            return 0.0
        return self._expected(dispersion)

    def _expected(self, dispersion: float) -> float:
        half, passed, earlier, total = self._seconds / 2, 0.0, 0, 0
        for seconds, count in self._counts:
            passed += seconds
            total += count
            if passed <= half * (1 + 1e-9):
                earlier = total
        rise = total - 2 * earlier
        if rise <= DEVIATIONS * math.sqrt(total * dispersion):
            return 0.0
        later_rate, slope = (total - earlier) / half, rise / half**2
        return later_rate + slope * (half / 2 + self._ahead)
