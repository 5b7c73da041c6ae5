"""What is told of a plan, and how a model's is mixed from those of its lanes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from cotenant.planners.forecast.lanes import QueueSolution
from cotenant.planners.forecast.latencies import quantiles


class ModelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """rate: answers within the target, per second. attainment: the part of all requests that these are.

    p50, p99: latency of the requests that are answered, in seconds; inf where none is.
    """

    rate: float
    attainment: float
    p50: float
    p99: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """models: by name, those with a rate. utilisation: the part of its time that a lane (``cpu-0/1``) is busy.

    applications: by name, those with a rate.
    """

    models: dict[str, ModelForecast]
    utilisation: dict[str, float]
    applications: dict[str, ModelForecast] = {}


def combine_lanes(seen: Sequence[tuple[float, QueueSolution]], offered: float, slo: float) -> ModelForecast:
    """One model over all its lanes. What no lane takes is not answered."""
    rate = sum(rate * turns.attainment for rate, turns in seen)
    if rate == 0:
        return ModelForecast(rate=0.0, attainment=0.0, p50=math.inf, p99=math.inf)
    below = seen[0][0] * seen[0][1].below
    for of, turns in seen[1:]:
        below += of * turns.below
    at_once: defaultdict[float, float] = defaultdict(float)
    for of, turns in seen:
        at_once[turns.single / slo] += of * turns.at_once
    p50, p99 = quantiles(below.tolist(), sorted(at_once.items()), (0.5, 0.99))
    return ModelForecast(rate=rate, attainment=min(rate / offered, 1.0), p50=slo * p50, p99=slo * p99)
