"""What is known of models that run alone, as the numbers that predictors learn from.

KACE (section 4.2): of models that run together, the features are added up, and those that are percentages are averaged.
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

PERCENT = "_pct"  # how columns of percentages end
SHARE, ROWS, MEMORY = "share_pct", "rows_per_s", "memory_mib"  # what every profile says

Vector = NDArray[np.float64]


class Known(msgspec.Struct, frozen=True):
    """A model at a measured point. share: ‰; values: in the order of the sheet's columns."""

    name: str
    kind: str
    share: int
    batch: int
    values: tuple[float, ...]


class FeatureTable(msgspec.Struct, frozen=True, dict=True):
    """columns: names of features, as in profiles; known: every measured point of every model."""

    columns: tuple[str, ...]
    known: tuple[Known, ...]

    def of(self, load: Load) -> Vector:
        """Its features at the measured point nearest in share, then in batch. Raises PlanError for a strange model."""
        found = self._found.get(load)
        if found is None:
            points = self._points.get((load.model, load.kind))
            if points is None:
                raise PlanError(
                    f"model {load.model!r} on {load.kind!r} is unknown to this predictor; it has no features"
                )
            nearest = min(points, key=lambda point: (abs(point.share - load.share), abs(point.batch - load.batch)))
            found = self._found[load] = np.array([load.share * 100 / WHOLE, *nearest.values])
        return found

    def together(self, loads: Sequence[Load]) -> Vector:
        """Features of models that run together: sums, and means of percentages."""
        total: Vector = np.sum([self.of(load) for load in loads], axis=0)
        return np.where(self._averaged, total / len(loads), total)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what `of` gives."""
        return (SHARE, *self.columns)

    @functools.cached_property
    def _averaged(self) -> NDArray[np.bool_]:
        return np.array([name.endswith(PERCENT) for name in self.names])

    @functools.cached_property
    def _found(self) -> dict[Load, Vector]:
        return {}

    @functools.cached_property
    def _points(self) -> dict[tuple[str, str], list[Known]]:
        found: dict[tuple[str, str], list[Known]] = {}
        for each in self.known:
            found.setdefault((each.name, each.kind), []).append(each)
        return found


def feature_table(
    profiles: Profiles, needed: Iterable[tuple[str, str]], columns: Sequence[str] | None = None
) -> FeatureTable:
    """Of profiles. needed: models and kinds that have to be known. columns: which; without, those that all these have.

    Models that lack a column are left out.
    """
    if columns is None:
        having = [_columns(profiles[key]) for key in needed]
        columns = (*sorted(set.intersection(*having)), ROWS, MEMORY)
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
    """Those that any point has: points that lack one are not learnt from."""
    return {name for point in profile.points for name in point.features}


class Column(msgspec.Struct, frozen=True):
    """A feature over the samples. place: among those that `Scale.apply` is given."""

    name: str
    place: int
    low: float
    high: float
    mean: float
    deviation: float


class Scale(msgspec.Struct, frozen=True, dict=True):
    """To mean 0 and deviation 1 over the samples. Features that did not vary among them are left out.

    Features beyond what the samples had are taken to be at their edge: a model learnt nothing of what lies there, and a
    line's answer grows without bound with a kernel that has ten times the threads.
    """

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, rows: Vector, names: Sequence[str]) -> Scale:
        """names: of the columns of `rows`."""
        every = zip(
            names,
            range(len(names)),
            *(each.tolist() for each in (rows.min(axis=0), rows.max(axis=0), rows.mean(axis=0), rows.std(axis=0))),
            strict=True,
        )
        columns = [Column(*each) for each in every]
        return cls(tuple(each for each in columns if each.deviation > 1e-9 * max(abs(each.mean), 1e-300)))

    def apply(self, rows: Vector) -> Vector:
        places, low, high, mean, deviation = self._arrays
        scaled: Vector = (np.clip(rows[..., places], low, high) - mean) / deviation
        return scaled

    @functools.cached_property
    def _arrays(self) -> tuple[NDArray[np.int64], Vector, Vector, Vector, Vector]:
        places = np.array([each.place for each in self.columns], dtype=np.int64)
        low, high, mean, deviation = (
            np.array([(each.low, each.high, each.mean, each.deviation) for each in self.columns]).reshape(-1, 4).T
        )
        return places, low, high, mean, deviation
