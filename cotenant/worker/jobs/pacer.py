"""Hold a group of processes to a rate of processor time, by when it runs and when it is stopped."""

from __future__ import annotations

import math

SLICE = 0.05  # processor seconds for which it runs at least, once it may
MAX_CREDIT = 1.0  # processor seconds that may be caught up: idle share comes in bursts, and a grant is its mean
MIN_LOOK = 0.02  # seconds between two looks
MAX_LOOK = 0.5


class Pacer:
    """Decide whether a job runs, from what it has used. Time is an argument."""

    def __init__(self) -> None:
        self.runs = False
        self._rate = 0.0  # processors; infinite: no limit
        self._credit = 0.0  # processor seconds
        self._used = 0.0
        self._looked = 0.0

    def grant(self, processors: float, used: float, now: float) -> None:
        """Let it use so many processors on average from now on. used: processor seconds so far."""
        self.look(used, now)
        if not 0 < self._rate < math.inf:
            self._credit = SLICE  # neither debt nor credit of a time without a limit
        self._rate = processors
        self.runs = processors > 0

    def look(self, used: float, now: float) -> None:
        """Note what was used until now, and decide anew."""
        if 0 < self._rate < math.inf:
            earned = self._rate * (now - self._looked)
            self._credit = min(self._credit + earned - (used - self._used), MAX_CREDIT)
            self.runs = self._credit > 0 if self.runs else self._credit >= SLICE
        self._used, self._looked = used, now

    def next_look(self) -> float:
        """Return the seconds until the next look; infinite where none changes anything."""
        if not 0 < self._rate < math.inf:
            return math.inf
        left = self._credit if self.runs else (SLICE - self._credit) / self._rate
        return min(max(left, MIN_LOOK), MAX_LOOK)
