"""What a process (process.py) says of one victim beside one neighbour, in microseconds.

The covariance of two terms is, in each function, a product of how like their victims are and how like their neighbours.
So a load is compared with the samples once, and the mean of a pair is a product of two vectors that are known then.

How sure that is would take the square of all samples. But how much is known at a sample itself is known beforehand: a
process with covariance K, given noise N, is left with the covariance N - N (K + N)⁻¹ N at its samples. Of some samples
that are like a pair, those are kept which the others do not tell (pivoted Cholesky decomposition: Harbrecht, Peters and
Schneider, Applied Numerical Mathematics 62, 2012), and the pair goes by what all samples tell of these (inducing
points: Quiñonero-Candela and Rasmussen, Journal of Machine Learning Research 6, 2005). They are the same for all pairs
of two models, and so are the directions in which anything is known of them, so that another pair costs a product with
one small matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from cotenant.predictors.gp_regression import FUNCTIONS, GpRegression, Matrix, Numbers, Prior
from cotenant.predictors.load_features import TRAITS

SOME = 96  # samples that are like a pair of models
SMALL = 0.01  # of the usual variance of the noise: keeps a matrix of samples that are alike regular, and may go untold
_ALL = np.ones(len(FUNCTIONS))


class Side(msgspec.Struct, frozen=True):
    """A load as a victim, or as a neighbour. number: stands for its name; negative, where no sample has it.

    alike: to the loads that have this role in the samples, by function. weights: of a victim the same in one row; of a
    neighbour what each victim's likeness adds to the mean. near: of alike the terms that pairs of two models go by, by
    the other's number. told: of those terms, of a victim alone.
    """

    number: int
    alike: Matrix
    weights: Matrix
    near: dict[int, Matrix]
    told: dict[int, Matrix]


class _Role(NamedTuple):
    """The loads that are victims in the samples, or neighbours. numbers: of their names. places: of each term's load.

    centre, width: of this role's columns. functions: of each the groups of columns that it looks at, with their reach
    and those of the loads in units of it; its amount; and whether names have to be the same.
    """

    numbers: Numbers
    places: Numbers
    centre: Matrix
    width: Matrix
    functions: list[tuple[list[tuple[list[int], float, Matrix]], float, bool]]


class _Near(NamedTuple):
    """What pairs of two models go by. victims, neighbours: places of the loads of its terms.

    told: (directions, terms); the square of its product with how alike a pair is to these is what is known of the pair.
    """

    victims: Numbers
    colocated: Numbers
    told: Matrix


class Posterior:
    """A process to be asked."""

    def __init__(self, process: GpRegression) -> None:
        self.process = process
        prior, terms = process.prior, process.terms
        self._mean = prior.mean
        self._alone = sum(scales.amount**2 for scales in prior.functions.values())
        self._victims = _role(prior, process.scaled, terms.victims, victim=True)
        self._neighbours = _role(prior, process.scaled, terms.colocated, victim=False)
        self._order = np.argsort(self._victims.places, kind="stable")
        self._starts = np.searchsorted(self._victims.places[self._order], np.arange(len(self._victims.numbers)))
        self._pull = process.pull[terms.owners][self._order]
        self._near: dict[tuple[int, int], _Near] = {}

    def victim(self, traits: Matrix, number: int) -> Side:
        alike = _alike(self._victims, traits, number)
        return Side(number, alike, alike.ravel(), {}, {})

    def neighbour(self, traits: Matrix, number: int) -> Side:
        alike = _alike(self._neighbours, traits, number)
        pulls = alike.take(self._neighbours.places[self._order], axis=1) * self._pull
        return Side(number, alike, np.add.reduceat(pulls, self._starts, axis=1).ravel(), {}, {})

    def at(self, victim: Side, neighbour: Side) -> tuple[float, float]:
        """Mean and variance, without noise, of a term. Asked for every pair: what a look-up saves shows."""
        name, beside = victim.number, neighbour.number
        one = victim.near.get(beside)
        if one is None:
            near = self._between(name, beside)
            one = victim.near[beside] = victim.alike.take(near.victims, axis=1)
            victim.told[beside] = near.told
        other = neighbour.near.get(name)
        if other is None:
            other = neighbour.near[name] = neighbour.alike.take(self._between(name, beside).colocated, axis=1)
        across = _ALL.dot(one * other)
        known = victim.told[beside].dot(across)
        left = self._alone - float(known.dot(known))
        return self._mean + float(victim.weights.dot(neighbour.weights)), left if left > 0 else 0.0

    def _between(self, victim: int, neighbour: int) -> _Near:
        near = self._near.get((victim, neighbour))
        if near is None:
            near = self._near[victim, neighbour] = self._made(victim, neighbour)
        return near

    def _made(self, victim: int, neighbour: int) -> _Near:
        it = self.process
        kept = self._alike(victim, neighbour)
        covariance = it.covariance[np.ix_(kept, kept)]
        noises = it.noises[kept]
        left = np.diag(noises) - noises[:, None] * it.precision[np.ix_(kept, kept)] * noises
        small = SMALL * float(np.median(it.noises))
        inverse = np.linalg.inv(covariance + small * np.eye(len(kept)))
        amounts, directions = np.linalg.eigh(covariance - left)  # from small to large
        some = np.cumsum(np.maximum(0.0, amounts)) > small * len(kept)
        told = np.sqrt(amounts[some])[:, None] * (directions[:, some].T @ inverse)
        terms = np.flatnonzero(np.isin(it.terms.owners, kept))
        order = np.argsort(kept)
        owners = order[np.searchsorted(kept[order], it.terms.owners[terms])]
        return _Near(self._victims.places[terms], self._neighbours.places[terms], np.ascontiguousarray(told[:, owners]))

    def _alike(self, victim: int, neighbour: int) -> Numbers:
        """Samples of both models, then of one of them, then others; of too many, evenly some."""
        terms = self.process.terms
        same = (terms.victims == victim).astype(int) + (terms.colocated == neighbour)
        closest = np.maximum.reduceat(same, self.process.starts)
        kept = np.empty(0, dtype=np.int64)
        for level in (2, 1, 0):
            found = np.flatnonzero(closest == level)
            count = min(SOME - len(kept), len(found))
            kept = np.append(kept, found[np.linspace(0, len(found) - 1, count).round().astype(int)])
        return kept


def _alike(role: _Role, traits: Matrix, number: int) -> Matrix:
    """(functions, loads of the role)."""
    columns = (traits - role.centre) / role.width
    columns[np.isnan(columns)] = 0.0  # as usual
    named = role.numbers == number
    alike = np.empty((len(role.functions), len(named)))
    for i, (groups, amount, by_name) in enumerate(role.functions):
        far = np.zeros(len(named))
        for group, reach, others in groups:
            far += ((columns[group] / reach - others) ** 2).sum(axis=1)
        alike[i] = amount * np.exp(-0.5 * far)
        if by_name:
            alike[i] *= named
    return alike


def _role(prior: Prior, scaled: Matrix, numbers: Numbers, *, victim: bool) -> _Role:
    """scaled, numbers: of all terms."""
    first = 0 if victim else len(TRAITS)
    own = slice(first, first + len(TRAITS))
    loads, places = np.unique(np.column_stack([numbers, scaled[:, own]]), axis=0, return_inverse=True)
    functions = []
    for name, function in FUNCTIONS.items():
        scales, groups = prior.functions[name], []
        for (group, _), reach in zip(function.groups, scales.reach, strict=True):
            if own.start <= group[0] < own.stop:
                mine = [column - first for column in group]
                groups.append((mine, reach, loads[:, 1:][:, mine] / reach))
        functions.append((groups, scales.amount, function.victim if victim else function.neighbour))
    centre, width = np.array(prior.centre[own]), np.array(prior.width[own])
    return _Role(loads[:, 0].astype(np.int64), places.ravel(), centre, width, functions)
