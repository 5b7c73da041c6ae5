"""How patient a supervisor is with workers."""

from __future__ import annotations

import msgspec


class SupervisorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Configure the supervisor. Durations are in seconds.

    first_delay: until a dead worker is started again; doubles with each quick death in a row, up to longest_delay.
    steady: a worker that was ready for this long, and for longer than it took to start, did not die quickly: whoever
    serves more than it starts is worth starting again. lives: quick deaths in a row after which a lane has permanently
    failed. start_timeout: that a worker has to become ready. hang_factor, hang_timeout: a worker whose batch takes
    longer than so many times its prediction, and than that, is killed. Batches of longer or rarer inputs than were
    profiled may take many times their prediction; nobody waits for one that takes more. All of it but hanging holds for
    standby workers, too.
    """

    first_delay: float = 0.01
    longest_delay: float = 10.0
    steady: float = 1.0
    lives: int = 13
    start_timeout: float = 120.0
    hang_factor: float = 20.0
    hang_timeout: float = 5.0

    def delay(self, failures: int) -> float:
        """Return how long to wait after so many failures in a row, at least one."""
        return min(self.first_delay * 2.0 ** min(failures - 1, 64), self.longest_delay)

    def hang_limit(self, predicted: float) -> float:
        """Return the seconds after which a batch that was predicted to take `predicted` seconds hangs."""
        return max(self.hang_timeout, self.hang_factor * predicted)
