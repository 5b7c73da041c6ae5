"""Hold what the scheduler of jobs knows of a device: what is idle, whether serving needs it, how far its jobs are."""

from __future__ import annotations

import math

from cotenant.control.jobs.events import DeviceIdle
from cotenant.control.jobs.options import JobsOptions
from cotenant.core.identity import DeviceId


class JobDevice:
    """Hold a device's state; only the scheduler changes it.

    virtual: its virtual time, in share-seconds per weight (`fair_shares`). average: the share, in ‰, that jobs could
    have had of late. overfull_since: since when its jobs are promised more memory than is free.
    """

    def __init__(self, id: DeviceId, seen: DeviceIdle, now: float) -> None:
        self.id = id
        self.seen = seen
        self.virtual = 0.0
        self.average = float(seen.idle)
        self.overfull_since = math.inf
        self._seen_at = now
        self._pressure = ""
        self.pressed_until = -math.inf
        self._calm = 0.0

    def observe(self, seen: DeviceIdle, now: float, options: JobsOptions) -> None:
        """Take over what was seen, and average what jobs could have had since the last time."""
        weight = math.exp(-max(now - self._seen_at, 0.0) / options.idle_memory)
        self.average = weight * self.average + (1 - weight) * self.idle(now)
        self.seen, self._seen_at = seen, now

    def press(self, reason: str, now: float, options: JobsOptions) -> None:
        """Yield until a while after now. Pressure that is back soon after the last has jobs wait longer."""
        if not self.pressure(now):
            soon = now - self.pressed_until < options.steady
            self._calm = min(2 * self._calm, options.longest_calm) if soon else options.calm
        self._pressure, self.pressed_until = reason, now + self._calm

    def pressure(self, now: float) -> str:
        """Return why serving needs the device; empty where it does not."""
        return self._pressure if now < self.pressed_until else ""

    def idle(self, now: float) -> int:
        """Return the share, in ‰, that jobs may have now."""
        return 0 if self.pressure(now) else max(self.seen.idle, 0)
