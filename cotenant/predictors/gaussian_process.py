"""Our own predictor: a slowdown from what profiles tell of victim and neighbours, corrected by what was seen of them.

The log of a slowdown is a sum over the neighbours, so any number of them can be asked for. It is a Gaussian process
(process.py) that falls back on the traits of a load (traits.py) where models were never measured together, and is less
sure of those. Where a load was measured itself, what that leaves of its samples is looked at once more (remainder.py).

The process' own standard deviations are not believed. Its errors on samples that are left out, in units of them, say
where a quantile lies (conformal prediction: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005).
There are two tables of those: samples left out one by one, for victims that were measured, and victim by victim, for
those that were not. Few samples are left out in parts, and scales chosen without them.
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
from cotenant.predictors.gp_regression import LOOKED_AT, GpRegression, Matrix, Prior, Terms, fit_hyperparameters
from cotenant.predictors.gp_regression import most_informative as in_order
from cotenant.predictors.load_features import TRAITS, load_features
from cotenant.predictors.residuals import ResidualModes, fit_residual_modes, names, without_each
from cotenant.predictors.samples import Sample
from cotenant.predictors.sparse_posterior import Posterior, Side

K = TypeVar("K")
V = TypeVar("V")

FEWEST = 8  # samples
MOST = 1500  # samples that are learnt from, spread over all: time goes with the cube
QUANTILE = 0.9  # that planners reckon with, unless told
KNOTS = np.linspace(0, 1, 41)  # quantiles of a calibration
BEYOND = 2  # times the largest batch of the samples: what a larger one suffers is a guess
SIDES = 2000  # loads that are kept as they look to the samples: of 1,500 samples 48 kB each
FOLDS = 3  # of few samples
FADING = 0.98  # what an observation counts, of before, when the next comes


class Calibration(msgspec.Struct, frozen=True):
    """Errors on what was left out, in standard deviations, at the quantiles KNOTS; of victims seen before, and not."""

    seen: list[float]
    unseen: list[float]


class SeenSamples(msgspec.Struct, frozen=True):
    """What was observed beside what was foreseen, of a victim and its neighbours by name: log of the ratio, with older
    observations fading, and how many count."""

    excess: float = 0.0
    count: float = 0.0


class _Doubt(NamedTuple):
    """Of a victim. noise: what of the squared deviation no sample takes away. table: at the KNOTS. at: the quantile."""

    noise: float
    table: Sequence[float]
    at: float


class GaussianProcess:
    """quantile: of the slowdowns that are possible, which `slowdown` gives; 0.5 is the median.

    It is a value: what is observed makes another one.
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
        observed: Mapping[tuple[str, ...], SeenSamples],
        left: Mapping[Load, ResidualModes] | None = None,
    ) -> None:
        """known: traits of the loads of the samples. profiles: of models that may be asked for besides.

        observed: by the names of the victim and, in order, its neighbours. left: of the samples, where it is known.
        """
        self.quantile = quantile
        self._posterior = posterior
        self._process = process = posterior.process
        self._calibration = calibration
        self._samples = samples
        self._known = known
        self._profiles = profiles
        self._observed = observed
        self._left = fit_residual_modes(process, samples) if left is None else left
        self._kind = samples[0].victim.kind
        self._names = _names(samples)
        noises = _noises(process, [sample.victim.model for sample in samples])
        self._doubts = {model: self._doubt(noise, calibration.seen) for model, noise in noises.items()}
        self._strange = self._doubt(sum(noises.values()) / len(noises), calibration.unseen)
        self._victims: dict[Load, Side] = {}
        self._neighbours: dict[Load, Side] = {}
        self._pairs: dict[tuple[Load, Load], tuple[float, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What another process is sent: answers are small, what loads look like is not."""
        return {**self.__dict__, "_victims": {}, "_neighbours": {}}

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Raises PlanError for a model that has neither samples nor a profile."""
        mean, deviation, doubt = self._foreseen(victim, colocated)
        if self._observed:
            mean += self._correction(victim, colocated, doubt.noise / deviation**2)
        return max(1.0, math.exp(mean + deviation * doubt.at))

    def quantiles(self, victim: Load, colocated: Sequence[Load], wanted: Sequence[float]) -> list[float]:
        """Slowdowns that are not exceeded with these probabilities."""
        if not colocated:
            return [1.0] * len(wanted)
        mean, deviation, doubt = self._foreseen(victim, colocated)
        middle = mean + self._correction(victim, colocated, doubt.noise / deviation**2)
        return [max(1.0, math.exp(middle + deviation * z)) for z in np.interp(wanted, KNOTS, doubt.table).tolist()]

    def with_quantile(self, quantile: float) -> GaussianProcess:
        """The same, with another quantile."""
        return self._with(quantile=quantile)

    def with_profiles(self, profiles: Profiles) -> GaussianProcess:
        return self._with(profiles={**self._profiles, **profiles})

    def observe(self, sample: Sample) -> GaussianProcess:
        """Corrected by one more run: what was seen often counts more, and less as time goes on."""
        key = _key(sample.victim, sample.colocated)
        before = self._observed.get(key, SeenSamples())
        mean, deviation, doubt = self._foreseen(sample.victim, sample.colocated)
        median = mean + deviation * float(np.interp(0.5, KNOTS, doubt.table))
        count = FADING * before.count + 1
        excess = before.excess + (math.log(sample.slowdown) - median - before.excess) / count
        return self._with(observed={**self._observed, key: SeenSamples(excess, count)})

    def _with(self, **changes: Any) -> GaussianProcess:
        now = {"quantile": self.quantile, "profiles": self._profiles, "observed": self._observed}
        every = {**now, **changes}
        return GaussianProcess(self._posterior, self._calibration, self._samples, self._known, left=self._left, **every)

    def _correction(self, victim: Load, colocated: Sequence[Load], known: float) -> float:
        """Log of a factor: the mean of what exceeded the forecast, shrunk by how much that is noise.

        known: how much of what a sample may differ by is noise, at most 1. One observation counts half where all of it
        is, since what was sure may have changed, and wholly where the samples say nothing.
        """
        seen = self._observed.get(_key(victim, colocated))
        if seen is None:
            return 0.0
        return seen.excess * seen.count / (seen.count + known)

    def extrapolated_models(self, loads: Iterable[Load]) -> dict[str, str]:
        """Model → why what it suffers is told from its profile, or from samples far off, and is less sure for it."""
        found: dict[str, str] = {}
        for load in loads:
            seen = [it.victim for it in self._samples if it.victim.model == load.model]
            if load.kind != self._kind:
                why = f"all samples are of {self._kind!r}"
            elif not seen:
                why = "it is the victim in no sample"
            elif load.batch > (most := max(it.batch for it in seen)) * BEYOND:
                why = f"samples have it with batches of at most {most}"
            else:
                continue
            found.setdefault(load.model, why)
        return found

    def _doubt(self, noise: float, table: Sequence[float]) -> _Doubt:
        return _Doubt(noise, table, float(np.interp(self.quantile, KNOTS, table)))

    def _foreseen(self, victim: Load, colocated: Sequence[Load]) -> tuple[float, float, _Doubt]:
        """Mean and standard deviation of the log of a slowdown.

        What a victim is misjudged by beside one neighbour, it is beside others: their deviations add up, not their
        squares.
        """
        mean, unsure = _moved(self._left, victim, colocated), 0.0
        for load in colocated:
            known = self._pairs.get((victim, load))
            if known is None:
                known = self._paired(victim, load)
            mean += known[0]
            unsure += known[1]
        doubt = self._doubts.get(victim.model, self._strange) if victim.kind == self._kind else self._strange
        return mean, math.sqrt(unsure * unsure + doubt.noise), doubt

    def _paired(self, victim: Load, neighbour: Load) -> tuple[float, float]:
        one, other = self._victims.get(victim), self._neighbours.get(neighbour)
        if one is None:
            one = _room(self._victims, SIDES)[victim] = self._posterior.victim(*self._seen(victim))
        if other is None:
            other = _room(self._neighbours, SIDES)[neighbour] = self._posterior.neighbour(*self._seen(neighbour))
        mean, variance = self._posterior.at(one, other)
        if len(self._pairs) >= REMEMBERED:
            self._pairs.clear()
        found = self._pairs[victim, neighbour] = mean, math.sqrt(variance)
        return found

    def _seen(self, load: Load) -> tuple[Matrix, int]:
        """Traits, and the number of its name. On another kind of device it is another model: only traits carry over."""
        known = self._known.get(load)
        number = self._names.get(load.model, -1) if load.kind == self._kind else -1
        return self._new(load) if known is None else known, number

    def _new(self, load: Load) -> Matrix:
        profile = self._profiles.get((load.model, load.kind))
        if profile is not None:
            return load_features(profile, load)
        alike = [other for other in self._known if (other.model, other.kind) == (load.model, load.kind)]
        if not alike:
            raise PlanError(
                f"model {load.model!r} on {load.kind!r} has neither samples nor a profile; profile it, or leave it out"
            )
        nearest = min(alike, key=lambda it: (abs(it.share - load.share), abs(math.log(it.batch / load.batch))))
        return self._known[nearest]

    def to_json(self) -> dict[str, Any]:
        loads = list(dict.fromkeys(load for sample in self._samples for load in (sample.victim, *sample.colocated)))
        place = {load: i for i, load in enumerate(loads)}
        return {
            "quantile": self.quantile,
            "prior": msgspec.to_builtins(self._process.prior),
            "calibration": msgspec.to_builtins(self._calibration),
            "loads": [_Load(it, _named(self._known[it])) for it in loads],
            "samples": [
                _Row(
                    place[sample.victim],
                    [place[load] for load in sample.colocated],
                    sample.alone,
                    sample.together,
                    float(outlying),
                )
                for sample, outlying in zip(self._samples, self._process.outlying, strict=True)
            ],
            "observed": [{"models": models, **msgspec.to_builtins(seen)} for models, seen in self._observed.items()],
        }

    @classmethod
    def from_json(cls, value: Any) -> GaussianProcess:
        file = msgspec.convert(value, _File, strict=False)
        known = {it.load: np.array([it.traits.get(name, math.nan) for name in TRAITS]) for it in file.loads}
        loads = list(known)
        samples = [
            Sample(loads[it.victim], tuple(loads[i] for i in it.colocated), it.alone, it.together)
            for it in file.samples
        ]
        terms = _terms(_runs(samples), _names(samples), known.__getitem__)
        return cls(
            Posterior(
                GpRegression(file.prior, terms, _values(samples), np.array([it.outlying for it in file.samples]))
            ),
            file.calibration,
            samples,
            known,
            profiles={},
            quantile=file.quantile,
            observed={it.models: SeenSamples(it.excess, it.count) for it in file.observed},
        )


class _Load(msgspec.Struct):
    load: Load
    traits: dict[str, float]


class _Row(msgspec.Struct):
    """victim, neighbours: places among the loads. alone, together: seconds. outlying: as Process has it."""

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
    """Raises PlanError for fewer than FEWEST samples, and for one of a model without a profile."""
    if len(samples) < FEWEST:
        raise PlanError(f"{len(samples)} samples for a predictor that needs {FEWEST}; measure more pairs")
    if len(samples) > MOST:
        samples = [samples[i] for i in np.linspace(0, len(samples) - 1, MOST).round().astype(int)]
    loads = {load for sample in samples for load in (sample.victim, *sample.colocated)}
    known = {load: load_features(profiles[load.model, load.kind], load) for load in loads}
    with threadpool_limits(1):  # more threads gain an eighth on an idle machine, and wait for each other on a busy one
        process = fit_hyperparameters(_terms(_runs(samples), _names(samples), known.__getitem__), _values(samples))
        calibration = _calibration(process, samples)
    return GaussianProcess(Posterior(process), calibration, samples, known, profiles=profiles, observed={})


def select_experiments(
    runs: Sequence[Sequence[Load]], profiles: Profiles, turns: Mapping[int, int], measured: Iterable[int] = ()
) -> Iterator[int]:
    """Places of runs of two loads or more, the one first that tells most of all of them; each load is a victim of the
    others. turns: of so many loads so many runs come. measured: places of those that are done, which are left out."""
    samples = [
        ((victim, (*loads[:i], *loads[i + 1 :])), place)
        for place, loads in enumerate(runs)
        for i, victim in enumerate(loads)
    ]
    names = {model: i for i, model in enumerate(dict.fromkeys(load.model for loads in runs for load in loads))}
    known = {load: load_features(profiles[load.model, load.kind], load) for loads in runs for load in loads}
    terms = _terms([run for run, _ in samples], names, known.__getitem__)
    places = np.array([place for _, place in samples])
    return in_order(terms, places, [len(loads) for loads in runs], turns, list(measured))


def _calibration(process: GpRegression, samples: Sequence[Sample]) -> Calibration:
    models = [sample.victim.model for sample in samples]
    noises = _noises(process, models)
    own = np.array([noises[model] for model in models])
    if len(samples) > LOOKED_AT:
        errors, variances = process.left_out()
        scaled = (errors - without_each(process, samples)) / np.sqrt(variances + own)
    else:
        scaled = _unlearnt(process.terms, process.values, samples)
    seen = np.quantile(scaled, KNOTS)
    if len(noises) == 1:
        return Calibration(seen.tolist(), seen.tolist())
    errors, variances = process.left_out(np.unique(models, return_inverse=True)[1])
    unseen = np.quantile(errors / np.sqrt(variances + own.mean()), KNOTS)
    # The next victim differs from k others by more than they do from their mean: k + 1 to k - 1 in the squares. What
    # these few were misjudged by to one side tells how far the next may be off, and not to which side.
    middle = np.interp(0.5, KNOTS, unseen)
    around = (unseen - middle) * math.sqrt((len(noises) + 1) / (len(noises) - 1))
    beyond = np.where(KNOTS > 0.5, np.maximum(around, around + middle), np.minimum(around, around + middle))
    unseen = np.where(KNOTS == 0.5, 0.0, beyond)
    return Calibration(seen.tolist(), unseen.tolist())


def _unlearnt(terms: Terms, values: Matrix, samples: Sequence[Sample]) -> Matrix:
    """Errors on each of FOLDS parts, in standard deviations, of a process that was learnt from the others.

    With few samples all of them choose the scales, which fit the one that is left out, too.
    """
    groups = np.random.default_rng(0).permutation(len(values)) % FOLDS
    every, scaled = np.array([sample.victim.model for sample in samples]), np.empty_like(values)
    for group in range(FOLDS):
        own, rest = groups == group, np.flatnonzero(groups != group)
        part = fit_hyperparameters(terms.of(rest), values[rest])
        outlying = np.ones_like(values)
        outlying[rest] = part.outlying
        errors, variances = GpRegression(part.prior, terms, values, outlying).left_out(groups)
        noises = _noises(part, every[rest].tolist())
        usual = sum(noises.values()) / len(noises)
        noise = np.array([noises.get(model, usual) for model in every[own].tolist()])
        left = fit_residual_modes(part, [samples[i] for i in rest.tolist()])
        moved = [_moved(left, samples[i].victim, samples[i].colocated) for i in np.flatnonzero(own).tolist()]
        scaled[own] = (errors[own] - moved) / np.sqrt(variances[own] + noise)
    return scaled


def _moved(left: Mapping[Load, ResidualModes], victim: Load, colocated: Sequence[Load]) -> float:
    own = left.get(victim)
    return 0.0 if own is None else own.of(names(colocated))


def _noises(process: GpRegression, victims: Sequence[str]) -> dict[str, float]:
    """Variance of the noise of each victim's samples: some models' latencies vary more."""
    every = np.array(victims)
    return {
        model: process.prior.noise**2 * float(process.outlying[every == model].mean())
        for model in dict.fromkeys(victims)
    }


def _room(kept: dict[K, V], most: int) -> dict[K, V]:
    """For one more."""
    if len(kept) >= most:
        kept.clear()
    return kept


def _names(samples: Sequence[Sample]) -> dict[str, int]:
    every = (load.model for sample in samples for load in (sample.victim, *sample.colocated))
    return {model: number for number, model in enumerate(dict.fromkeys(every))}


def _runs(samples: Sequence[Sample]) -> list[tuple[Load, Sequence[Load]]]:
    return [(sample.victim, sample.colocated) for sample in samples]


def _terms(
    runs: Sequence[tuple[Load, Sequence[Load]]], names: Mapping[str, int], of: Callable[[Load], Matrix]
) -> Terms:
    """A model that is not among the names is like no other."""
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
    return {name: value for name, value in zip(TRAITS, values.tolist(), strict=True) if not math.isnan(value)}
