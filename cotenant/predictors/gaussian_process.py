"""Predict by a Gaussian process over load features, with conformal quantiles and online corrections: the default.

The log of a slowdown is a sum over the co-located loads, so any number of them can be predicted. It is a Gaussian
process (gp_regression.py) that falls back on the features of a load (load_features.py) where models were never measured
together, with more uncertainty. Where the load itself was measured, its residuals correct the mean (residuals.py).

The process' own standard deviations are not trusted. Its errors on held-out samples, in units of them, locate the
quantiles (conformal prediction: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005). There are
two tables of those: samples held out one by one, for victims that were measured, and victim by victim, for those that
were not. Few samples are held out in folds, with hyperparameters fitted without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from cotenant.core.profile import Profiles
from cotenant.errors import PlanError
from cotenant.predictors import REMEMBERED, Load, remembered
from cotenant.predictors.gp_regression import (
    MAX_TUNING_SAMPLES,
    GpRegression,
    Matrix,
    Prior,
    Terms,
    fit_hyperparameters,
)
from cotenant.predictors.gp_regression import most_informative as most_informative
from cotenant.predictors.load_features import FEATURES, load_features
from cotenant.predictors.residuals import ResidualModes, fit_residual_modes, names, without_each
from cotenant.predictors.samples import Sample
from cotenant.predictors.sparse_posterior import Posterior, Side

K = TypeVar("K")
V = TypeVar("V")

MIN_SAMPLES = 8  # minimum samples to fit
MAX_SAMPLES = 1500  # maximum samples to fit, spread evenly over all: time grows with the cube
QUANTILE = 0.9  # the default quantile for planning
KNOTS = np.linspace(0, 1, 41)  # probabilities at which calibrations are tabulated
EXTRAPOLATION_FACTOR = 2  # batches beyond this multiple of the largest sampled one count as extrapolated
MAX_CACHED_SIDES = 2000  # loads whose similarity to the samples is cached: 48 kB each with 1,500 samples
FOLDS = 3  # of cross-validation with few samples
FORGETTING_FACTOR = 0.98  # weight of an earlier observation relative to the next


class Calibration(msgspec.Struct, frozen=True):
    """Held-out errors in standard deviations at the quantiles KNOTS, of victims with samples and without."""

    seen: list[float]
    unseen: list[float]


class OnlineCorrection(msgspec.Struct, frozen=True):
    """Correct the prediction for a victim and its co-located models, by name.

    excess: mean log of the observed over the predicted slowdown, with older observations fading; count: the weight of
    all observations.
    """

    excess: float = 0.0
    count: float = 0.0


class _Uncertainty(NamedTuple):
    """Describe a victim's noise and calibration.

    noise: the variance that remains with any number of samples. table: calibration at the KNOTS; at: its value at the
    quantile.
    """

    noise: float
    table: Sequence[float]
    at: float


class GaussianProcess:
    """Predict slowdowns; a value: an observation makes another one.

    quantile: of the distribution of slowdowns, which `slowdown` returns; 0.5 is the median.
    """

    interferes: ClassVar[bool] = True

    def __init__(
        self,
        posterior: Posterior,
        calibration: Calibration,
        samples: Sequence[Sample],
        known: Mapping[Load, Matrix],
        *,
        profiles: Profiles,
        quantile: float = QUANTILE,
        observed: Mapping[tuple[str, ...], OnlineCorrection],
        residual_modes: Mapping[Load, ResidualModes] | None = None,
    ) -> None:
        """Create from a fitted posterior and the samples behind it.

        known: features of the samples' loads. profiles: of further models that may be predicted. observed: corrections,
        by the names of the victim and, sorted, its co-located models. residual_modes: of the samples, where computed
        before.
        """
        self.quantile = quantile
        self._posterior = posterior
        self._process = process = posterior.process
        self._calibration = calibration
        self._samples = samples
        self._features_of = known
        self._profiles = profiles
        self._observed = observed
        self._residual_modes = fit_residual_modes(process, samples) if residual_modes is None else residual_modes
        self._kind = samples[0].victim.kind
        self._names = _names(samples)
        noises = _noises(process, [sample.victim.model for sample in samples])
        self._uncertainties = {model: self._uncertainty(noise, calibration.seen) for model, noise in noises.items()}
        self._unseen_uncertainty = self._uncertainty(sum(noises.values()) / len(noises), calibration.unseen)
        self._victims: dict[Load, Side] = {}
        self._colocated: dict[Load, Side] = {}
        self._pairs: dict[tuple[Load, Load], tuple[float, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Omit the caches that are large, so that other processes receive a small value."""
        return {**self.__dict__, "_victims": {}, "_colocated": {}}

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict the quantile of a slowdown. Raises PlanError for a model that has neither samples nor a profile."""
        mean, deviation, uncertainty = self._predict(victim, colocated)
        if self._observed:
            mean += self._correction(victim, colocated, uncertainty.noise / deviation**2)
        return max(1.0, math.exp(mean + deviation * uncertainty.at))

    def quantiles(self, victim: Load, colocated: Sequence[Load], probabilities: Sequence[float]) -> list[float]:
        """Return the slowdowns that are not exceeded with some probabilities."""
        if not colocated:
            return [1.0] * len(probabilities)
        mean, deviation, uncertainty = self._predict(victim, colocated)
        median = mean + self._correction(victim, colocated, uncertainty.noise / deviation**2)
        return [
            max(1.0, math.exp(median + deviation * z))
            for z in np.interp(probabilities, KNOTS, uncertainty.table).tolist()
        ]

    def with_quantile(self, quantile: float) -> GaussianProcess:
        """Return the predictor with another quantile."""
        return self._with(quantile=quantile)

    def with_profiles(self, profiles: Profiles) -> GaussianProcess:
        """Return the predictor with the models of these profiles added."""
        return self._with(profiles={**self._profiles, **profiles})

    def observe(self, sample: Sample) -> GaussianProcess:
        """Return the predictor corrected by one more run; repeated observations weigh more, old ones fade."""
        key = _key(sample.victim, sample.colocated)
        previous = self._observed.get(key, OnlineCorrection())
        mean, deviation, uncertainty = self._predict(sample.victim, sample.colocated)
        median = mean + deviation * float(np.interp(0.5, KNOTS, uncertainty.table))
        count = FORGETTING_FACTOR * previous.count + 1
        excess = previous.excess + (math.log(sample.slowdown) - median - previous.excess) / count
        return self._with(observed={**self._observed, key: OnlineCorrection(excess, count)})

    def _with(self, **changes: Any) -> GaussianProcess:
        current = {"quantile": self.quantile, "profiles": self._profiles, "observed": self._observed}
        settings = {**current, **changes}
        return GaussianProcess(
            self._posterior,
            self._calibration,
            self._samples,
            self._features_of,
            residual_modes=self._residual_modes,
            **settings,
        )

    def _correction(self, victim: Load, colocated: Sequence[Load], noise_fraction: float) -> float:
        """Return the log of the online correction: the mean excess, shrunk by how much of it may be noise.

        noise_fraction: the fraction of a sample's variance that is noise, at most 1. If all is noise, one observation
        counts half, since the formerly certain may have changed; where the samples say nothing, it counts fully.
        """
        correction = self._observed.get(_key(victim, colocated))
        if correction is None:
            return 0.0
        return correction.excess * correction.count / (correction.count + noise_fraction)

    def extrapolated_models(self, loads: Iterable[Load]) -> dict[str, str]:
        """Return model → why its slowdowns are extrapolated: from its profile, or from distant samples."""
        reasons: dict[str, str] = {}
        for load in loads:
            victims = [load_.victim for load_ in self._samples if load_.victim.model == load.model]
            if load.kind != self._kind:
                why = f"all samples are of {self._kind!r}"
            elif not victims:
                why = "it is the victim in no sample"
            elif load.batch > (largest_batch := max(load_.batch for load_ in victims)) * EXTRAPOLATION_FACTOR:
                why = f"samples have it with batches of at most {largest_batch}"
            else:
                continue
            reasons.setdefault(load.model, why)
        return reasons

    def _uncertainty(self, noise: float, table: Sequence[float]) -> _Uncertainty:
        return _Uncertainty(noise, table, float(np.interp(self.quantile, KNOTS, table)))

    def _predict(self, victim: Load, colocated: Sequence[Load]) -> tuple[float, float, _Uncertainty]:
        """Return mean and standard deviation of the log of a slowdown.

        Errors of one victim under several loads are correlated: their deviations add up, not their variances.
        """
        mean, deviation = _residual_shift(self._residual_modes, victim, colocated), 0.0
        for load in colocated:
            pair = self._pairs.get((victim, load))
            if pair is None:
                pair = self._pair_moments(victim, load)
            mean += pair[0]
            deviation += pair[1]
        uncertainty = (
            self._uncertainties.get(victim.model, self._unseen_uncertainty)
            if victim.kind == self._kind
            else self._unseen_uncertainty
        )
        return mean, math.sqrt(deviation * deviation + uncertainty.noise), uncertainty

    def _pair_moments(self, victim: Load, other: Load) -> tuple[float, float]:
        victim_side, other_side = self._victims.get(victim), self._colocated.get(other)
        if victim_side is None:
            victim_side = _make_room(self._victims, MAX_CACHED_SIDES)[victim] = self._posterior.victim(
                *self._features_and_number(victim)
            )
        if other_side is None:
            other_side = _make_room(self._colocated, MAX_CACHED_SIDES)[other] = self._posterior.colocated(
                *self._features_and_number(other)
            )
        mean, variance = self._posterior.term(victim_side, other_side)
        if len(self._pairs) >= REMEMBERED:
            self._pairs.clear()
        moments = self._pairs[victim, other] = mean, math.sqrt(variance)
        return moments

    def _features_and_number(self, load: Load) -> tuple[Matrix, int]:
        """Return a load's features and the number of its name; on other kinds only the features carry over."""
        features = self._features_of.get(load)
        number = self._names.get(load.model, -1) if load.kind == self._kind else -1
        return self._profile_features(load) if features is None else features, number

    def _profile_features(self, load: Load) -> Matrix:
        profile = self._profiles.get((load.model, load.kind))
        if profile is not None:
            return load_features(profile, load)
        same_model = [
            other_side
            for other_side in self._features_of
            if (other_side.model, other_side.kind) == (load.model, load.kind)
        ]
        if not same_model:
            raise PlanError(
                f"model {load.model!r} on {load.kind!r} has neither samples nor a profile; profile it, or leave it out"
            )
        nearest = min(
            same_model, key=lambda each: (abs(each.share - load.share), abs(math.log(each.batch / load.batch)))
        )
        return self._features_of[nearest]

    def to_json(self) -> dict[str, Any]:
        loads = list(dict.fromkeys(load for sample in self._samples for load in (sample.victim, *sample.colocated)))
        index = {load: i for i, load in enumerate(loads)}
        return {
            "quantile": self.quantile,
            "prior": msgspec.to_builtins(self._process.prior),
            "calibration": msgspec.to_builtins(self._calibration),
            "loads": [_Load(each, _named(self._features_of[each])) for each in loads],
            "samples": [
                _Row(
                    index[sample.victim],
                    [index[load] for load in sample.colocated],
                    sample.alone,
                    sample.together,
                    float(outlying),
                )
                for sample, outlying in zip(self._samples, self._process.noise_factors, strict=True)
            ],
            "observed": [{"models": models, **msgspec.to_builtins(seen)} for models, seen in self._observed.items()],
        }

    @classmethod
    def from_json(cls, value: Any) -> GaussianProcess:
        file = msgspec.convert(value, _File, strict=False)
        known = {each.load: np.array([each.features.get(name, math.nan) for name in FEATURES]) for each in file.loads}
        loads = list(known)
        samples = [
            Sample(loads[each.victim], tuple(loads[i] for i in each.colocated), each.alone, each.together)
            for each in file.samples
        ]
        terms = _terms(_runs(samples), _names(samples), known.__getitem__)
        return cls(
            Posterior(
                GpRegression(file.prior, terms, _values(samples), np.array([each.outlying for each in file.samples]))
            ),
            file.calibration,
            samples,
            known,
            profiles={},
            quantile=file.quantile,
            observed={each.models: OnlineCorrection(each.excess, each.count) for each in file.observed},
        )


class _Load(msgspec.Struct):
    load: Load
    features: dict[str, float]


class _Row(msgspec.Struct):
    """Hold one sample.

    victim, colocated: indices of loads. alone, together: seconds. outlying: factor on the noise variance.
    """

    victim: int
    colocated: list[int]
    alone: float
    together: float
    outlying: float


class _Observed(msgspec.Struct):
    models: tuple[str, ...]
    excess: float
    count: float


class _File(msgspec.Struct):
    quantile: float
    prior: Prior
    calibration: Calibration
    loads: list[_Load]
    samples: list[_Row]
    observed: list[_Observed]


def fit(samples: Sequence[Sample], profiles: Profiles) -> GaussianProcess:
    """Fit to samples. Raises PlanError for fewer than MIN_SAMPLES, and for a sample of a model without a profile."""
    if len(samples) < MIN_SAMPLES:
        raise PlanError(f"{len(samples)} samples for a predictor that needs {MIN_SAMPLES}; measure more pairs")
    if len(samples) > MAX_SAMPLES:
        samples = [samples[i] for i in np.linspace(0, len(samples) - 1, MAX_SAMPLES).round().astype(int)]
    loads = {load for sample in samples for load in (sample.victim, *sample.colocated)}
    known = {load: load_features(profiles[load.model, load.kind], load) for load in loads}
    with threadpool_limits(1):  # more threads gain 12 % on an idle machine, and contend on a busy one
        process = fit_hyperparameters(_terms(_runs(samples), _names(samples), known.__getitem__), _values(samples))
        calibration = _calibration(process, samples)
    return GaussianProcess(Posterior(process), calibration, samples, known, profiles=profiles, observed={})


def select_experiments(
    runs: Sequence[Sequence[Load]], profiles: Profiles, turns: Mapping[int, int], measured: Iterable[int] = ()
) -> Iterator[int]:
    """Yield indices of runs of two or more loads, the most informative first; each load is a victim of the others.

    turns: for each number of loads, how many of its runs come in turn. measured: indices of runs that exist, omitted.
    """
    samples = [
        ((victim, (*loads[:i], *loads[i + 1 :])), index)
        for index, loads in enumerate(runs)
        for i, victim in enumerate(loads)
    ]
    numbers = {model: i for i, model in enumerate(dict.fromkeys(load.model for loads in runs for load in loads))}
    known = {load: load_features(profiles[load.model, load.kind], load) for loads in runs for load in loads}
    terms = _terms([run for run, _ in samples], numbers, known.__getitem__)
    indices = np.array([index for _, index in samples])
    return most_informative(terms, indices, [len(loads) for loads in runs], turns, list(measured))


def _calibration(process: GpRegression, samples: Sequence[Sample]) -> Calibration:
    models = [sample.victim.model for sample in samples]
    noises = _noises(process, models)
    own = np.array([noises[model] for model in models])
    if len(samples) > MAX_TUNING_SAMPLES:
        errors, variances = process.leave_out_errors()
        scaled = (errors - without_each(process, samples)) / np.sqrt(variances + own)
    else:
        scaled = _cross_validated_errors(process.terms, process.values, samples)
    seen = np.quantile(scaled, KNOTS)
    if len(noises) == 1:
        return Calibration(seen.tolist(), seen.tolist())
    errors, variances = process.leave_out_errors(np.unique(models, return_inverse=True)[1])
    unseen = np.quantile(errors / np.sqrt(variances + own.mean()), KNOTS)
    # The next victim deviates from k others by more than they do from their mean: variances are as k + 1 to k - 1. A
    # bias over these few tells how far off the next may be, but not in which direction.
    middle = np.interp(0.5, KNOTS, unseen)
    around = (unseen - middle) * math.sqrt((len(noises) + 1) / (len(noises) - 1))
    beyond = np.where(KNOTS > 0.5, np.maximum(around, around + middle), np.minimum(around, around + middle))
    unseen = np.where(KNOTS == 0.5, 0.0, beyond)
    return Calibration(seen.tolist(), unseen.tolist())


def _cross_validated_errors(terms: Terms, values: Matrix, samples: Sequence[Sample]) -> Matrix:
    """Return errors on each of FOLDS folds, in standard deviations, of a process fitted to the others.

    With few samples, hyperparameters fitted to all of them would also fit the one held out.
    """
    groups = np.random.default_rng(0).permutation(len(values)) % FOLDS
    models, scaled = np.array([sample.victim.model for sample in samples]), np.empty_like(values)
    for group in range(FOLDS):
        own, others = groups == group, np.flatnonzero(groups != group)
        part = fit_hyperparameters(terms.of(others), values[others])
        outlying = np.ones_like(values)
        outlying[others] = part.noise_factors
        errors, variances = GpRegression(part.prior, terms, values, outlying).leave_out_errors(groups)
        noises = _noises(part, models[others].tolist())
        mean_noise = sum(noises.values()) / len(noises)
        noise = np.array([noises.get(model, mean_noise) for model in models[own].tolist()])
        residual_modes = fit_residual_modes(part, [samples[i] for i in others.tolist()])
        shift = [
            _residual_shift(residual_modes, samples[i].victim, samples[i].colocated)
            for i in np.flatnonzero(own).tolist()
        ]
        scaled[own] = (errors[own] - shift) / np.sqrt(variances[own] + noise)
    return scaled


def _residual_shift(residual_modes: Mapping[Load, ResidualModes], victim: Load, colocated: Sequence[Load]) -> float:
    own = residual_modes.get(victim)
    return 0.0 if own is None else own.of(names(colocated))


def _noises(process: GpRegression, victims: Sequence[str]) -> dict[str, float]:
    """Return the noise variance of each victim's samples: the latencies of some models vary more."""
    models = np.array(victims)
    return {
        model: process.prior.noise**2 * float(process.noise_factors[models == model].mean())
        for model in dict.fromkeys(victims)
    }


def _make_room(cache: dict[K, V], max_size: int) -> dict[K, V]:
    """Clear a full cache before one more entry."""
    if len(cache) >= max_size:
        cache.clear()
    return cache


def _names(samples: Sequence[Sample]) -> dict[str, int]:
    models = (load.model for sample in samples for load in (sample.victim, *sample.colocated))
    return {model: number for number, model in enumerate(dict.fromkeys(models))}


def _runs(samples: Sequence[Sample]) -> list[tuple[Load, Sequence[Load]]]:
    return [(sample.victim, sample.colocated) for sample in samples]


def _terms(
    runs: Sequence[tuple[Load, Sequence[Load]]], names: Mapping[str, int], of: Callable[[Load], Matrix]
) -> Terms:
    """Build the terms of runs; a model without a number is like no other."""
    pairs = [(i, victim, load) for i, (victim, beside) in enumerate(runs) for load in beside]
    return Terms(
        columns=np.array([np.concatenate((of(victim), of(load))) for _, victim, load in pairs]),
        victims=np.array([names.get(victim.model, -1) for _, victim, _ in pairs]),
        colocated=np.array([names.get(load.model, -1) for _, _, load in pairs]),
        owners=np.array([i for i, _, _ in pairs]),
    )


def _values(samples: Sequence[Sample]) -> Matrix:
    return np.log([sample.slowdown for sample in samples])


def _key(victim: Load, colocated: Sequence[Load]) -> tuple[str, ...]:
    return (victim.model, *names(colocated))


def _named(values: Matrix) -> dict[str, float]:
    return {name: value for name, value in zip(FEATURES, values.tolist(), strict=True) if not math.isnan(value)}
