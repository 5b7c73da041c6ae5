"""Compare what batches of a model take with what its plan predicts, so that a plan made from stale profiles is noticed.

Sums of predicted and observed seconds are forgotten exponentially, so that the last few seconds count most.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.control.adaptation import BatchLatency


class SlowdownOptions(msgspec.Struct, frozen=True, kw_only=True):
    """half_life: seconds after which a batch counts half. batches: fewest that tell anything. tolerance: ratio, less 1,
    that a plan may be off without being wrong; spread: that a single batch may be off besides by chance, and n batches
    by the square root of n less. persistence: seconds for which it must be off."""

    half_life: float = 3.0
    batches: float = 8.0
    tolerance: float = 0.2
    spread: float = 1.0
    persistence: float = 1.5


class SlowdownMonitor:
    """Observe the batches of one model over all of its lanes, or of all models."""

    def __init__(self, options: SlowdownOptions | None = None) -> None:
        self._options = options or SlowdownOptions()
        self.reset()

    def reset(self) -> None:
        """Forget all batches: predictions have changed."""
        self._predicted = self._observed = self._batches = 0.0
        self._off_for = 0.0

    @property
    def ratio(self) -> float:
        """Observed over predicted seconds of late; 1 where too few batches ran."""
        if self._batches < self._options.batches or self._predicted <= 0:
            return 1.0
        return self._observed / self._predicted

    @property
    def drifted(self) -> bool:
        """Whether batches have been off their prediction for long enough."""
        return self._off_for >= self._options.persistence

    def observe(self, batches: BatchLatency | None, seconds: float) -> None:
        """Take the batches of the last interval, of so many seconds; None where there were none."""
        kept = 0.5 ** (seconds / self._options.half_life)
        self._predicted *= kept
        self._observed *= kept
        self._batches *= kept
        if batches is not None:
            self._predicted += batches.predicted
            self._observed += batches.observed
            self._batches += batches.batches
        chance = self._options.spread / math.sqrt(max(self._batches, 1.0))
        off = abs(self.ratio - 1.0) > self._options.tolerance + chance
        self._off_for = self._off_for + seconds if off else 0.0
