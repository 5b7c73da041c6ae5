"""Regress by a Gaussian process in which a sample is a sum of terms, one for each victim and co-located load.

Four kernels make up the covariance of a term: of the features of both loads; of the victim's name and the other's
features; of the other's name and the victim's features; of both names. Length scales and amplitudes maximise the
marginal likelihood (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 5.4.1) on a subset
of the samples. Measurements have outliers, so each sample has a noise of its own, as under Student's t: expectation
maximisation by reweighting (Lange, Little and Taylor, Journal of the American Statistical Association 84, 1989).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.predictors.load_features import (
    BATCH_SENSITIVITY,
    FEATURES,
    OPERATING_POINT,
    SENSITIVITY,
    SHARE,
    UTILISATION,
)

Matrix = NDArray[np.float64]
Numbers = NDArray[np.int64]

MAX_TUNING_SAMPLES = 300  # samples used to fit hyperparameters
RPROP_STEPS = 40  # iterations of the hyperparameter fit
DEGREES_OF_FREEDOM = 2.0  # degrees of freedom of Student's t
REWEIGHTING_ROUNDS = 8  # iterations of expectation maximisation
MIN_NOISE_FACTOR = 0.05  # bounds of a sample's noise variance over the prior's
JITTER = 1e-7  # variance that keeps the covariance of equal samples regular
SCALE_PRIOR_STRENGTH = 0.25  # pull of a log hyperparameter to its initial value, in log-likelihood per squared log


def _of_victim(*columns: range) -> list[int]:
    return [i for each in columns for i in each]


def _of_colocated(*columns: range) -> list[int]:
    return [len(FEATURES) + i for i in _of_victim(*columns)]


class _Kernel(msgspec.Struct, frozen=True):
    """Define a kernel of terms.

    victim, colocated: the names must be equal. groups: columns of a term that share a length scale, and its initial
    value. fixed: the length scales keep it.
    """

    victim: bool
    colocated: bool
    groups: tuple[tuple[list[int], float], ...]
    fixed: bool = False


KERNELS = {
    # What carries over between models must be smooth: these scales did best on held-out victims.
    "features": _Kernel(
        victim=False,
        colocated=False,
        groups=((_of_victim(BATCH_SENSITIVITY), 3.0), (_of_colocated(UTILISATION, SHARE), 8.0)),
        fixed=True,
    ),
    "victim": _Kernel(
        victim=True,
        colocated=False,
        groups=((_of_victim(OPERATING_POINT), 1.0), (_of_colocated(UTILISATION, OPERATING_POINT), 3.0)),
    ),
    "colocated": _Kernel(
        victim=False, colocated=True, groups=((_of_victim(SENSITIVITY), 2.0), (_of_colocated(OPERATING_POINT), 1.5))
    ),
    "pair": _Kernel(
        victim=True, colocated=True, groups=((_of_victim(OPERATING_POINT), 1.0), (_of_colocated(OPERATING_POINT), 1.5))
    ),
}


class Scales(msgspec.Struct, frozen=True):
    """Hold the hyperparameters of a kernel.

    amplitude: its standard deviation; length_scales: length scales by group, in standardised columns.
    """

    amplitude: float
    length_scales: tuple[float, ...]


class Prior(msgspec.Struct, frozen=True):
    """Hold the prior of a regression.

    mean: of a term; noise: standard deviation of a sample; centre, width: to standardise a term's columns.
    """

    mean: float
    noise: float
    kernels: dict[str, Scales]
    centre: list[float]
    width: list[float]


class Terms(msgspec.Struct, frozen=True):
    """Hold the terms of some samples.

    columns: (terms, 2 · FEATURES), NaN where unknown. victims, colocated: numbers that stand for names. owners: the
    sample of each term, ascending from 0.
    """

    columns: Matrix
    victims: Numbers
    colocated: Numbers
    owners: Numbers

    def of(self, samples: Numbers) -> Terms:
        """Return the terms of some samples, in that order."""
        order = [np.flatnonzero(self.owners == sample) for sample in samples]
        chosen = np.concatenate(order)
        owners = np.repeat(np.arange(len(samples)), [len(each) for each in order])
        return Terms(self.columns[chosen], self.victims[chosen], self.colocated[chosen], owners)


class GpRegression:
    """Condition a prior on samples.

    values: of each sample; noise_factors: on the variance of its noise. scaled: standardised columns of the terms.
    starts: first term of each sample. noises: variances. covariance: of the values without noise; precision: inverse of
    it with noise; alpha: precision times the centred values.
    """

    def __init__(
        self, prior: Prior, terms: Terms, values: Matrix, noise_factors: Matrix, covariance: Matrix | None = None
    ) -> None:
        """Condition the prior on the samples. covariance: of the values without noise, where computed before."""
        self.prior = prior
        self.terms = terms
        self.values = values
        self.noise_factors = noise_factors
        self.scaled = _scaled(prior, terms)
        self.starts = np.searchsorted(terms.owners, np.arange(len(values)))
        counts = np.bincount(terms.owners, minlength=len(values))
        self.noises = prior.noise**2 * noise_factors + JITTER
        if covariance is None:
            covariance = _sum_by_sample(covariances(prior, terms, terms), self.starts, self.starts)
        self.covariance = covariance
        self.precision = np.linalg.inv(covariance + np.diag(self.noises))
        self.alpha = self.precision @ (values - prior.mean * counts)

    def leave_out_errors(self, groups: Numbers | None = None) -> tuple[Matrix, Matrix]:
        """Return errors on held-out samples, and their variances without noise, for each sample.

        groups: of each sample; a group is held out together (Rasmussen and Williams, section 5.4.2), by default each
        sample.
        """
        if groups is None:
            groups = np.arange(len(self.values))
        errors, variances = np.empty_like(self.values), np.empty_like(self.values)
        for group in np.unique(groups):
            own = np.flatnonzero(groups == group)
            covariance = np.linalg.inv(self.precision[np.ix_(own, own)])
            errors[own] = covariance @ self.alpha[own]
            variances[own] = np.diag(covariance) - self.noises[own]
        return errors, np.maximum(0.0, variances)

    def reweighted(self) -> GpRegression:
        """Return the regression with each sample's expected noise under Student's t, given its error."""
        errors = self.noises * self.alpha
        variances = self.noises - self.noises**2 * np.diag(self.precision)
        noise = self.prior.noise**2
        noise_factors = (DEGREES_OF_FREEDOM + (errors**2 + variances) / noise) / (DEGREES_OF_FREEDOM + 1)
        return GpRegression(
            self.prior, self.terms, self.values, np.maximum(noise_factors, MIN_NOISE_FACTOR), self.covariance
        )


def fit_hyperparameters(terms: Terms, values: Matrix) -> GpRegression:
    """Fit the hyperparameters to samples and return the posterior."""
    rng = np.random.default_rng(0)
    some = np.sort(rng.permutation(len(values))[:MAX_TUNING_SAMPLES])
    prior = _initial_prior(terms, values)
    noise_factors = np.ones_like(values)
    for _ in range(2):
        prior = _maximise_likelihood(prior, terms.of(some), values[some], noise_factors[some])
        process = GpRegression(prior, terms, values, noise_factors)
        for _ in range(REWEIGHTING_ROUNDS):
            process = process.reweighted()
        noise_factors = process.noise_factors
    return process


def _initial_prior(terms: Terms, values: Matrix) -> Prior:
    known = np.isfinite(terms.columns)
    counts = np.maximum(known.sum(axis=0), 1)
    columns = np.where(known, terms.columns, 0.0)
    centre = columns.sum(axis=0) / counts
    width = np.sqrt((np.where(known, columns - centre, 0.0) ** 2).sum(axis=0) / counts)
    spread = max(float(values.std()), 1e-3)
    amplitude = spread / np.sqrt(len(KERNELS))
    return Prior(
        mean=float(np.median(values / np.bincount(terms.owners, minlength=len(values)))),
        noise=spread / 4,
        kernels={
            name: Scales(float(amplitude), tuple(length_scale for _, length_scale in kernel.groups))
            for name, kernel in KERNELS.items()
        },
        centre=centre.tolist(),
        width=np.where(width > 1e-9, width, 1.0).tolist(),
    )


def _maximise_likelihood(prior: Prior, terms: Terms, values: Matrix, noise_factors: Matrix) -> Prior:
    """Maximise the log marginal likelihood by Rprop (Riedmiller and Braun, 1993), from signs of the gradient."""
    scaled = _scaled(prior, terms)
    starts = np.searchsorted(terms.owners, np.arange(len(values)))
    centred = values - prior.mean * np.bincount(terms.owners)
    distances = {
        name: [_distances(scaled[:, group], scaled[:, group]) for group, _ in kernel.groups]
        for name, kernel in KERNELS.items()
    }
    same = {name: _same_names(kernel, terms, terms) for name, kernel in KERNELS.items()}
    logs = _logs(prior)
    initial, steps, previous = logs.copy(), np.full_like(logs, 0.2), np.zeros_like(logs)
    free = np.array([not fixed for fixed in _fixed_scales()])
    for _ in range(RPROP_STEPS):
        prior = _prior(prior, logs)
        grams = {name: _squared_exponential(prior.kernels[name], distances[name]) * same[name] for name in KERNELS}
        noises = prior.noise**2 * noise_factors
        covariance = _sum_by_sample(np.sum(list(grams.values()), axis=0), starts, starts) + np.diag(noises + JITTER)
        precision = np.linalg.inv(covariance)
        alpha = precision @ centred
        slope = np.outer(alpha, alpha) - precision  # gradient of twice the log-likelihood by the covariance
        by_term = slope[np.ix_(terms.owners, terms.owners)]
        gradient = []
        for name, gram in grams.items():
            own = by_term * gram
            gradient.append(own.sum())
            gradient += [
                0.5 * float((own * distance).sum()) / length_scale**2
                for distance, length_scale in zip(distances[name], prior.kernels[name].length_scales, strict=True)
            ]
        gradient.append(float(np.diag(slope) @ noises))
        ascent = np.array(gradient) - SCALE_PRIOR_STRENGTH * (logs - initial)
        agreement = np.sign(ascent) * np.sign(previous)
        steps = np.clip(steps * np.where(agreement > 0, 1.2, np.where(agreement < 0, 0.5, 1.0)), 1e-3, 0.5)
        logs = np.where(free, logs + steps * np.sign(ascent), logs)
        previous = ascent
    return _prior(prior, logs)


def _fixed_scales() -> list[bool]:
    """Return whether each hyperparameter is fixed, in the order of `_logs`."""
    return [fixed for kernel in KERNELS.values() for fixed in (False, *(kernel.fixed for _ in kernel.groups))] + [False]


def _logs(prior: Prior) -> Matrix:
    numbers = [number for scales in prior.kernels.values() for number in (scales.amplitude, *scales.length_scales)]
    return np.log([*numbers, prior.noise])


def _prior(prior: Prior, logs: Matrix) -> Prior:
    numbers = iter(np.exp(logs).tolist())
    kernels = {
        name: Scales(next(numbers), tuple(next(numbers) for _ in scales.length_scales))
        for name, scales in prior.kernels.items()
    }
    return msgspec.structs.replace(prior, kernels=kernels, noise=next(numbers))


def _scaled(prior: Prior, terms: Terms) -> Matrix:
    """Standardise columns; unknown features get the mean."""
    scaled: Matrix = np.nan_to_num((terms.columns - np.array(prior.centre)) / np.array(prior.width), nan=0.0)
    return scaled


def covariances(prior: Prior, a: Terms, b: Terms) -> Matrix:
    """Return the covariance of each term of one set with each of another, over all kernels."""
    one, other = _scaled(prior, a), _scaled(prior, b)
    total = np.zeros((len(one), len(other)))
    for name, kernel in KERNELS.items():
        distances = [_distances(one[:, group], other[:, group]) for group, _ in kernel.groups]
        total += _squared_exponential(prior.kernels[name], distances) * _same_names(kernel, a, b)
    return total


def _squared_exponential(scales: Scales, distances: Sequence[Matrix]) -> Matrix:
    exponent = np.zeros_like(distances[0])
    for distance, length_scale in zip(distances, scales.length_scales, strict=True):
        exponent += distance / length_scale**2
    covariance: Matrix = scales.amplitude**2 * np.exp(-0.5 * exponent)
    return covariance


def _distances(a: Matrix, b: Matrix) -> Matrix:
    """Return squared distances of each row to each."""
    distance: Matrix = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.maximum(distance, 0.0, out=distance)


def _same_names(kernel: _Kernel, a: Terms, b: Terms) -> Matrix:
    same = np.ones((len(a.owners), len(b.owners)))
    if kernel.victim:
        same *= a.victims[:, None] == b.victims[None, :]
    if kernel.colocated:
        same *= a.colocated[:, None] == b.colocated[None, :]
    return same


def _sum_by_sample(gram: Matrix, starts: Numbers, others: Numbers) -> Matrix:
    """Sum a matrix over the terms of each sample, given the first term of each."""
    if len(starts) == gram.shape[0] and len(others) == gram.shape[1]:
        return gram
    summed: Matrix = np.add.reduceat(np.add.reduceat(gram, starts, axis=0), others, axis=1)
    return summed


def informative_samples(terms: Terms, values: Matrix, count: int) -> list[int]:
    """Return the samples of which the others say least, in their order, whatever that is.

    Next is the sample whose value is least certain given those chosen so far (pivoted Cholesky decomposition, as in
    sparse_posterior.py). Its own value plays no part; `values` give the scale. Time grows with the square of `count`,
    and with the number of samples.
    """
    prior = _initial_prior(terms, values)
    starts = np.searchsorted(terms.owners, np.arange(len(values)))
    counts = np.bincount(terms.owners, minlength=len(values))
    variances = counts * sum(scales.amplitude**2 for scales in prior.kernels.values())
    factors = np.zeros((count, len(values)))
    left = np.ones(len(values), dtype=bool)
    for step in range(count):
        pivot = int(np.argmax(np.where(left, variances, -np.inf)))
        left[pivot] = False
        own = terms.of(np.array([pivot]))
        row = _sum_by_sample(covariances(prior, own, terms), np.array([0]), starts)[0]
        row = row - factors[:step, pivot] @ factors[:step]
        factors[step] = row / np.sqrt(max(variances[pivot], 0.0) + prior.noise**2)
        variances = variances - factors[step] ** 2
    chosen: list[int] = np.flatnonzero(~left).tolist()
    return chosen


def most_informative(
    terms: Terms, runs: Numbers, parts: Sequence[int], weights: Mapping[int, int], measured: Sequence[int] = ()
) -> Iterator[int]:
    """Yield runs in the order in which to measure them, before any outcome is known.

    runs: of each sample, from 0. parts: of each run, the part that it belongs to; parts take turns in proportion to
    their weights. measured: runs that exist. Of the part whose turn it is comes the run that reduces the sum of all
    samples' variances most (Krause, Singh and Guestrin, Journal of Machine Learning Research 9, 2008, section 3).
    Memory, and time for each run, grow with the square of the samples.
    """
    prior = _initial_prior(terms, np.zeros(len(runs)))
    starts = np.searchsorted(terms.owners, np.arange(len(runs)))
    covariance = _sum_by_sample(covariances(prior, terms, terms), starts, starts)
    members = [np.flatnonzero(runs == run) for run in range(len(parts))]
    part = np.array(parts)
    left = np.ones(len(parts), dtype=bool)
    chosen = dict.fromkeys(weights, 0)

    def condition_on(run: int) -> None:
        nonlocal covariance
        left[run] = False
        chosen[parts[run]] += 1
        for sample in members[run]:
            row = covariance[sample] / np.sqrt(covariance[sample, sample] + prior.noise**2)
            covariance -= np.outer(row, row)

    for run in measured:
        condition_on(run)
    while left.any():
        next_part = min(np.unique(part[left]).tolist(), key=lambda scales: (chosen[scales] + 1) / weights[scales])
        information = (covariance**2).sum(axis=0) / (np.diag(covariance) + prior.noise**2)
        gains = np.bincount(runs, weights=information)
        best = int(np.where(left & (part == next_part), gains, -1.0).argmax())
        yield best
        condition_on(best)
