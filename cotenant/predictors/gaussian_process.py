"""Predict by a Gaussian process over load features, with conformal quantiles and online corrections: the default.

The log of the slowdown beside one load is a Gaussian process (gp_regression.py) that falls back on the features of a
load (load_features.py) where models were never measured together, with more uncertainty. Where the load itself was
measured, its residuals correct the mean (residuals.py). Beside several loads the slowdowns beside each are composed
(composition.py). Samples of several belong to the process only where their victim was never measured beside one; the
process then takes the log of their slowdown for a sum.

The process' own standard deviations are not trusted. Its errors on held-out samples, in units of them, locate the
quantiles (conformal prediction: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005). There are
tables of those (calibration.py): samples held out one by one, for each load that was measured, and victim by victim,
for those that were not. Few samples are held out in folds, with hyperparameters fitted without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from cotenant.core.profile import Profiles
from cotenant.errors import PlanError
from cotenant.predictors import ANSWERS, REMEMBERED, Load, remembered
from cotenant.predictors.calibration import (
    KNOTS,
    NORMAL,
    Calibration,
    QuantileTables,
    calibrate,
    checked,
    noises_of,
    pooled_table,
)
from cotenant.predictors.composition import Excess, MeasuredSet, composed, waiting
from cotenant.predictors.gp_regression import GpRegression, Matrix, Prior, fit_hyperparameters, informative_samples
from cotenant.predictors.gp_regression import most_informative as most_informative
from cotenant.predictors.gp_samples import log_slowdowns, name_numbers, runs_of, split_samples, terms_of
from cotenant.predictors.load_features import FEATURES, load_features
from cotenant.predictors.online_corrections import ObservedRun, OnlineCorrections
from cotenant.predictors.residuals import ResidualModes, fit_residual_modes
from cotenant.predictors.samples import Sample
from cotenant.predictors.sparse_posterior import Posterior, Side

K = TypeVar("K")
V = TypeVar("V")

MIN_SAMPLES = 8  # minimum samples to fit
MAX_SAMPLES = 2000  # maximum samples to fit, the most informative of all: time grows with the cube
QUANTILE = 0.9  # the default quantile for planning
EXTRAPOLATION_FACTOR = 2  # batches beyond this multiple of the largest sampled one count as extrapolated
MAX_CACHED_SIDES = 2000  # loads whose similarity to the samples is cached: 48 kB each with 1,500 samples
MAX_CACHED_QUANTILES = 8
BASELINE_QUANTILE = 0.03  # of the slowdowns beside all sampled loads: the least of them, up to noise


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
        observed: OnlineCorrections,
        residual_modes: Mapping[Load, ResidualModes] | None = None,
        excess: tuple[Excess, Sequence[float]] | None = None,
        tables: QuantileTables | None = None,
    ) -> None:
        """Create from a fitted posterior and the samples behind it.

        known: features of the samples' loads. profiles: of further models that may be predicted. observed: runs since
        the fit. residual_modes, excess and its table, tables: of the samples, where computed before.
        """
        self.quantile = checked(quantile)
        self._posterior = posterior
        self._process = process = posterior.process
        self._calibration = calibration
        self._samples = samples
        self._features_of = known
        self._profiles = profiles
        self._observed = observed
        regressed, sets = split_samples(samples)
        self._residual_modes = fit_residual_modes(process, regressed) if residual_modes is None else residual_modes
        self._kind = samples[0].victim.kind
        self._names = name_numbers(regressed)
        noises = noises_of(process, [sample.victim.model for sample in regressed])
        self._noises, self._mean_noise = noises, sum(noises.values()) / len(noises)
        self._tables = tables or QuantileTables(calibration, [sample.victim for sample in regressed])
        self._quantiles: dict[float, GaussianProcess] = {quantile: self}
        self._uncertainties: dict[Load, _Uncertainty] = {}
        self._victims: dict[Load, Side] = {}
        self._colocated: dict[Load, Side] = {}
        self._pairs: dict[tuple[Load, Load], tuple[float, float]] = {}
        self._baselines: dict[Load, float] = {}
        self._others_weights: Matrix | None = None
        self._others = list(dict.fromkeys(load for sample in regressed for load in sample.colocated))
        self._excess, self._set_table = self._fit_excess(sets) if excess is None else excess

    def __getstate__(self) -> dict[str, Any]:
        """Omit the caches that are large, so that other processes receive a small value."""
        return {**self.__dict__, "_victims": {}, "_colocated": {}, "_others_weights": None, "_quantiles": {}}

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict the quantile of a slowdown. Raises PlanError for a model that has neither samples nor a profile."""
        mean, deviation, uncertainty = self._predict(victim, colocated)
        mean += self._observed.of(victim, colocated, uncertainty.noise / deviation**2)
        return max(1.0, math.exp(mean + deviation * uncertainty.at))

    def quantiles(self, victim: Load, colocated: Sequence[Load], probabilities: Sequence[float]) -> list[float]:
        """Return the slowdowns that are not exceeded with some probabilities. Raises PlanError as `with_quantile`."""
        probabilities = [checked(each) for each in probabilities]
        if not colocated:
            return [1.0] * len(probabilities)
        mean, deviation, uncertainty = self._predict(victim, colocated)
        median = mean + self._observed.of(victim, colocated, uncertainty.noise / deviation**2)
        return [
            max(1.0, math.exp(median + deviation * z))
            for z in np.interp(probabilities, KNOTS, uncertainty.table).tolist()
        ]

    def with_quantile(self, quantile: float) -> GaussianProcess:
        """Return the predictor with another quantile: the same each time, with the same caches but for its answers.

        Raises PlanError for one that is not from 0 to 1.
        """
        other = self._quantiles.get(checked(quantile))
        if other is None:
            other = GaussianProcess.__new__(GaussianProcess)
            other.__dict__ = {**self.__dict__, "quantile": quantile, "_uncertainties": {}, ANSWERS: {}}
            _make_room(self._quantiles, MAX_CACHED_QUANTILES)[quantile] = other
        return other

    def with_profiles(self, profiles: Profiles) -> GaussianProcess:
        """Return the predictor with the models of these profiles added."""
        return self._with(profiles={**self._profiles, **profiles})

    def observe(self, sample: Sample) -> GaussianProcess:
        """Return the predictor corrected by one more run; repeated observations weigh more, old ones fade."""
        mean, deviation, uncertainty = self._predict(sample.victim, sample.colocated)
        median = mean + deviation * float(np.interp(0.5, KNOTS, uncertainty.table))
        excess = math.log(sample.slowdown) - median
        return self._with(observed=self._observed.observe(sample.victim, sample.colocated, excess))

    def _with(self, **changes: Any) -> GaussianProcess:
        current = {"quantile": self.quantile, "profiles": self._profiles, "observed": self._observed}
        settings = {**current, **changes}
        return GaussianProcess(
            self._posterior,
            self._calibration,
            self._samples,
            self._features_of,
            residual_modes=self._residual_modes,
            excess=(self._excess, self._set_table),
            tables=self._tables,
            **settings,
        )

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
        """Return mean and standard deviation of the log of a slowdown."""
        uncertainty = self._uncertainty_of(victim)
        if len(colocated) == 1:
            mean, deviation = self._beside_one(victim, colocated[0])
            return mean, math.sqrt(deviation * deviation + uncertainty.noise), uncertainty
        loads = [victim, *colocated]
        sets = [self._beside_several(load, loads[:i] + loads[i + 1 :]) for i, load in enumerate(loads)]
        throughput = sum(self._baseline(load) / math.exp(mean) for load, (mean, _) in zip(loads, sets, strict=True))
        mean, variance = sets[0]
        # A device that always works does as much for several as for one; predictions that say less are too slow.
        mean += min(0.0, math.log(throughput))
        return mean, math.sqrt(variance + uncertainty.noise), self._uncertainty(uncertainty.noise, self._set_table)

    def relative_throughput(self, loads: Sequence[Load]) -> float:
        """Return the sum of the predicted throughputs of co-located loads, each relative to that beside the load that
        interferes least with it.
        """
        return sum(
            self._baseline(load) / math.exp(self._predict(load, [*loads[:i], *loads[i + 1 :]])[0])
            for i, load in enumerate(loads)
        )

    def _uncertainty_of(self, victim: Load) -> _Uncertainty:
        known = self._uncertainties.get(victim)
        if known is None:
            noise = self._noises.get(victim.model) if victim.kind == self._kind else None
            known = self._uncertainty(
                self._mean_noise if noise is None else noise,
                self._tables.unseen if noise is None else self._tables.of(victim),
            )
            _make_room(self._uncertainties, MAX_CACHED_SIDES)[victim] = known
        return known

    def _beside_several(self, victim: Load, colocated: Sequence[Load]) -> tuple[float, float]:
        """Return mean and variance, without the victim's noise, of the log of a slowdown."""
        mean, variance, waits = self._composed(victim, colocated)
        excess, excess_variance = self._excess.of(victim, colocated)
        return mean + waits * excess, variance + waits**2 * excess_variance

    def _composed(self, victim: Load, colocated: Sequence[Load]) -> tuple[float, float, float]:
        """Return mean and variance of the log of a composed slowdown, and how its excess grows with it.

        Errors of one victim under several loads are correlated: their deviations add up, not their variances.
        """
        beside = [self._beside_one(victim, load) for load in colocated]
        baseline = self._baseline(victim)
        total, elasticities = composed(baseline, [math.exp(mean) for mean, _ in beside])
        deviation = sum(elasticity * each for elasticity, (_, each) in zip(elasticities, beside, strict=True))
        return math.log(total), deviation * deviation, waiting(baseline, total)

    def _fit_excess(self, sets: Sequence[Sample]) -> tuple[Excess, Sequence[float]]:
        """Return the excess of measured sets, and the calibration of sets."""
        compositions = [self._composed(sample.victim, sample.colocated) for sample in sets]
        excess = Excess(
            [
                MeasuredSet(sample.victim, sample.colocated, waits, math.log(sample.slowdown) - mean)
                for sample, (mean, _, waits) in zip(sets, compositions, strict=True)
            ]
        )
        noises = [
            variance + self._uncertainty_of(each.victim).noise
            for each, (_, variance, _) in zip(sets, compositions, strict=True)
        ]
        scaled = excess.leave_out_errors / np.sqrt(np.array(noises) + excess.leave_out_variances)
        return excess, pooled_table(scaled, NORMAL)

    def _beside_one(self, victim: Load, other: Load) -> tuple[float, float]:
        """Return mean and standard deviation, without noise, of the log of the slowdown beside one load."""
        pair = self._pairs.get((victim, other))
        if pair is None:
            pair = self._pair_moments(victim, other)
        return pair

    def _baseline(self, victim: Load) -> float:
        """Return the slowdown beside the sampled load that interferes least."""
        baseline = self._baselines.get(victim)
        if baseline is None:
            if self._others_weights is None:
                self._others_weights = np.array([self._colocated_side(load).weights for load in self._others])
            means = self._others_weights @ self._victim_side(victim).weights + self._process.prior.mean
            shifts = {model: self._shift(victim, model) for model in {load.model for load in self._others}}
            means += [shifts[load.model] for load in self._others]
            baseline = math.exp(float(np.quantile(means, BASELINE_QUANTILE)))
            _make_room(self._baselines, MAX_CACHED_SIDES)[victim] = baseline
        return baseline

    def _pair_moments(self, victim: Load, other: Load) -> tuple[float, float]:
        mean, variance = self._posterior.term(self._victim_side(victim), self._colocated_side(other))
        if len(self._pairs) >= REMEMBERED:
            self._pairs.clear()
        moments = self._pairs[victim, other] = mean + self._shift(victim, other.model), math.sqrt(variance)
        return moments

    def _shift(self, victim: Load, other: str) -> float:
        """Return what a victim's residuals add to the mean beside a model."""
        modes = self._residual_modes.get(victim)
        return 0.0 if modes is None else modes.of((other,))

    def _victim_side(self, load: Load) -> Side:
        side = self._victims.get(load)
        if side is None:
            side = self._posterior.victim(*self._features_and_number(load))
            _make_room(self._victims, MAX_CACHED_SIDES)[load] = side
        return side

    def _colocated_side(self, load: Load) -> Side:
        side = self._colocated.get(load)
        if side is None:
            side = self._posterior.colocated(*self._features_and_number(load))
            _make_room(self._colocated, MAX_CACHED_SIDES)[load] = side
        return side

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
        regressed = split_samples(self._samples)[0]
        outlying_of = dict(zip(map(id, regressed), self._process.noise_factors.tolist(), strict=True))
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
                    outlying,
                )
                for sample in self._samples
                for outlying in [outlying_of.get(id(sample), 1.0)]
            ],
            "observed": self._observed.to_json(),
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
        outlying_of = {id(sample): each.outlying for sample, each in zip(samples, file.samples, strict=True)}
        regressed = split_samples(samples)[0]
        terms = terms_of(runs_of(regressed), name_numbers(regressed), known.__getitem__)
        outlying = np.array([outlying_of[id(sample)] for sample in regressed])
        return cls(
            Posterior(GpRegression(file.prior, terms, log_slowdowns(regressed), outlying)),
            file.calibration,
            samples,
            known,
            profiles={},
            quantile=file.quantile,
            observed=OnlineCorrections.from_file(file.observed, samples),
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


class _File(msgspec.Struct):
    quantile: float
    prior: Prior
    calibration: Calibration
    loads: list[_Load]
    samples: list[_Row]
    observed: list[ObservedRun]


def fit(samples: Sequence[Sample], profiles: Profiles) -> GaussianProcess:
    """Fit to samples. Raises PlanError for fewer than MIN_SAMPLES, and for a sample of a model without a profile."""
    samples, sets = split_samples(samples)
    if len(samples) < MIN_SAMPLES:
        raise PlanError(f"{len(samples)} samples for a predictor that needs {MIN_SAMPLES}; measure more pairs")
    loads = {load for sample in (*samples, *sets) for load in (sample.victim, *sample.colocated)}
    known = {load: load_features(profiles[load.model, load.kind], load) for load in loads}
    if len(samples) > MAX_SAMPLES:
        samples = sorted(samples, key=_order)
        terms = terms_of(runs_of(samples), name_numbers(samples), known.__getitem__)
        samples = [samples[i] for i in informative_samples(terms, log_slowdowns(samples), MAX_SAMPLES)]
    used = set(map(id, samples))
    every = [*samples, *(sample for sample in sets if id(sample) not in used)]
    samples, _ = split_samples(every)  # a victim may be left with its sets alone
    with threadpool_limits(1):  # more threads gain 12 % on an idle machine, and contend on a busy one
        terms = terms_of(runs_of(samples), name_numbers(samples), known.__getitem__)
        process = fit_hyperparameters(terms, log_slowdowns(samples))
        calibration = calibrate(process, samples)
    return GaussianProcess(
        Posterior(process), calibration, every, known, profiles=profiles, observed=OnlineCorrections()
    )


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
    terms = terms_of([run for run, _ in samples], numbers, known.__getitem__)
    indices = np.array([index for _, index in samples])
    return most_informative(terms, indices, [len(loads) for loads in runs], turns, list(measured))


def _make_room(cache: dict[K, V], max_size: int) -> dict[K, V]:
    """Clear a full cache before one more entry."""
    if len(cache) >= max_size:
        cache.clear()
    return cache


def _order(sample: Sample) -> tuple[object, ...]:
    """Return a key by which samples have an order of their own."""
    return (*map(msgspec.structs.astuple, (sample.victim, *sample.colocated)), (sample.together, sample.alone))


def _named(values: Matrix) -> dict[str, float]:
    return {name: value for name, value in zip(FEATURES, values.tolist(), strict=True) if not math.isnan(value)}
