"""Complete a matrix of measurements from similar rows and columns, by the NTUA thesis' collaborative filtering.

Rows are models, columns configurations or co-located models; an entry is a throughput alone (`isolated`), or the loss
of a row's model co-located with a column's (`fit`). Chapters 7 and 8 of the thesis have two ways to fill gaps, and
which is better depends on how many there are (figure 7.1). Latent features from a singular value decomposition, with
gaps as zeros, determine which columns are similar, and an entry is the mean of the row's others, weighted by
similarity: robust with few entries. Iterated regression of each column on the others is far more accurate where most of
a row is known, and fails where it is not. `complete` chooses by the gaps of each row.
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

KEPT_ENERGY = 0.9  # fraction of the squared singular values that latent features keep
REGRESSION_ROUNDS = 10  # rounds of iterated regression
MIN_SPARSITY = 0.5  # fraction of gaps in a row from which similarity fills them
MAX_LOSS = 0.95  # maximum fraction of a model's throughput that co-located models may take together


def complete(values: Matrix) -> Matrix:
    """Fill each row's gaps by regression, or by similarity where at least half of the row is missing.

    Raises PlanError for a row or a column without any value, and without scikit-learn where a row needs it.
    """
    gaps = np.isnan(values)
    for axis, what in ((1, "row"), (0, "column")):
        empty = np.asarray(gaps.all(axis=axis))
        if empty.any():
            place = f"{what} {int(np.argmax(empty)) + 1} of {len(empty)} of the matrix"
            raise PlanError(f"{place} has no measurement; measure one there, or leave it out")
    sparse = gaps.mean(axis=1) >= MIN_SPARSITY
    if not (gaps.any(axis=1) & ~sparse).any():
        return predict_by_similarity(values)
    regressed = predict_by_regression(values)
    return np.where(sparse[:, None], predict_by_similarity(values), regressed) if sparse.any() else regressed


def predict_by_similarity(values: Matrix, features: Callable[[Matrix], Matrix] = np.transpose) -> Matrix:
    """Fill gaps with the similarity-weighted mean of the row's other entries.

    features: maps the matrix, reconstructed from its latent features, to a row of features for each column. Similarity
    is 1 / (1 + distance). Filled entries count for the rest of their row, as published.
    """
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    rows, energy, columns = np.linalg.svd(filled, full_matrices=False)
    kept = int(np.searchsorted(np.cumsum(energy**2), KEPT_ENERGY * (energy**2).sum())) + 1
    latent = features(np.round(rows[:, :kept] * energy[:kept] @ columns[:kept], 3))
    for row, column in np.argwhere(~known):
        others = known[row]
        similarity = 1 / (1 + np.linalg.norm(latent[np.flatnonzero(others)] - latent[column], axis=1))
        filled[row, column] = similarity @ filled[row, others] / similarity.sum()
        known[row, column] = True
    return filled


def predict_by_regression(values: Matrix) -> Matrix:
    """Fill gaps by iterated Bayesian ridge regression of each column. Raises PlanError without scikit-learn."""
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.experimental import enable_iterative_imputer  # noqa: F401
        from sklearn.impute import IterativeImputer
    except ImportError as error:
        raise PlanError(f"filling gaps needs {error.name}: pip install 'cotenant[learn]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of rounds is the thesis'
        filled: Matrix = IterativeImputer(max_iter=REGRESSION_ROUNDS, random_state=0).fit_transform(values)
    return filled


def isolated(profiles: Profiles) -> dict[Load, float]:
    """Return rows/s of every model alone, at every kind, share and batch at which any model was profiled."""
    measured = {
        (profile.model, (profile.kind, point.share, point.batch)): point.batch / point.latency
        for profile in profiles.values()
        for point in profile.points
        if point.procs == 1
    }
    models, configurations = sorted({model for model, _ in measured}), sorted({index for _, index in measured})
    filled = complete(
        np.array([[measured.get((model, index), np.nan) for index in configurations] for model in models])
    )
    return {
        Load(model, kind, batch, share): float(filled[i, j])
        for i, model in enumerate(models)
        for j, (kind, share, batch) in enumerate(configurations)
    }


class Losses(msgspec.Struct, frozen=True, dict=True):
    """Predict slowdowns from the completed matrix.

    lost: for each victim and co-located model, the lost fraction of throughput; losses to several add up.
    """

    victims: tuple[Load, ...]
    colocated: tuple[Load, ...]
    lost: tuple[tuple[float, ...], ...]

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict a slowdown at the nearest sampled share and batch. Raises PlanError for a model without samples."""
        if not colocated:
            return 1.0
        row = self._place(victim, "victim")
        total = sum(self.lost[row][self._place(load, "co-located model")] for load in colocated)
        return 1 / (1 - min(max(total, 0.0), MAX_LOSS))

    def _place(self, load: Load, role: str) -> int:
        """Return the index of a load's row or column."""
        index = self._places.get((load, role))
        if index is None:
            every = self.victims if role == "victim" else self.colocated
            near = [i for i, one in enumerate(every) if (one.model, one.kind) == (load.model, load.kind)]
            if not near:
                raise PlanError(f"model {load.model!r} on {load.kind!r} was no {role} in any sample; measure it as one")
            index = min(near, key=lambda i: (abs(every[i].share - load.share), abs(every[i].batch - load.batch)))
            self._places[load, role] = index
        return index

    @functools.cached_property
    def _places(self) -> dict[tuple[Load, str], int]:
        return {}


def fit(samples: Sequence[Sample], profiles: Profiles) -> Losses:
    """Fit to samples with one co-located model. Raises PlanError where too few remain, and as `complete` does."""
    measured: dict[tuple[Load, Load], list[float]] = defaultdict(list)
    for sample in samples:
        if len(sample.colocated) == 1:
            measured[sample.victim, sample.colocated[0]].append(1 - 1 / sample.slowdown)
    victims, colocated = (tuple(dict.fromkeys(pair[i] for pair in measured)) for i in (0, 1))
    if len(measured) < len(victims) + len(colocated):
        raise PlanError(
            f"{len(measured)} pairs are too few to fill a matrix of {len(victims)} victims by {len(colocated)}"
            " co-located models from; measure more pairs at fewer batches and shares"
        )
    values = np.full((len(victims), len(colocated)), np.nan)
    for (victim, other), lost in measured.items():
        values[victims.index(victim), colocated.index(other)] = np.mean(lost)
    return Losses(victims, colocated, tuple(tuple(row) for row in complete(values).round(6).tolist()))
