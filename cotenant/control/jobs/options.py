"""Configure the scheduler of best-effort jobs."""

from __future__ import annotations

import msgspec


class JobsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Configure the scheduler. Durations are in seconds.

    slots: jobs that run on one device at once at most, paused ones aside.
    least_idle: the idle share of a device, in ‰, below which no job is started there.
    memory: bytes that a job without a limit of its own is counted with.
    memory_patience: for which jobs may be promised more memory than is free, before one is told to stop.
    calm: without pressure until jobs get a share again; doubles each time that pressure is back within `steady` of
    that, up to longest_calm.
    horizon: within which jobs that got too little catch up.
    first_delay: until a job that failed is started again; doubles with each failure, up to longest_delay.
    place_again: until a job for which there was no place is placed again.
    keep_every: between two times that the progress of a job is stored.
    idle_memory: over which the idle share is averaged to predict when a job ends.
    history: jobs that ended and are remembered.
    """

    slots: int = 4
    least_idle: int = 20
    memory: int = 0
    memory_patience: float = 5.0
    calm: float = 0.3
    longest_calm: float = 3.0
    steady: float = 10.0
    horizon: float = 5.0
    first_delay: float = 1.0
    longest_delay: float = 300.0
    place_again: float = 5.0
    keep_every: float = 30.0
    idle_memory: float = 60.0
    history: int = 200

    def delay(self, failures: int) -> float:
        """Return how long to wait after so many failures, at least one."""
        return min(self.first_delay * 2.0 ** min(failures - 1, 64), self.longest_delay)
