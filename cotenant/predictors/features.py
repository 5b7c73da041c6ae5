"""Extract features of models that run alone, from their profiles, as the inputs of predictors.

KACE (section 4.2): the features of models that run together are summed, and those that are percentages are averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import MIB, Profile, Profiles
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.predictors import Load

PERCENT = "_pct"  # suffix of columns in percent
SHARE, ROWS, MEMORY = "share_pct", "rows_per_s", "memory_mib"  # features that every profile has

Vector = NDArray[np.float64]


class Known(msgspec.Struct, frozen=True):
    """Hold a model at a profiled point. share: ‰; values: in the order of the table's columns."""

    name: str
    kind: str
    share: int
    batch: int
    values: tuple[float, ...]


class FeatureTable(msgspec.Struct, frozen=True, dict=True):
    """Hold a table of features. columns: their names, as in profiles; known: every profiled point of every model."""

    columns: tuple[str, ...]
    known: tuple[Known, ...]

    def of(self, load: Load) -> Vector:
        """Return a load's features at the profiled point nearest in share, then in batch.

        Raises PlanError for an unknown model.
        """
        features = self._features_cache.get(load)
        if features is None:
            points = self._points_of.get((load.model, load.kind))
            if points is None:
                raise PlanError(
                    f"model {load.model!r} on {load.kind!r} has no features; give this predictor a profile with them"
                )
            nearest = min(points, key=lambda point: (abs(point.share - load.share), abs(point.batch - load.batch)))
            features = self._features_cache[load] = np.array([load.share * 100 / WHOLE, *nearest.values])
        return features

    def together(self, loads: Sequence[Load]) -> Vector:
        """Return the features of models that run together: sums, and means of percentages."""
        total: Vector = np.sum([self.of(load) for load in loads], axis=0)
        return np.where(self._averaged, total / len(loads), total)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features that `of` returns."""
        return (SHARE, *self.columns)

    @functools.cached_property
    def _averaged(self) -> NDArray[np.bool_]:
        return np.array([name.endswith(PERCENT) for name in self.names])

    @functools.cached_property
    def _features_cache(self) -> dict[Load, Vector]:
        return {}

    @functools.cached_property
    def _points_of(self) -> dict[tuple[str, str], list[Known]]:
        points: dict[tuple[str, str], list[Known]] = {}
        for each in self.known:
            points.setdefault((each.name, each.kind), []).append(each)
        return points


def feature_table(
    profiles: Profiles, needed: Iterable[tuple[str, str]], columns: Sequence[str] | None = None
) -> FeatureTable:
    """Build the table of features of profiles; points that lack a column are left out.

    needed: models and kinds that must be included. columns: which features; by default, those that all needed have.
    """
    if columns is None:
        columns_of_needed = [_columns(profiles[key]) for key in needed]
        columns = (*sorted(set.intersection(*columns_of_needed)), ROWS, MEMORY)
    return FeatureTable(
        tuple(columns),
        tuple(
            Known(profile.model, profile.kind, point.share, point.batch, tuple(values[name] for name in columns))
            for profile in profiles.values()
            for point in profile.points
            if point.procs == 1
            for values in [{**point.features, ROWS: point.batch / point.latency, MEMORY: point.memory / MIB}]
            if all(name in values for name in columns)
        ),
    )


def _columns(profile: Profile) -> set[str]:
    """Return the features that any point of a profile has: points that lack one are left out."""
    return {name for point in profile.points for name in point.features}


class Column(msgspec.Struct, frozen=True):
    """Describe the distribution of a feature over the samples. place: index among the features that `Scale.apply`
    receives."""

    name: str
    place: int
    low: float
    high: float
    mean: float
    deviation: float


class Scale(msgspec.Struct, frozen=True, dict=True):
    """Standardise features to mean 0 and deviation 1 over the samples; drop those that did not vary.

    Features are clipped to the range of the samples: nothing was learnt beyond it, and a linear prediction would grow
    without bound with a kernel that has ten times the threads.
    """

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, rows: Vector, names: Sequence[str]) -> Scale:
        """Fit to samples. names: of the columns of `rows`."""
        statistics = zip(
            names,
            range(len(names)),
            *(each.tolist() for each in (rows.min(axis=0), rows.max(axis=0), rows.mean(axis=0), rows.std(axis=0))),
            strict=True,
        )
        columns = [Column(*each) for each in statistics]
        return cls(tuple(each for each in columns if each.deviation > 1e-9 * max(abs(each.mean), 1e-300)))

    def apply(self, rows: Vector) -> Vector:
        indices, low, high, mean, deviation = self._arrays
        scaled: Vector = (np.clip(rows[..., indices], low, high) - mean) / deviation
        return scaled

    @functools.cached_property
    def _arrays(self) -> tuple[NDArray[np.int64], Vector, Vector, Vector, Vector]:
        indices = np.array([each.place for each in self.columns], dtype=np.int64)
        low, high, mean, deviation = (
            np.array([(each.low, each.high, each.mean, each.deviation) for each in self.columns]).reshape(-1, 4).T
        )
        return indices, low, high, mean, deviation
