"""Rank the configurations of a model: the rate that each serves within the model's SLO, alone on a partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cotenant.core.model import Model
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.planners.forecast.lanes import LaneQueue, queue_solutions
from cotenant.planners.forecast.results import ModelForecast, combine_lanes

HALVINGS = 14  # of the range of rates: the answer is exact to 0.006 % of what the configuration can do at most


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a share (‰), a largest batch and a number of workers, and what they do.

    rate: requests/s of Poisson arrivals, at most, of which enough are answered within the target; 0: there are none.
    p50, p99: latency of the answers at that rate, in seconds; inf at a rate of 0.
    """

    model: str
    kind: str
    share: int
    batch: int
    procs: int
    rate: float
    p50: float
    p99: float

    @property
    def rate_of_whole(self) -> float:
        """Return the requests/s that a whole device would serve if it were cut into such partitions."""
        return self.rate * WHOLE / self.share


def rank_configurations(
    model: Model, profile: Profile, more: Iterable[tuple[int, int, int]] = ()
) -> list[Configuration]:
    """Return every measured configuration of a model on a kind of device, the one that serves most first; of two that
    serve as much, the smaller share. more: others, as (share in ‰, largest batch, workers), whose latency the profile
    interpolates."""
    limit = profile.max_batch if model.max_batch is None else min(model.max_batch, profile.max_batch)
    measured = sorted({*((point.share, min(point.batch, limit), point.procs) for point in profile.points), *more})
    most = [procs * batch / profile.latency(batch, share, procs) for share, batch, procs in measured]
    rates = _largest_rates(model, profile, measured, most)
    forecasts = _forecasts(model, profile, measured, rates)
    ranked = [
        Configuration(
            model=model.name,
            kind=profile.kind,
            share=share,
            batch=batch,
            procs=procs,
            rate=rate,
            p50=forecast.p50,
            p99=forecast.p99,
        )
        for (share, batch, procs), rate, forecast in zip(measured, rates, forecasts, strict=True)
    ]
    return sorted(ranked, key=lambda one: (-one.rate, one.share, one.batch, one.procs))


def _largest_rates(
    model: Model, profile: Profile, measured: Sequence[tuple[int, int, int]], most: Sequence[float]
) -> list[float]:
    """Bisect for all configurations at once, between nothing and what full batches alone would allow."""
    low, high = [0.0] * len(measured), list(most)
    for _ in range(HALVINGS):
        middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        for at, forecast in enumerate(_forecasts(model, profile, measured, middle)):
            if forecast.attainment >= model.attainment:
                low[at] = middle[at]
            else:
                high[at] = middle[at]
    return low


def _forecasts(
    model: Model, profile: Profile, measured: Sequence[tuple[int, int, int]], rates: Sequence[float]
) -> list[ModelForecast]:
    """Forecast each configuration at its rate; nothing is answered where that is 0."""
    queues = [
        LaneQueue(
            model=model.name,
            profile=profile,
            share=share,
            procs=procs,
            batch=batch,
            slowdown=1.0,
            rate=rate / procs,
            slo=model.slo,
            workers=procs,
            variation=profile.nearest(batch, share).features.get("cv_pct", 0.0) / 100,
        )
        for (share, batch, procs), rate in zip(measured, rates, strict=True)
        if rate > 0
    ]
    solved = (solution for (solution,) in queue_solutions([(queue,) for queue in queues]))
    return [combine_lanes([(rate, next(solved))] if rate > 0 else [], rate, model.slo) for rate in rates]
