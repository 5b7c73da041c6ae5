"""A Gaussian process over terms: one for each victim and neighbour, of which a sample is the sum.

Four functions make up a term: of the traits of victim and neighbour alone; of the victim by name, and its neighbour's
traits; of the neighbour by name, and its victim's traits; of both by name. How far each reaches and how much it
explains is chosen by the marginal likelihood (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
section 5.4.1), on a part of the samples. What is measured has outliers, so each sample has a noise of its own, as
Student's t has it: expectation maximisation by reweighting (Lange, Little and Taylor, Journal of the American
Statistical Association 84, 1989).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.predictors.load_features import PLACE, REACTION, SHARE, TO_ROWS, TRAITS, USED

Matrix = NDArray[np.float64]
Numbers = NDArray[np.int64]

LOOKED_AT = 300  # samples, for the choice of scales
STEPS = 40  # of that choice
FREEDOM = 2.0  # degrees, of Student's t
ROUNDS = 8  # of reweighting
LEAST = 0.05  # of the usual variance that a sample may have
JITTER = 1e-7  # variance that keeps a matrix of equal samples regular
PULL = 0.25  # of a scale towards where it starts, in log-likelihood per squared log


def _of_victim(*columns: range) -> list[int]:
    return [i for each in columns for i in each]


def _of_neighbour(*columns: range) -> list[int]:
    return [len(TRAITS) + i for i in _of_victim(*columns)]


class _Function(msgspec.Struct, frozen=True):
    """victim, neighbour: has to be the same by name. groups: columns of a term that share a scale, and its first value.

    fixed: and its last.
    """

    victim: bool
    neighbour: bool
    groups: tuple[tuple[list[int], float], ...]
    fixed: bool = False


FUNCTIONS = {
    # What carries over between models has to be smooth. These scales did best on victims that were left out.
    "traits": _Function(
        victim=False,
        neighbour=False,
        groups=((_of_victim(TO_ROWS), 3.0), (_of_neighbour(USED, SHARE), 8.0)),
        fixed=True,
    ),
    "victim": _Function(
        victim=True, neighbour=False, groups=((_of_victim(PLACE), 1.0), (_of_neighbour(USED, PLACE), 3.0))
    ),
    "neighbour": _Function(
        victim=False, neighbour=True, groups=((_of_victim(REACTION), 2.0), (_of_neighbour(PLACE), 1.5))
    ),
    "pair": _Function(victim=True, neighbour=True, groups=((_of_victim(PLACE), 1.0), (_of_neighbour(PLACE), 1.5))),
}


class Scales(msgspec.Struct, frozen=True):
    """Of a function. amount: standard deviation that it explains. reach: in those of the columns, by group."""

    amount: float
    reach: tuple[float, ...]


class Prior(msgspec.Struct, frozen=True):
    """What is believed before any sample. mean: of a term. noise: standard deviation of a sample. centre, width: of the
    columns of a term, which have no unit inside."""

    mean: float
    noise: float
    functions: dict[str, Scales]
    centre: list[float]
    width: list[float]


class Terms(msgspec.Struct, frozen=True):
    """columns: (terms, 2 · TRAITS), NaN where unknown. victims, neighbours: numbers that stand for names. owners: the
    sample of each term, ascending from 0."""

    columns: Matrix
    victims: Numbers
    colocated: Numbers
    owners: Numbers

    def of(self, samples: Numbers) -> Terms:
        """Of some of the samples, in that order."""
        order = [np.flatnonzero(self.owners == sample) for sample in samples]
        chosen = np.concatenate(order)
        owners = np.repeat(np.arange(len(samples)), [len(each) for each in order])
        return Terms(self.columns[chosen], self.victims[chosen], self.colocated[chosen], owners)


class GpRegression:
    """A prior and samples: values (samples,), and how many times the variance of the noise each has.

    scaled: columns of the terms, as functions see them. starts: first term of each sample. noises: variance of each
    sample's. covariance: of the values without noise; precision: inverse of that with it; pull: that times the values.
    """

    def __init__(
        self, prior: Prior, terms: Terms, values: Matrix, outlying: Matrix, covariance: Matrix | None = None
    ) -> None:
        """covariance: of the values without noise, where it is known already."""
        self.prior = prior
        self.terms = terms
        self.values = values
        self.outlying = outlying
        self.scaled = _scaled(prior, terms)
        self.starts = np.searchsorted(terms.owners, np.arange(len(values)))
        counts = np.bincount(terms.owners, minlength=len(values))
        self.noises = prior.noise**2 * outlying + JITTER
        if covariance is None:
            covariance = _by_sample(covariances(prior, terms, terms), self.starts, self.starts)
        self.covariance = covariance
        self.precision = np.linalg.inv(covariance + np.diag(self.noises))
        self.pull = self.precision @ (values - prior.mean * counts)

    def left_out(self, groups: Numbers | None = None) -> tuple[Matrix, Matrix]:
        """What was measured less what the rest says of it, and the variance of that without noise, for each sample.

        groups: of each sample; then the rest are all other groups (Rasmussen and Williams, section 5.4.2).
        """
        if groups is None:
            groups = np.arange(len(self.values))
        errors, variances = np.empty_like(self.values), np.empty_like(self.values)
        for group in np.unique(groups):
            own = np.flatnonzero(groups == group)
            covariance = np.linalg.inv(self.precision[np.ix_(own, own)])
            errors[own] = covariance @ self.pull[own]
            variances[own] = np.diag(covariance) - self.noises[own]
        return errors, np.maximum(0.0, variances)

    def reweighted(self) -> GpRegression:
        """With the noise that each sample seems to have: the expectation of Student's t, given its error."""
        errors = self.noises * self.pull
        variances = self.noises - self.noises**2 * np.diag(self.precision)
        noise = self.prior.noise**2
        outlying = (FREEDOM + (errors**2 + variances) / noise) / (FREEDOM + 1)
        return GpRegression(self.prior, self.terms, self.values, np.maximum(outlying, LEAST), self.covariance)


def fit_hyperparameters(terms: Terms, values: Matrix) -> GpRegression:
    """The process that the samples speak for."""
    rng = np.random.default_rng(0)
    some = np.sort(rng.permutation(len(values))[:LOOKED_AT])
    prior = _start(terms, values)
    outlying = np.ones_like(values)
    for _ in range(2):
        prior = _chosen(prior, terms.of(some), values[some], outlying[some])
        process = GpRegression(prior, terms, values, outlying)
        for _ in range(ROUNDS):
            process = process.reweighted()
        outlying = process.outlying
    return process


def _start(terms: Terms, values: Matrix) -> Prior:
    known = np.isfinite(terms.columns)
    counts = np.maximum(known.sum(axis=0), 1)
    columns = np.where(known, terms.columns, 0.0)
    centre = columns.sum(axis=0) / counts
    width = np.sqrt((np.where(known, columns - centre, 0.0) ** 2).sum(axis=0) / counts)
    spread = max(float(values.std()), 1e-3)
    amount = spread / np.sqrt(len(FUNCTIONS))
    return Prior(
        mean=float(np.median(values / np.bincount(terms.owners, minlength=len(values)))),
        noise=spread / 4,
        functions={
            name: Scales(float(amount), tuple(reach for _, reach in function.groups))
            for name, function in FUNCTIONS.items()
        },
        centre=centre.tolist(),
        width=np.where(width > 1e-9, width, 1.0).tolist(),
    )


def _chosen(prior: Prior, terms: Terms, values: Matrix, outlying: Matrix) -> Prior:
    """Scales by the gradient of the log marginal likelihood, of which Rprop (Riedmiller and Braun, 1993) uses signs."""
    scaled = _scaled(prior, terms)
    starts = np.searchsorted(terms.owners, np.arange(len(values)))
    centred = values - prior.mean * np.bincount(terms.owners)
    distances = {
        name: [_distances(scaled[:, group], scaled[:, group]) for group, _ in function.groups]
        for name, function in FUNCTIONS.items()
    }
    alike = {name: _alike(function, terms, terms) for name, function in FUNCTIONS.items()}
    logs = _logs(prior)
    begun, steps, before = logs.copy(), np.full_like(logs, 0.2), np.zeros_like(logs)
    free = np.array([not fixed for fixed in _fixed()])
    for _ in range(STEPS):
        prior = _prior(prior, logs)
        grams = {name: _reached(prior.functions[name], distances[name]) * alike[name] for name in FUNCTIONS}
        noises = prior.noise**2 * outlying
        covariance = _by_sample(np.sum(list(grams.values()), axis=0), starts, starts) + np.diag(noises + JITTER)
        precision = np.linalg.inv(covariance)
        pull = precision @ centred
        slope = np.outer(pull, pull) - precision  # of twice the log-likelihood, by the covariance
        by_term = slope[np.ix_(terms.owners, terms.owners)]
        gradient = []
        for name, gram in grams.items():
            own = by_term * gram
            gradient.append(own.sum())
            gradient += [
                0.5 * float((own * apart).sum()) / reach**2
                for apart, reach in zip(distances[name], prior.functions[name].reach, strict=True)
            ]
        gradient.append(float(np.diag(slope) @ noises))
        uphill = np.array(gradient) - PULL * (logs - begun)
        turned = np.sign(uphill) * np.sign(before)
        steps = np.clip(steps * np.where(turned > 0, 1.2, np.where(turned < 0, 0.5, 1.0)), 1e-3, 0.5)
        logs = np.where(free, logs + steps * np.sign(uphill), logs)
        before = uphill
    return _prior(prior, logs)


def _fixed() -> list[bool]:
    """Of each scale, in the order of `_logs`."""
    return [
        fixed for function in FUNCTIONS.values() for fixed in (False, *(function.fixed for _ in function.groups))
    ] + [False]


def _logs(prior: Prior) -> Matrix:
    scales = [number for it in prior.functions.values() for number in (it.amount, *it.reach)]
    return np.log([*scales, prior.noise])


def _prior(prior: Prior, logs: Matrix) -> Prior:
    numbers = iter(np.exp(logs).tolist())
    functions = {
        name: Scales(next(numbers), tuple(next(numbers) for _ in it.reach)) for name, it in prior.functions.items()
    }
    return msgspec.structs.replace(prior, functions=functions, noise=next(numbers))


def _scaled(prior: Prior, terms: Terms) -> Matrix:
    """What is unknown is taken to be usual."""
    scaled: Matrix = np.nan_to_num((terms.columns - np.array(prior.centre)) / np.array(prior.width), nan=0.0)
    return scaled


def covariances(prior: Prior, a: Terms, b: Terms) -> Matrix:
    """Of each term of one to each of the other, all functions together."""
    one, other = _scaled(prior, a), _scaled(prior, b)
    total = np.zeros((len(one), len(other)))
    for name, function in FUNCTIONS.items():
        distances = [_distances(one[:, group], other[:, group]) for group, _ in function.groups]
        total += _reached(prior.functions[name], distances) * _alike(function, a, b)
    return total


def _reached(scales: Scales, distances: Sequence[Matrix]) -> Matrix:
    """Squared exponential."""
    far = np.zeros_like(distances[0])
    for apart, reach in zip(distances, scales.reach, strict=True):
        far += apart / reach**2
    covariance: Matrix = scales.amount**2 * np.exp(-0.5 * far)
    return covariance


def _distances(a: Matrix, b: Matrix) -> Matrix:
    """Squared, of each row to each."""
    apart: Matrix = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.maximum(apart, 0.0, out=apart)


def _alike(function: _Function, a: Terms, b: Terms) -> Matrix:
    alike = np.ones((len(a.owners), len(b.owners)))
    if function.victim:
        alike *= a.victims[:, None] == b.victims[None, :]
    if function.neighbour:
        alike *= a.colocated[:, None] == b.colocated[None, :]
    return alike


def _by_sample(gram: Matrix, starts: Numbers, others: Numbers) -> Matrix:
    """Sums over the terms of each sample, which begin at `starts`."""
    if len(starts) == gram.shape[0] and len(others) == gram.shape[1]:
        return gram
    summed: Matrix = np.add.reduceat(np.add.reduceat(gram, starts, axis=0), others, axis=1)
    return summed


def most_informative(
    terms: Terms, runs: Numbers, parts: Sequence[int], weights: Mapping[int, int], measured: Sequence[int] = ()
) -> Iterator[int]:
    """Runs in the order in which to measure them, without knowing any outcome.

    runs: of each sample, from 0. parts: of each run, what it belongs to; of each part come as many as it weighs.
    measured: runs that are known already. Next comes, of the part whose turn it is, always the run that tells most of
    all samples: that takes most off the sum of variances (Krause, Singh and Guestrin, Journal of Machine Learning
    Research 9, 2008, section 3). Memory and time for each go with the square of the samples.
    """
    prior = _start(terms, np.zeros(len(runs)))
    starts = np.searchsorted(terms.owners, np.arange(len(runs)))
    covariance = _by_sample(covariances(prior, terms, terms), starts, starts)
    members = [np.flatnonzero(runs == run) for run in range(len(parts))]
    part = np.array(parts)
    left = np.ones(len(parts), dtype=bool)
    come = dict.fromkeys(weights, 0)

    def know(run: int) -> None:
        nonlocal covariance
        left[run] = False
        come[parts[run]] += 1
        for sample in members[run]:
            row = covariance[sample] / np.sqrt(covariance[sample, sample] + prior.noise**2)
            covariance -= np.outer(row, row)

    for run in measured:
        know(run)
    while left.any():
        turn = min(np.unique(part[left]).tolist(), key=lambda it: (come[it] + 1) / weights[it])
        told = (covariance**2).sum(axis=0) / (np.diag(covariance) + prior.noise**2)
        gains = np.bincount(runs, weights=told)
        best = int(np.where(left & (part == turn), gains, -1.0).argmax())
        yield best
        know(best)
