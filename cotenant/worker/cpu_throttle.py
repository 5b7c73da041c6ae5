"""Holds a process to a share of the processor without help from the system.

A batch that used c seconds of processor time ends no earlier than c / rate after it began, so its latency is that of a
processor `rate` times as fast. A worker that woke up late, or waited for a core, is owed the difference: the next
batches end that much earlier, up to a bound, so that the share is reached on average but not made up for in a burst.
"""

from __future__ import annotations

import time
from collections.abc import Callable

CREDIT = 0.05  # seconds that can be owed


class CpuThrottle:
    """rate: processor seconds per second. used: reads the processor time of this process, in seconds."""

    def __init__(self, rate: float, used: Callable[[], float] = time.process_time) -> None:
        self._rate = rate
        self._used = used
        self._charged = used()
        self._credit = 0.0

    def charge(self, started: float) -> tuple[float, float]:
        """When a batch that began at `started` may end, and the processor time that it is charged.

        That is all since the last charge: work between two batches is somebody's too.
        """
        used = self._used()
        cost = used - self._charged
        self._charged = used
        return started + cost / self._rate - self._credit, cost

    def ended(self, due: float, now: float) -> None:
        """The batch that was due then has ended."""
        self._credit = min(max(now - due, 0.0), CREDIT)
