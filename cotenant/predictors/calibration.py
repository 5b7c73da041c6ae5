"""Calibrate the quantiles of the Gaussian process by its errors on held-out samples (conformal prediction)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cotenant.errors import PlanError
from cotenant.predictors import Load
from cotenant.predictors.gp_regression import MAX_TUNING_SAMPLES, GpRegression, Matrix, Terms, fit_hyperparameters
from cotenant.predictors.residuals import ResidualModes, fit_residual_modes, names, without_each
from cotenant.predictors.samples import Sample

KNOTS = np.linspace(0, 1, 41)  # probabilities at which calibrations are tabulated
FOLDS = 3  # of cross-validation with few samples
PRIOR_ERRORS = 10  # errors of the wider group that are pooled with a narrower group's own
_EDGE = 1e-3  # probability for which the ends of the normal distribution stand

NORMAL: list[float] = [statistics.NormalDist().inv_cdf(min(max(p, _EDGE), 1 - _EDGE)) for p in KNOTS.tolist()]


def checked(probability: float) -> float:
    """Return a probability. Raises PlanError for a number that is none."""
    if not 0 <= probability <= 1:  # nor NaN, at which every answer would be 1
        raise PlanError(f"a quantile of {probability:g} does not exist; write one from 0 to 1, such as 0.9")
    return probability


class Calibration(msgspec.Struct, frozen=True):
    """Hold errors on held-out samples, in standard deviations.

    seen, unseen: their quantiles at the KNOTS, for victims with samples and without. errors: of each sample; files
    written before these were kept have none.
    """

    seen: list[float]
    unseen: list[float]
    errors: list[float] = []


def pooled_table(errors: Matrix, prior: Sequence[float]) -> list[float]:
    """Return quantiles at the KNOTS of errors, pooled with PRIOR_ERRORS of the distribution that a table describes."""
    draws = np.interp((np.arange(PRIOR_ERRORS) + 0.5) / PRIOR_ERRORS, KNOTS, prior)
    table: list[float] = np.quantile(np.concatenate((errors, draws)), KNOTS).tolist()
    return table


class QuantileTables:
    """Look up quantiles of standardised errors: of a load, pooled with those of its model, and these with those of all.

    Models differ in their tails, and loads whose runs fall into two groups in more than that.
    """

    def __init__(self, calibration: Calibration, victims: Sequence[Load]) -> None:
        """Group the errors of a calibration. victims: of the samples."""
        self.unseen = calibration.unseen
        errors = np.array(calibration.errors)
        by_model: dict[str, list[int]] = {}
        by_load: dict[Load, list[int]] = {}
        for i, victim in enumerate(victims):
            by_model.setdefault(victim.model, []).append(i)
            by_load.setdefault(victim, []).append(i)
        if not len(errors):
            self._models, self._loads = dict.fromkeys(by_model, calibration.seen), {}
            return
        self._models = {model: pooled_table(errors[own], calibration.seen) for model, own in by_model.items()}
        self._loads = {
            load: _with_median_of(pooled_table(errors[own], self._models[load.model]), calibration.seen)
            for load, own in by_load.items()
        }

    def of(self, victim: Load) -> list[float]:
        """Return a victim's quantiles at the KNOTS."""
        return self._loads.get(victim) or self._models.get(victim.model, self.unseen)


def _with_median_of(table: Sequence[float], wider: Sequence[float]) -> list[float]:
    """Return a table with the median of a wider group: that of a dozen errors is mostly noise."""
    middle = len(KNOTS) // 2
    return [
        *(min(each, wider[middle]) for each in table[:middle]),
        wider[middle],
        *(max(each, wider[middle]) for each in table[middle + 1 :]),
    ]


def calibrate(process: GpRegression, samples: Sequence[Sample]) -> Calibration:
    models = [sample.victim.model for sample in samples]
    noises = noises_of(process, models)
    own = np.array([noises[model] for model in models])
    if len(samples) > MAX_TUNING_SAMPLES:
        errors, variances = process.leave_out_errors()
        scaled = (errors - without_each(process, samples)) / np.sqrt(variances + own)
    else:
        scaled = _cross_validated_errors(process.terms, process.values, samples)
    seen = np.quantile(scaled, KNOTS)
    if len(noises) == 1:
        return Calibration(seen.tolist(), seen.tolist(), scaled.tolist())
    errors, variances = process.leave_out_errors(np.unique(models, return_inverse=True)[1])
    unseen = np.quantile(errors / np.sqrt(variances + own.mean()), KNOTS)
    # The next victim deviates from k others by more than they do from their mean: variances are as k + 1 to k - 1. A
    # bias over these few tells how far off the next may be, but not in which direction.
    middle = np.interp(0.5, KNOTS, unseen)
    around = (unseen - middle) * math.sqrt((len(noises) + 1) / (len(noises) - 1))
    beyond = np.where(KNOTS > 0.5, np.maximum(around, around + middle), np.minimum(around, around + middle))
    unseen = np.where(KNOTS == 0.5, 0.0, beyond)
    return Calibration(seen.tolist(), unseen.tolist(), scaled.tolist())


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
        noises = noises_of(part, models[others].tolist())
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


def noises_of(process: GpRegression, victims: Sequence[str]) -> dict[str, float]:
    """Return the noise variance of each victim's samples: the latencies of some models vary more."""
    models = np.array(victims)
    return {
        model: process.prior.noise**2 * float(process.noise_factors[models == model].mean())
        for model in dict.fromkeys(victims)
    }
