"""Predict slowdowns by InSS' analytic model: latency of a batch under co-location, and of a request.

InSS (2023), section 4: a batch is transferred, its kernels are scheduled and run, and the response is transferred:

    latency = (input + output) · batch / bandwidth + kernels · (o + delay(models on the device)) + run · (1 + c · Σ L2)

The scheduling delay grows linearly with the number of models on the device, and is 0 for one alone. The run time grows
with the L2 utilisation of co-located models, each linear in its share; alone, it comes from locally weighted regression
over batch and share. The paper does not give that regression's kernel and bandwidth: here it is tricube over the
nearest points, in logarithms, in which the time is nearly linear in both.

Profile columns: `input_bytes` and `output_bytes` of a row, `kernels`, `scheduling_us` of a kernel alone (each 0 where
absent), and `l2_util_pct`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import Profile, Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.predictors import Load, remembered, require
from cotenant.predictors.linear import L2
from cotenant.predictors.samples import Sample

BANDWIDTH = 10e9  # bytes/s of a device's PCIe bus, as iGniter measured
INPUT, OUTPUT, KERNELS, SCHEDULING = "input_bytes", "output_bytes", "kernels", "scheduling_us"
# Locally weighted regression: the number of points, and the bandwidth over the distance of the farthest. The mean
# leave-one-out error is then 1.4 % on the V100's profiles and 2.9 % on the A100's; with InSS' 16 points more smoothing
# is worse.
NEAREST, REACH = 6, 1.02


class Alone(msgspec.Struct, frozen=True, dict=True):
    """Describe a model alone.

    transfer: seconds for a row; scheduling: seconds for a kernel; l2_*: L2 utilisation as a line, fraction over share;
    points: batch, share (‰), run time in seconds.
    """

    transfer: float
    kernels: float
    scheduling: float
    l2_slope: float
    l2_constant: float
    points: tuple[tuple[int, int, float], ...]

    def l2(self, share: int) -> float:
        return max(0.0, self.l2_slope * share / WHOLE + self.l2_constant)

    def overhead(self, batch: int) -> float:
        """Return the seconds for transfer and scheduling."""
        return self.transfer * batch + self.kernels * self.scheduling

    def running(self, batch: int, share: int) -> float:
        """Return the run time in seconds, by locally weighted regression."""
        seconds = self._running_cache.get((batch, share))
        if seconds is None:
            points, times = self._log_points
            seconds = math.exp(locally_weighted(points, times, np.log([batch, share])))
            self._running_cache[batch, share] = seconds
        return seconds

    @functools.cached_property
    def _running_cache(self) -> dict[tuple[int, int], float]:
        return {}

    @functools.cached_property
    def _log_points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        points = np.log(np.array(self.points))
        return points[:, :2], points[:, 2]


class Delay(msgspec.Struct, frozen=True):
    """Predict the additional seconds to schedule a kernel, linear in the number of models on the device."""

    slope: float
    constant: float

    def of(self, models: int) -> float:
        return max(0.0, self.slope * models + self.constant) if models > 1 else 0.0


class Analytic(msgspec.Struct, frozen=True, dict=True):
    """Predict by InSS' model of one kind of device.

    alone: by model; cache: by victim, the relative increase of its run time when all of L2 is used by others. A model
    that is the victim in no sample gets the mean of those that are.
    """

    kind: str
    delay: Delay
    cache: dict[str, float]
    alone: dict[str, Alone]

    interferes: ClassVar[bool] = True

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict a slowdown. Raises PlanError for a model without L2 utilisation, and on another kind of device."""
        return max(1.0, self.latency(victim, colocated) / self.latency(victim, ()))

    def least_slowdowns(self, victims: Sequence[Load], colocated: Sequence[Load], room: int) -> list[float]:
        """Return the slowdown by one load with the least L2 utilisation of all; 1 where fitted coefficients have more
        loads slow less."""
        mildest = min(colocated, key=lambda load: self._alone(load).l2(load.share))
        return [
            self.slowdown(victim, (mildest,))
            if self.delay.slope >= 0 and self.cache.get(victim.model, self._mean_cache_sensitivity) >= 0
            else 1.0
            for victim in victims
        ]

    def latency(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict the latency of a batch in seconds."""
        own = self._alone(victim)
        used = sum(self._alone(load).l2(load.share) for load in colocated)
        delay = own.kernels * self.delay.of(1 + len(colocated))
        running = own.running(victim.batch, victim.share)
        cache = self.cache.get(victim.model, self._mean_cache_sensitivity)
        return own.overhead(victim.batch) + delay + running * (1 + cache * used)

    def with_profiles(self, profiles: Profiles) -> Analytic:
        """Return the predictor with the models of these profiles added."""
        return Analytic(self.kind, self.delay, self.cache, self.alone | _alone(profiles, self.kind))

    @functools.cached_property
    def _mean_cache_sensitivity(self) -> float:
        return float(np.mean(list(self.cache.values())))

    def _alone(self, load: Load) -> Alone:
        require(self.kind, load)
        profile = self.alone.get(load.model)
        if profile is None:
            raise PlanError(f"model {load.model!r} has an unknown L2 utilisation; add the column {L2} to its profile")
        return profile


def fit(samples: Sequence[Sample], profiles: Profiles) -> Analytic:
    """Fit delay and cache coefficients by least squares of slowdowns.

    Raises PlanError for models without `l2_util_pct`, and for too few samples.
    """
    if not samples:
        raise PlanError("no samples to fit an analytic model to; measure pairs with `cotenant profile --pairs`")
    kind = samples[0].victim.kind
    alone = _alone(profiles, kind)
    bare = Analytic(kind, Delay(0.0, 0.0), {sample.victim.model: 0.0 for sample in samples}, alone)
    terms = [
        Term(
            sample.victim.model,
            1 + len(sample.colocated),
            (own := bare._alone(sample.victim)).kernels / (base := bare.latency(sample.victim, ())),
            own.running(sample.victim.batch, sample.victim.share)
            / base
            * sum(bare._alone(load).l2(load.share) for load in sample.colocated),
            sample.slowdown - 1,
        )
        for sample in samples
    ]
    delay, cache = least_squares(terms)
    return Analytic(kind, delay, cache, alone)


def _alone(profiles: Profiles, kind: str) -> dict[str, Alone]:
    """Return the models on a kind of device whose profiles have their L2 utilisation."""
    return {
        profile.model: measured(profile)
        for profile in profiles.values()
        if profile.kind == kind and any(L2 in point.features for point in profile.points)
    }


class Term(msgspec.Struct, frozen=True):
    """State the linear equation of one sample: slower = kernels · delay(models) + cache[victim] · pressure.

    kernels: over the latency alone; pressure: L2 utilisation of co-located models times the affected fraction of the
    latency; slower: the slowdown minus 1.
    """

    victim: str
    models: int
    kernels: float
    pressure: float
    slower: float


def least_squares(terms: Sequence[Term]) -> tuple[Delay, dict[str, float]]:
    """Return the delay, and the cache coefficient of each victim.

    Where all samples have the same number of models, a line is not identifiable; the delay is then proportional to the
    number of co-located models. Raises PlanError for fewer samples than coefficients.
    """
    victims = sorted({term.victim for term in terms})
    counts = {term.models for term in terms}
    delays = np.array(
        [
            [term.kernels * term.models, term.kernels] if len(counts) > 1 else [term.kernels * (term.models - 1)]
            for term in terms
        ]
    )
    caches = np.array([[term.pressure if term.victim == victim else 0.0 for victim in victims] for term in terms])
    coefficients = delays.shape[1] + len(victims)
    if len(terms) < coefficients:
        raise PlanError(
            f"{len(terms)} samples are fewer than the {coefficients} coefficients to find; measure more pairs"
        )
    solution, *_ = np.linalg.lstsq(np.hstack([delays, caches]), np.array([term.slower for term in terms]), rcond=None)
    slope, *rest = solution.tolist()
    delay = Delay(slope, rest.pop(0) if len(counts) > 1 else -slope)
    return delay, dict(zip(victims, rest, strict=True))


def measured(profile: Profile) -> Alone:
    """Extract a model's parameters from its profile. Raises PlanError where overheads exceed a batch's latency."""
    points = [point for point in profile.points if point.procs == 1]
    l2_points = [(point.share / WHOLE, point.features[L2] / 100) for point in points if L2 in point.features]
    if len({share for share, _ in l2_points}) > 1:
        shares, fractions = np.array(l2_points).T
        slope, constant = np.polyfit(shares, fractions, 1)
    else:
        slope, constant = 0.0, float(np.mean([fraction for _, fraction in l2_points]))
    features = {name: value for point in points for name, value in point.features.items()}
    transfer = (features.get(INPUT, 0.0) + features.get(OUTPUT, 0.0)) / BANDWIDTH
    kernels, scheduling = features.get(KERNELS, 0.0), features.get(SCHEDULING, 0.0) / 1e6
    alone = Alone(transfer, kernels, scheduling, float(slope), float(constant), ())
    running = [(point.batch, point.share, point.latency - alone.overhead(point.batch)) for point in points]
    for batch, share, seconds in running:
        if seconds <= 0:
            raise PlanError(
                f"model {profile.model!r}, batch {batch} at {share / 10:g} %: transfer and scheduling would take longer"
                f" than the batch; look at {INPUT}, {OUTPUT}, {KERNELS} and {SCHEDULING} of its profile"
            )
    return msgspec.structs.replace(alone, points=tuple(running))


def locally_weighted(points: NDArray[np.float64], values: NDArray[np.float64], query: NDArray[np.float64]) -> float:
    """Evaluate a weighted least-squares plane through the nearest points (Cleveland, 1979). points: two columns."""
    offset = points - query
    distance = np.hypot(*offset.T)
    nearest = np.argsort(distance, kind="stable")[:NEAREST]
    width = REACH * distance[nearest[-1]] or 1.0
    weight = np.sqrt((1 - (distance[nearest] / width) ** 3) ** 3)
    plane = np.column_stack([np.ones(len(nearest)), offset[nearest]])
    solution, *_ = np.linalg.lstsq(plane * weight[:, None], values[nearest] * weight, rcond=None)
    return float(solution[0])


def task_latency(queued: float, batch: int, rate: float, executing: float, latency: float) -> float:
    """Predict the seconds until a request is answered, InSS' equation 2.

    queued: waiting requests, this one included; rate: arrivals/s; executing: seconds until the batch in flight is done;
    latency: seconds of a batch. With fewer than a batch waiting, the batch fills first.
    """
    if queued >= batch:
        return executing + math.ceil(queued / batch) * latency
    return max(executing, (batch - queued) / rate) + latency
