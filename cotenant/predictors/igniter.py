"""Predict latency under co-location by iGniter's analytic model (TPDS 2022, section 3).

    latency = (idle + active) · frequency at rest / frequency + (input + output) · batch / bandwidth
    active alone = (k1 · batch² + k2 · batch + k3) / (share + k4) + k5
    active = active alone · (1 + c · Σ L2 of co-located models)
    idle = idle alone + kernels · (a · models + b), the latter only under co-location

A model's L2 utilisation and power are linear in its rows per active second; beyond the device's power limit its
frequency falls linearly with the power demand. `fit` estimates everything from profiles and samples except power and
frequency, which profiles lack; the published coefficients have them (`experiments/data/igniter.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import Profile, Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.predictors import Load, remembered, require
from cotenant.predictors.analytic import BANDWIDTH, INPUT, KERNELS, OUTPUT, SCHEDULING, Delay, Term, least_squares
from cotenant.predictors.linear import L2
from cotenant.predictors.samples import Sample

K4 = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 120)])  # candidates of k4, in the unit of share as a fraction


class LinearTerm(msgspec.Struct, frozen=True):
    slope: float
    constant: float

    def at(self, x: float) -> float:
        return self.slope * x + self.constant


class Active(msgspec.Struct, frozen=True):
    """Model the active seconds alone, by batch and by share as a fraction."""

    k1: float
    k2: float
    k3: float
    k4: float
    k5: float

    def at(self, batch: int, share: float) -> float:
        return (self.k1 * batch**2 + self.k2 * batch + self.k3) / (share + self.k4) + self.k5


class Coefficients(msgspec.Struct, frozen=True):
    """Hold a model's coefficients.

    transfer: seconds for a row; idle: seconds alone; l2, power: a fraction and W, by rows per active second; cache: the
    relative increase of its active time when all of L2 is used by others, None where it was no victim.
    """

    transfer: float
    kernels: float
    idle: float
    active: Active
    l2: LinearTerm
    power: LinearTerm
    cache: float | None = None


class Throttle(msgspec.Struct, frozen=True):
    """Model a device's power throttling. idle, most: W at rest and at most; slope: of relative frequency, per W above
    it."""

    idle: float
    most: float
    slope: float

    def frequency(self, asked: float) -> float:
        """Return the frequency, as a fraction of that at rest, at a power demand in W."""
        return max(0.1, 1 + self.slope * max(0.0, self.idle + asked - self.most))


class Igniter(msgspec.Struct, frozen=True, dict=True):
    """Predict by iGniter's model of one kind of device.

    models: by name; one that is the victim in no sample gets the mean cache coefficient of those that are.
    """

    kind: str
    models: dict[str, Coefficients]
    delay: Delay
    throttle: Throttle | None = None

    interferes: ClassVar[bool] = True

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict a slowdown. Raises PlanError for a model without coefficients, and on another kind of device."""
        return max(1.0, self.latency(victim, colocated) / self.latency(victim, ()))

    def latency(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict the latency of a batch in seconds, transfers included."""
        own = self._of(victim)
        colocated_models = [(self._of(load), self._rate(load)) for load in colocated]
        active = self._active(victim)
        if colocated_models:
            cache = self._mean_cache_sensitivity if own.cache is None else own.cache
            active *= 1 + cache * sum(max(0.0, model.l2.at(rate)) for model, rate in colocated_models)
        idle = own.idle + own.kernels * self.delay.of(1 + len(colocated_models))
        power = sum(model.power.at(rate) for model, rate in [(own, self._rate(victim)), *colocated_models])
        frequency = 1.0 if self.throttle is None else self.throttle.frequency(power)
        return (idle + active) / frequency + own.transfer * victim.batch

    def with_profiles(self, profiles: Profiles) -> Igniter:
        """Return the predictor with the models of these profiles added."""
        return Igniter(self.kind, _models(profiles, self.kind) | self.models, self.delay, self.throttle)

    @functools.cached_property
    def _mean_cache_sensitivity(self) -> float:
        return float(np.mean([known.cache for known in self.models.values() if known.cache is not None]))

    def _active(self, load: Load) -> float:
        return self._of(load).active.at(load.batch, load.share / WHOLE)

    def _rate(self, load: Load) -> float:
        return load.batch / self._active(load)

    def _of(self, load: Load) -> Coefficients:
        require(self.kind, load)
        model = self.models.get(load.model)
        if model is None:
            raise PlanError(f"model {load.model!r} has no iGniter coefficients; add the column {L2} to its profile")
        return model


class Measured(NamedTuple):
    """Hold measurements of a model alone: columns of batches, shares as fractions, and active seconds."""

    batches: NDArray[np.float64]
    shares: NDArray[np.float64]
    seconds: NDArray[np.float64]


def active(measured: Measured, *, relative: bool = True) -> Active:
    """Fit the active time by least squares, linear but for k4, which is searched over `K4`.

    relative: minimise relative errors. Raises PlanError for fewer than 5 points.
    """
    batches, shares, seconds = measured
    if len(seconds) < 5:
        raise PlanError(f"{len(seconds)} points are fewer than the 5 coefficients of iGniter's active time")
    weight = 1 / seconds if relative else np.ones_like(seconds)
    best: tuple[float, Active] | None = None
    for k4 in K4:
        over = 1 / (shares + k4)
        terms = np.column_stack([batches**2 * over, batches * over, over, np.ones_like(over)]) * weight[:, None]
        solution, *_ = np.linalg.lstsq(terms, seconds * weight, rcond=None)
        squared_error = float(((terms @ solution - seconds * weight) ** 2).sum())
        if best is None or squared_error < best[0]:
            k1, k2, k3, k5 = solution.tolist()
            best = squared_error, Active(k1, k2, k3, float(k4), k5)
    assert best is not None
    return best[1]


def fit_linear_term(x: Sequence[float], y: Sequence[float]) -> LinearTerm:
    """Fit a line; a constant where all x are equal."""
    if len(set(x)) < 2:
        return LinearTerm(0.0, float(np.mean(y)) if len(y) else 0.0)
    slope, constant = np.polyfit(np.array(x), np.array(y), 1)
    return LinearTerm(float(slope), float(constant))


def fit(samples: Sequence[Sample], profiles: Profiles) -> Igniter:
    """Fit all coefficients but power. Raises PlanError for models without `l2_util_pct`, too few points or samples."""
    if not samples:
        raise PlanError("no samples to fit an analytic model to; measure pairs with `cotenant profile --pairs`")
    kind = samples[0].victim.kind
    bare = Igniter(kind, _models(profiles, kind), Delay(0.0, 0.0))
    terms = []
    for sample in samples:
        own, base = bare._of(sample.victim), bare.latency(sample.victim, ())
        pressure = sum(max(0.0, bare._of(load).l2.at(bare._rate(load))) for load in sample.colocated)
        active_fraction = bare._active(sample.victim) / base
        count = 1 + len(sample.colocated)
        terms.append(
            Term(sample.victim.model, count, own.kernels / base, active_fraction * pressure, sample.slowdown - 1)
        )
    delay, cache = least_squares(terms)
    models = {name: msgspec.structs.replace(model, cache=cache.get(name)) for name, model in bare.models.items()}
    return Igniter(kind, models, delay)


def _models(profiles: Profiles, kind: str) -> dict[str, Coefficients]:
    """Return the models on a kind of device whose profiles have their L2 utilisation."""
    return {
        profile.model: _coefficients(profile)
        for profile in profiles.values()
        if profile.kind == kind and any(L2 in point.features for point in profile.points)
    }


def _coefficients(profile: Profile) -> Coefficients:
    points = [point for point in profile.points if point.procs == 1]
    features = {name: value for point in points for name, value in point.features.items()}
    transfer = (features.get(INPUT, 0.0) + features.get(OUTPUT, 0.0)) / BANDWIDTH
    kernels = features.get(KERNELS, 0.0)
    idle = kernels * features.get(SCHEDULING, 0.0) / 1e6
    seconds = np.array([point.latency - transfer * point.batch - idle for point in points])
    if (seconds <= 0).any():
        raise PlanError(
            f"model {profile.model!r}: transfer and scheduling would take longer than a batch; look at {INPUT},"
            f" {OUTPUT}, {KERNELS} and {SCHEDULING} of its profile"
        )
    batches, shares = np.array([(float(point.batch), point.share / WHOLE) for point in points]).T
    try:
        active_time = active(Measured(batches, shares, seconds))
    except PlanError as error:
        raise PlanError(f"model {profile.model!r}: {error}; measure it at more batches or shares") from None
    l2_points = [
        (point.batch / active_time.at(point.batch, point.share / WHOLE), point.features[L2] / 100)
        for point in points
        if L2 in point.features
    ]
    return Coefficients(
        transfer, kernels, idle, active_time, fit_linear_term(*zip(*l2_points, strict=True)), LinearTerm(0.0, 0.0)
    )
