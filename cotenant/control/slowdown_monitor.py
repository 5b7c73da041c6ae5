"""Compare what batches of a model take with what its plan predicts, so that a plan made from stale profiles is noticed.

Sums of predicted and observed seconds are forgotten exponentially, so that the last few seconds count most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from cotenant.control.adaptation import BatchLatency


class SlowdownOptions(msgspec.Struct, frozen=True, kw_only=True):
    """half_life: seconds after which a batch counts half. batches: fewest that tell anything. tolerance: ratio, less 1,
    that a plan may be off without being wrong; spread: that a single batch may be off besides by chance, and n batches
    by the square root of n less. persistence: seconds for which batches must take longer; recovery: for which they must
    take less long, which is no hurry, and on a busy machine soon over."""

    half_life: float = 3.0
    batches: float = 8.0
    tolerance: float = 0.2
    spread: float = 0.8
    persistence: float = 1.5
    recovery: float = 10.0


class _Sums:
    """Seconds of batches, predicted and observed, and how many there were."""

    __slots__ = ("batches", "observed", "predicted")

    def __init__(self) -> None:
        self.predicted = self.observed = self.batches = 0.0

    def add(self, batches: BatchLatency) -> None:
        self.predicted += batches.predicted
        self.observed += batches.observed
        self.batches += batches.batches

    def forget(self, kept: float) -> None:
        self.predicted *= kept
        self.observed *= kept
        self.batches *= kept

    @property
    def ratio(self) -> float:
        return self.observed / self.predicted if self.predicted > 0 else 1.0


class SlowdownMonitor:
    """Observe the batches of one model over all of its lanes, or of all models."""

    def __init__(self, options: SlowdownOptions | None = None) -> None:
        self._options = options or SlowdownOptions()
        self.reset()

    def reset(self) -> None:
        """Forget all batches: predictions have changed."""
        self._recent = _Sums()
        self._since_off = _Sums()  # batches since predictions have been off: earlier ones were of another machine
        self._off_for = 0.0
        self._slower = False  # the last observation, where it was off

    @property
    def ratio(self) -> float:
        """Observed over predicted seconds of late; 1 where too few batches ran."""
        return self._recent.ratio if self._recent.batches >= self._options.batches else 1.0

    @property
    def drifted(self) -> bool:
        """Whether batches have been off their prediction for long enough."""
        return self._off_for >= (self._options.persistence if self.ratio > 1.0 else self._options.recovery)

    def shrunk_ratio(self, expected: float) -> float:
        """Observed over predicted seconds, as if a few batches more had been off by `expected`: the fewer batches ran,
        the more that counts."""
        sums = self._since_off if self.drifted else self._recent
        more = self._options.batches
        return (sums.batches * sums.ratio + more * expected) / (sums.batches + more)

    def observe(self, batches: BatchLatency | None, seconds: float) -> None:
        """Take the batches of the last interval, of so many seconds; None where there were none."""
        self._recent.forget(0.5 ** (seconds / self._options.half_life))
        if batches is not None:
            self._recent.add(batches)
        chance = self._options.spread / math.sqrt(max(self._recent.batches, 1.0))
        is_off = abs(self.ratio - 1.0) > self._options.tolerance + chance
        slower = self.ratio > 1.0
        if not is_off or slower != self._slower:
            self._off_for = 0.0
            self._since_off = _Sums()
        self._slower = slower
        if not is_off:
            return
        self._off_for += seconds
        if batches is not None:
            self._since_off.add(batches)


def total_latency(latencies: Iterable[BatchLatency]) -> BatchLatency:
    """Return the batches of all models together."""
    batches, predicted, observed = 0, 0.0, 0.0
    for each in latencies:
        batches, predicted, observed = batches + each.batches, predicted + each.predicted, observed + each.observed
    return BatchLatency(batches, predicted, observed)
