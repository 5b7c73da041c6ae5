"""Define the results of a forecast; a model's is the mixture over its lanes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from cotenant.planners.forecast.lanes import QueueSolution
from cotenant.planners.forecast.latencies import quantiles


class ModelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of a model or application.

    rate: goodput, in requests/s. attainment: the fraction of all requests that are answered within the target.
    p50, p99: latency of answered requests in seconds; inf where none is.
    """

    rate: float
    attainment: float
    p50: float
    p99: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of a plan.

    models, applications: by name, those with a rate. utilisation: busy fraction of time by lane (``cpu-0/1``).
    """

    models: dict[str, ModelForecast]
    utilisation: dict[str, float]
    applications: dict[str, ModelForecast] = {}


def combine_lanes(solutions: Sequence[tuple[float, QueueSolution]], offered: float, slo: float) -> ModelForecast:
    """Mix a model's forecast from (requests/s, solution) of its lanes; what exceeds their rates is not answered.

    offered: the model's requests/s; slo: its target in seconds.
    """
    served_rate = sum(lane_rate * solution.attainment for lane_rate, solution in solutions)
    if served_rate == 0:
        return ModelForecast(rate=0.0, attainment=0.0, p50=math.inf, p99=math.inf)
    below = solutions[0][0] * solutions[0][1].below
    for lane_rate, solution in solutions[1:]:
        below += lane_rate * solution.below
    immediate: defaultdict[float, float] = defaultdict(float)
    for lane_rate, solution in solutions:
        immediate[solution.solo_latency / slo] += lane_rate * solution.immediate
    p50, p99 = quantiles(below.tolist(), sorted(immediate.items()), (0.5, 0.99))
    return ModelForecast(rate=served_rate, attainment=min(served_rate / offered, 1.0), p50=slo * p50, p99=slo * p99)
