"""Find out by how much the profile of a model is wrong: what its batches take for long while the machine is quiet.

`SlowdownMonitor` notices within seconds that a plan does not fit, whatever the reason. This one tells what remains
when there is no reason but the profile. It compares with the profile itself, so plans may change meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.control.adaptation import BatchLatency


class Correction(NamedTuple):
    """Say how many times as long as profiled so many batches took; at least 1."""

    factor: float
    batches: int


class ProfileMonitor:
    """Observe the batches of one model.

    seconds, batches: of a quiet machine, that tell enough. tolerance: relative change of the correction that is worth
    telling. factor: the correction that is known.
    """

    def __init__(self, seconds: float, batches: int, tolerance: float) -> None:
        self.factor = 1.0
        self._seconds = seconds
        self._batches = batches
        self._tolerance = tolerance
        self._forget()

    def _forget(self) -> None:
        self._watched = self._profiled = self._observed = 0.0
        self._ran = 0

    def observe(
        self, batches: BatchLatency | None, slowdown: float, seconds: float, *, quiet: bool
    ) -> Correction | None:
        """Take the batches of the last interval; return another correction once enough of them have told it.

        slowdown: that the plan in force counts with, which is in its predictions. quiet: whether nothing else could
        slow the batches down.
        """
        if not quiet:
            self._forget()
            return None
        self._watched += seconds
        if batches is not None:
            self._profiled += batches.predicted / slowdown
            self._observed += batches.observed
            self._ran += batches.batches
        if self._watched < self._seconds or self._ran < self._batches or self._profiled <= 0:
            return None
        correction = Correction(round(max(1.0, self._observed / self._profiled), 3), self._ran)
        self._forget()
        if abs(correction.factor / self.factor - 1.0) <= self._tolerance:
            return None
        self.factor = correction.factor
        return correction
