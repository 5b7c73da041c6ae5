"""The NTUA thesis' collaborative filtering: gaps in a matrix of measurements are filled from what is alike.

Rows are models, columns configurations or neighbours; an entry is a throughput alone (`isolated`), or what a row's
model loses beside a column's (`fit`). Chapters 7 and 8 of the thesis have two ways to fill gaps, and which is better
goes with how many there are (figure 7.1). Latent features of a singular value decomposition, with gaps as zeros, say
which columns are alike, and an entry is the mean of the row's others, weighted by likeness: sound with few entries.
Regression of each column on the others, in rounds, is far better where most of a row is known, and goes astray where it
is not. `complete` takes for each row the one for its gaps.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import Profiles
from cotenant.errors import PlanError
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample

Matrix = NDArray[np.float64]  # NaN where nothing was measured

ENERGY = 0.9  # of the squared singular values that latent features keep
ROUNDS = 10  # of regression
SPARSE = 0.5  # of a row: from so many gaps on, likeness fills them
MOST = 0.95  # of its throughput that neighbours may cost a model together


def complete(values: Matrix) -> Matrix:
    """Each row's gaps by regression, or by likeness where half of it or more is missing.

    Raises PlanError for a row or a column without any value, and without scikit-learn where a row needs it.
    """
    gaps = np.isnan(values)
    if gaps.all(axis=0).any() or gaps.all(axis=1).any():
        raise PlanError("a row or a column of the matrix has no measurement; leave it out")
    sparse = gaps.mean(axis=1) >= SPARSE
    if not (gaps.any(axis=1) & ~sparse).any():
        return predict_by_similarity(values)
    regressed = predict_by_regression(values)
    return np.where(sparse[:, None], predict_by_similarity(values), regressed) if sparse.any() else regressed


def predict_by_similarity(values: Matrix, features: Callable[[Matrix], Matrix] = np.transpose) -> Matrix:
    """features: from the matrix as its latent features make it again, one row of features for each column.

    Columns are alike as 1 / (1 + distance). Entries that were filled count for the rest of their row, as published.
    """
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    rows, energy, columns = np.linalg.svd(filled, full_matrices=False)
    kept = int(np.searchsorted(np.cumsum(energy**2), ENERGY * (energy**2).sum())) + 1
    latent = features(np.round(rows[:, :kept] * energy[:kept] @ columns[:kept], 3))
    for row, column in np.argwhere(~known):
        others = known[row]
        alike = 1 / (1 + np.linalg.norm(latent[np.flatnonzero(others)] - latent[column], axis=1))
        filled[row, column] = alike @ filled[row, others] / alike.sum()
        known[row, column] = True
    return filled


def predict_by_regression(values: Matrix) -> Matrix:
    """Bayesian ridge regression of each column on the others, in rounds. Raises PlanError without scikit-learn."""
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.experimental import enable_iterative_imputer  # noqa: F401
        from sklearn.impute import IterativeImputer
    except ImportError as error:
        raise PlanError(f"filling gaps needs {error.name}: pip install 'cotenant[learn]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the rounds are the thesis'
        filled: Matrix = IterativeImputer(max_iter=ROUNDS, random_state=0).fit_transform(values)
    return filled


def isolated(profiles: Profiles) -> dict[Load, float]:
    """Rows per second of every model alone, at every kind, share and batch at which any model was measured."""
    measured = {
        (profile.model, (profile.kind, point.share, point.batch)): point.batch / point.latency
        for profile in profiles.values()
        for point in profile.points
        if point.procs == 1
    }
    models, places = sorted({model for model, _ in measured}), sorted({place for _, place in measured})
    filled = complete(np.array([[measured.get((model, place), np.nan) for place in places] for model in models]))
    return {
        Load(model, kind, batch, share): float(filled[i, j])
        for i, model in enumerate(models)
        for j, (kind, share, batch) in enumerate(places)
    }


class Losses(msgspec.Struct, frozen=True, dict=True):
    """lost: of each victim beside each neighbour, the fraction of its throughput. Of several neighbours it adds up."""

    victims: tuple[Load, ...]
    colocated: tuple[Load, ...]
    lost: tuple[tuple[float, ...], ...]

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """As at the nearest share and batch that were measured. Raises PlanError for a model that was not."""
        if not colocated:
            return 1.0
        row = self._place(victim, "victim")
        total = sum(self.lost[row][self._place(load, "neighbour")] for load in colocated)
        return 1 / (1 - min(max(total, 0.0), MOST))

    def _place(self, load: Load, role: str) -> int:
        """Number of the row or column."""
        place = self._places.get((load, role))
        if place is None:
            every = self.victims if role == "victim" else self.colocated
            near = [i for i, one in enumerate(every) if (one.model, one.kind) == (load.model, load.kind)]
            if not near:
                raise PlanError(f"model {load.model!r} on {load.kind!r} was no {role} in any sample; measure it as one")
            place = min(near, key=lambda i: (abs(every[i].share - load.share), abs(every[i].batch - load.batch)))
            self._places[load, role] = place
        return place

    @functools.cached_property
    def _places(self) -> dict[tuple[Load, str], int]:
        return {}


def fit(samples: Sequence[Sample], profiles: Profiles) -> Losses:
    """From samples with one neighbour. Raises PlanError where the others leave too few, and as `complete` does."""
    measured: dict[tuple[Load, Load], list[float]] = defaultdict(list)
    for sample in samples:
        if len(sample.colocated) == 1:
            measured[sample.victim, sample.colocated[0]].append(1 - 1 / sample.slowdown)
    victims, colocated = (tuple(dict.fromkeys(pair[i] for pair in measured)) for i in (0, 1))
    if len(measured) < len(victims) + len(colocated):
        raise PlanError(
            f"{len(measured)} pairs are too few to fill a matrix of {len(victims)} victims by {len(colocated)}"
            " neighbours from; measure more pairs at fewer batches and shares"
        )
    values = np.full((len(victims), len(colocated)), np.nan)
    for (victim, neighbour), lost in measured.items():
        values[victims.index(victim), colocated.index(neighbour)] = np.mean(lost)
    return Losses(victims, colocated, tuple(tuple(row) for row in complete(values).round(6).tolist()))
