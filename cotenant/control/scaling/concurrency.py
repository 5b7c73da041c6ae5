"""Scaling by concurrent requests, as the Knative Pod Autoscaler does it.

https://knative.dev/docs/serving/autoscaling/kpa-specific/ and .../concurrency/: every 2 s, ⌈mean concurrency / target⌉
replicas are desired, over a stable window of 60 s. When a panic window of a tenth of that desires at least twice the
ready replicas, it decides instead, and nothing is scaled down until a stable window has passed without. A revision goes
to zero once it had no traffic for a whole stable window. Growth is limited to 1000 times, shrinkage to half.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.control.scaling.context import Observation, ScalingContext


class ConcurrencyScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the mean number of requests in the system at a target for each device of one kind.

    The rest of the fleet stays as it is.

    target: requests for each device; utilisation: part of it to aim at. stable: seconds of the stable window; panic:
    of the panic window. threshold: desired over ready devices from which on the panic window decides. max_growth,
    max_shrinkage: factor at once. to_zero: whether the last device goes, too.
    """

    kind: str
    target: float
    utilisation: float = 0.7
    stable: float = 60.0
    panic: float = 6.0
    threshold: float = 2.0
    max_growth: float = 1000.0
    max_shrinkage: float = 2.0
    to_zero: bool = True

    @property
    def horizon(self) -> float:
        # Whether it panicked a stable window ago takes a panic window of observations before that.
        return self.stable + self.panic

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        if not context.history:
            return {self.kind: context.allocated(self.kind)}
        ready = max(1, context.ready.get(self.kind, 0))
        most = math.ceil(self.max_growth * ready)
        least = math.floor(ready / self.max_shrinkage)
        stable = self._desired(context.history, context.now, self.stable)
        desired = min(max(stable, least), most)
        if self._panics(context.history, context.now):
            panic = min(max(self._desired(context.history, context.now, self.panic), least), most)
            desired = max(desired, panic, self._wanted_in_panic(context))
        if not self.to_zero:
            desired = max(1, desired)
        return {self.kind: int(min(desired, context.limit(self.kind)))}

    def _desired(self, history: tuple[Observation, ...], now: float, window: float) -> int:
        recent = [seen for seen in history if now - window < seen.time <= now]
        seconds = sum(seen.seconds for seen in recent)
        total = sum(sum(seen.concurrency.values()) * seen.seconds for seen in recent)
        mean = total / seconds if seconds else 0.0
        return math.ceil(mean / (self.target * self.utilisation) - 1e-9)

    def _panics(self, history: tuple[Observation, ...], now: float) -> bool:
        """Tell whether the panic window exceeded the threshold at any time within the stable window before `now`."""
        return any(
            self._desired(history, seen.time, self.panic) / max(1, seen.ready.get(self.kind, 0)) >= self.threshold
            for seen in history
            if now - self.stable <= seen.time <= now
        )

    def _wanted_in_panic(self, context: ScalingContext) -> int:
        """Return what was wanted in the period before, if that was in panic, too: it is not scaled down until then."""
        earlier = [seen for seen in context.history[:-1] if seen.wanted]
        if not earlier or not self._panics(context.history, earlier[-1].time):
            return 0
        return earlier[-1].wanted.get(self.kind, 0)
