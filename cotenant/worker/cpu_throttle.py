"""Limit a process to a share of CPU time without help from the operating system.

A batch that used c seconds of CPU time ends no earlier than c / rate after it began, so its latency is that of a
processor `rate` times as fast. A worker that woke up late or waited for a core is credited with the difference: its
next batches end that much earlier, up to a bound, so that the average share is met without bursts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cotenant.runtime.lending import MAX_CREDIT


class CpuThrottle:
    """Limit CPU time to `rate` CPU seconds per second. used: reads the CPU time of this process, in seconds."""

    def __init__(self, rate: float, used: Callable[[], float] = time.process_time) -> None:
        self.rate = rate  # of the next batch
        self._used = used
        self._charged = used()
        self._credit = 0.0

    def charge(self, started: float) -> tuple[float, float]:
        """Return when a batch that began at `started` may end, and the CPU seconds that it is charged.

        It is charged everything since the last charge: work between two batches counts as well.
        """
        used = self._used()
        cost = used - self._charged
        self._charged = used
        return started + cost / self.rate - self._credit, cost

    def skip(self) -> None:
        """Charge nobody for the work since the last charge."""
        self._charged = self._used()

    def ended(self, due: float, now: float) -> None:
        """Note that the batch due at `due` ended at `now`."""
        self._credit = min(max(now - due, 0.0), MAX_CREDIT)
