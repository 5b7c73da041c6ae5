"""Two loops, one slow and by throughput, one quick and by latency, as the planner of Dynamo has them.

https://docs.nvidia.com/dynamo/design-docs/component-design/planner-design: every 180 s, the requests predicted for the
next interval over the capacity of one engine give a lower bound. Every 5 s, one engine is added where the estimated
latency is above its target on all engines, and one removed where it is below a fraction of the target on all; nothing
while an earlier step is still under way, and never below the bound. Their predictor without a library is "constant":
the next interval is as the last one.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.control.scaling.context import Observation, ScalingContext
from cotenant.planners.capacity import latency_curve, max_throughput_batch


class TwoLoopScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scale the devices of one kind by throughput and by latency. The rest of the fleet stays as it is.

    It is asked every `latency_interval`; the lower bound changes every `throughput_interval` only. Where Dynamo
    estimates the latency on each engine by a regression on its tokens, this takes the mean time in the system, which by
    Little's law is concurrency over rate; a model is slow on all devices that serve it, or on none.

    sensitivity: fraction of the target below which a device is removed. utilisation: part of a device's capacity that
    is counted on. least: devices to keep in any case.
    """

    kind: str
    throughput_interval: float = 180.0
    latency_interval: float = 5.0
    sensitivity: float = 0.8
    utilisation: float = 1.0
    least: int = 1

    @property
    def horizon(self) -> float:
        return 2 * self.throughput_interval

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        allocated = context.allocated(self.kind)
        if not context.history:
            return {self.kind: allocated}
        step = 0 if context.launching.get(self.kind, 0) else self._step(context)
        wanted = max(allocated + step, self._bound(context), self.least)
        return {self.kind: int(min(wanted, context.limit(self.kind)))}

    def _step(self, context: ScalingContext) -> int:
        """Return how many devices the quick loop adds: 1, 0 or -1."""
        latest = context.since(self.latency_interval)
        latencies = [
            (_mean_latency(latest, model.name), model.slo)
            for model in context.problem.models
            if _mean_concurrency(latest, model.name) > 0
        ]
        if any(latency > slo for latency, slo in latencies):
            return 1
        return -1 if all(latency < self.sensitivity * slo for latency, slo in latencies) else 0

    def _bound(self, context: ScalingContext) -> int:
        """Return the devices for the rates of the last whole throughput interval; intervals begin at time 0."""
        end = math.floor(context.now / self.throughput_interval) * self.throughput_interval
        interval = [seen for seen in context.history if end - self.throughput_interval < seen.time <= end]
        seconds = sum(seen.seconds for seen in interval)
        if not seconds:
            return 0
        devices = 0.0
        for model in context.problem.models:
            rate = sum(seen.rates.get(model.name, 0.0) * seen.seconds for seen in interval) / seconds
            share = max(context.problem.kind(self.kind).cuts)
            curve = latency_curve(context.problem, model.name, self.kind, share)
            _, capacity = max_throughput_batch(curve, model.slo)
            devices += rate / (capacity * self.utilisation) if capacity else 0.0
        return math.ceil(devices - 1e-9)


def _mean_concurrency(history: tuple[Observation, ...], model: str) -> float:
    seconds = sum(seen.seconds for seen in history)
    return sum(seen.concurrency.get(model, 0.0) * seen.seconds for seen in history) / seconds if seconds else 0.0


def _mean_latency(history: tuple[Observation, ...], model: str) -> float:
    """Return the mean seconds in the system; `inf` where requests wait and none arrived."""
    seconds = sum(seen.seconds for seen in history)
    rate = sum(seen.rates.get(model, 0.0) * seen.seconds for seen in history) / seconds if seconds else 0.0
    return _mean_concurrency(history, model) / rate if rate else math.inf
