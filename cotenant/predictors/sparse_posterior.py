"""Approximate the posterior of the Gaussian process (gp_regression.py): predict a pair of loads in microseconds.

The covariance of two terms is, in each kernel, a product of the similarity of their victims and that of their
co-located loads. So a load is compared with the samples once, and the mean of a pair is a dot product of two cached
vectors.

The exact variance would take the square of all samples. But what is known at the samples themselves is known
beforehand: a process with covariance K, given noise N, has covariance N - N (K + N)⁻¹ N left at its samples. Of samples
similar to a pair, those are kept that the others do not determine (pivoted Cholesky decomposition: Harbrecht, Peters
and Schneider, Applied Numerical Mathematics 62, 2012), and the pair is predicted from what all samples say of these
(inducing points: Quiñonero-Candela and Rasmussen, Journal of Machine Learning Research 6, 2005). They are the same for
all pairs of two models, and so are the directions in which anything is known of them, so that a further pair costs a
product with one small matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from cotenant.predictors.gp_regression import KERNELS, GpRegression, Matrix, Numbers, Prior
from cotenant.predictors.load_features import FEATURES

MAX_INDUCING_SAMPLES = 96  # inducing points for each pair of models
RELATIVE_JITTER = 0.01  # of the median noise variance: regularises similar samples, and bounds what is neglected
_ALL = np.ones(len(KERNELS))


class Side(msgspec.Struct, frozen=True):
    """Describe a load as a victim or as a co-located load.

    number: stands for its name; negative, where no sample has it. similarity: to the loads that have this role in
    the samples, by kernel. weights: of a victim the same in one row; of a co-located load, what each victim's
    similarity adds to the mean. inducing: of `similarity`, the terms of the inducing points, by the other's number;
    projection: of those, for victims.
    """

    number: int
    similarity: Matrix
    weights: Matrix
    inducing: dict[int, Matrix]
    projection: dict[int, Matrix]


class _Role(NamedTuple):
    """Hold the loads that are victims in the samples, or co-located.

    numbers: of their names. load_indices: the load of each term. centre, width: of this role's columns. kernels: for
    each kernel, its groups of columns with length scale and the loads' columns in units of it; its amplitude; and
    whether names must be equal.
    """

    numbers: Numbers
    load_indices: Numbers
    centre: Matrix
    width: Matrix
    kernels: list[tuple[list[tuple[list[int], float, Matrix]], float, bool]]


class _InducingPoints(NamedTuple):
    """Hold the inducing points of two models. victims, colocated: indices of their terms' loads.

    projection: (directions, terms); the squared norm of its product with a pair's similarity to the terms is the
    variance that the samples explain.
    """

    victims: Numbers
    colocated: Numbers
    projection: Matrix


class Posterior:
    """Predict single terms from a fitted regression."""

    def __init__(self, process: GpRegression) -> None:
        self.process = process
        prior, terms = process.prior, process.terms
        self._mean = prior.mean
        self._prior_variance = sum(scales.amplitude**2 for scales in prior.kernels.values())
        self._victims = _role(prior, process.scaled, terms.victims, victim=True)
        self._others = _role(prior, process.scaled, terms.colocated, victim=False)
        self._order = np.argsort(self._victims.load_indices, kind="stable")
        self._starts = np.searchsorted(self._victims.load_indices[self._order], np.arange(len(self._victims.numbers)))
        self._alpha = process.alpha[terms.owners][self._order]
        self._inducing: dict[tuple[int, int], _InducingPoints] = {}

    def victim(self, features: Matrix, number: int) -> Side:
        """Compare a victim with the samples' victims. number: of its name, negative where no sample has it."""
        similarity = _similarities(self._victims, features, number)
        return Side(number, similarity, similarity.ravel(), {}, {})

    def colocated(self, features: Matrix, number: int) -> Side:
        """Compare a co-located load with those of the samples. number: of its name, negative where no sample has it."""
        similarity = _similarities(self._others, features, number)
        weighted = similarity.take(self._others.load_indices[self._order], axis=1) * self._alpha
        return Side(number, similarity, np.add.reduceat(weighted, self._starts, axis=1).ravel(), {}, {})

    def term(self, victim: Side, other: Side) -> tuple[float, float]:
        """Return mean and variance, without noise, of a term. A hot path: even saved look-ups show."""
        victim_number, other_number = victim.number, other.number
        victim_similarity = victim.inducing.get(other_number)
        if victim_similarity is None:
            inducing = self._cached_inducing_points(victim_number, other_number)
            victim_similarity = victim.inducing[other_number] = victim.similarity.take(inducing.victims, axis=1)
            victim.projection[other_number] = inducing.projection
        other_similarity = other.inducing.get(victim_number)
        if other_similarity is None:
            other_similarity = other.inducing[victim_number] = other.similarity.take(
                self._cached_inducing_points(victim_number, other_number).colocated, axis=1
            )
        similarity = _ALL.dot(victim_similarity * other_similarity)
        explained = victim.projection[other_number].dot(similarity)
        variance = self._prior_variance - float(explained.dot(explained))
        return self._mean + float(victim.weights.dot(other.weights)), variance if variance > 0 else 0.0

    def _cached_inducing_points(self, victim: int, other: int) -> _InducingPoints:
        inducing = self._inducing.get((victim, other))
        if inducing is None:
            inducing = self._inducing[victim, other] = self._inducing_points(victim, other)
        return inducing

    def _inducing_points(self, victim: int, other: int) -> _InducingPoints:
        process = self.process
        samples = self._similar_samples(victim, other)
        covariance = process.covariance[np.ix_(samples, samples)]
        noises = process.noises[samples]
        remaining = np.diag(noises) - noises[:, None] * process.precision[np.ix_(samples, samples)] * noises
        jitter = RELATIVE_JITTER * float(np.median(process.noises))
        inverse = np.linalg.inv(covariance + jitter * np.eye(len(samples)))
        eigenvalues, directions = np.linalg.eigh(covariance - remaining)  # from small to large
        significant = np.cumsum(np.maximum(0.0, eigenvalues)) > jitter * len(samples)
        projection = np.sqrt(eigenvalues[significant])[:, None] * (directions[:, significant].T @ inverse)
        terms = np.flatnonzero(np.isin(process.terms.owners, samples))
        order = np.argsort(samples)
        owners = order[np.searchsorted(samples[order], process.terms.owners[terms])]
        return _InducingPoints(
            self._victims.load_indices[terms],
            self._others.load_indices[terms],
            np.ascontiguousarray(projection[:, owners]),
        )

    def _similar_samples(self, victim: int, other: int) -> Numbers:
        """Return samples of both models, then of one of them, then others; of too many, an even selection."""
        terms = self.process.terms
        same = (terms.victims == victim).astype(int) + (terms.colocated == other)
        closest = np.maximum.reduceat(same, self.process.starts)
        chosen = np.empty(0, dtype=np.int64)
        for level in (2, 1, 0):
            candidates = np.flatnonzero(closest == level)
            count = min(MAX_INDUCING_SAMPLES - len(chosen), len(candidates))
            chosen = np.append(chosen, candidates[np.linspace(0, len(candidates) - 1, count).round().astype(int)])
        return chosen


def _similarities(role: _Role, features: Matrix, number: int) -> Matrix:
    """Return a load's similarity to the loads of a role, by kernel: (kernels, loads)."""
    columns = (features - role.centre) / role.width
    columns[np.isnan(columns)] = 0.0  # the mean
    named = role.numbers == number
    similarity = np.empty((len(role.kernels), len(named)))
    for i, (groups, amplitude, by_name) in enumerate(role.kernels):
        far = np.zeros(len(named))
        for group, length_scale, others in groups:
            far += ((columns[group] / length_scale - others) ** 2).sum(axis=1)
        similarity[i] = amplitude * np.exp(-0.5 * far)
        if by_name:
            similarity[i] *= named
    return similarity


def _role(prior: Prior, scaled: Matrix, numbers: Numbers, *, victim: bool) -> _Role:
    """Collect the distinct loads of a role. scaled, numbers: standardised columns and names of all terms."""
    first = 0 if victim else len(FEATURES)
    own = slice(first, first + len(FEATURES))
    loads, load_indices = np.unique(np.column_stack([numbers, scaled[:, own]]), axis=0, return_inverse=True)
    kernels = []
    for name, kernel in KERNELS.items():
        scales, groups = prior.kernels[name], []
        for (group, _), length_scale in zip(kernel.groups, scales.length_scales, strict=True):
            if own.start <= group[0] < own.stop:
                own_columns = [column - first for column in group]
                groups.append((own_columns, length_scale, loads[:, 1:][:, own_columns] / length_scale))
        kernels.append((groups, scales.amplitude, kernel.victim if victim else kernel.colocated))
    centre, width = np.array(prior.centre[own]), np.array(prior.width[own])
    return _Role(loads[:, 0].astype(np.int64), load_indices.ravel(), centre, width, kernels)
