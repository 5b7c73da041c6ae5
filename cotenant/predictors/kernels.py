"""KACE's model: what models do to each other, learnt from what their kernels ask of a device when they run alone.

KACE (RPE report, 2024), chapter 4: the features of models that run together are added up, percentages are averaged,
all is brought to one scale, and the sum of their throughputs is learnt from it by linear regression (`ThroughputSum`).
A slowdown
is of one model, so `KernelPredictor` sees the victim's own features beside those of all. Features are whatever columns
the
profiles have, such as `threads`, `registers`, `sm_throughput_pct`, and what every profile says: rows per second alone,
memory, share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from cotenant.core.profile import Profiles
from cotenant.errors import PlanError
from cotenant.predictors import Load, remembered
from cotenant.predictors.features import FeatureTable, Scale, Vector, feature_table
from cotenant.predictors.regression import Regressor, train
from cotenant.predictors.samples import Sample


class LearnedPredictor(msgspec.Struct, frozen=True):
    """A number from features. centre, spread: of that number over the samples."""

    scale: Scale
    centre: float
    spread: float
    regressor: Regressor

    def predict(self, rows: Vector) -> Vector:
        return self.centre + self.spread * self.regressor.predict(self.scale.apply(rows))


def fit_technique(
    rows: Vector, names: Sequence[str], targets: Vector, technique: str = "lr", *, seed: int = 0, effort: int = 10
) -> LearnedPredictor:
    """rows: samples by features, which have these names. Raises PlanError as `regression.train` does."""
    scale, centre, spread = Scale.of(rows, names), float(targets.mean()), float(targets.std()) or 1.0
    scaled = (targets - centre) / spread
    return LearnedPredictor(
        scale, centre, spread, train(technique, scale.apply(rows), scaled, seed=seed, effort=effort)
    )


class KernelPredictor(msgspec.Struct, frozen=True, dict=True):
    """A slowdown from the victim's features and those of all that run."""

    sheet: FeatureTable
    learnt: LearnedPredictor

    interferes: ClassVar[bool] = True

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Raises PlanError for a model without features."""
        row = _row(self.sheet, victim, colocated)
        return max(1.0, float(np.exp(self.learnt.predict(row[None, :])[0])))

    def with_profiles(self, profiles: Profiles) -> KernelPredictor:
        """The same, which also knows these models: they need no samples, but the features."""
        more = feature_table(profiles, (), self.sheet.columns).known
        told = {(each.name, each.kind) for each in more}
        kept = [each for each in self.sheet.known if (each.name, each.kind) not in told]
        return KernelPredictor(FeatureTable(self.sheet.columns, (*kept, *more)), self.learnt)


def fit(samples: Sequence[Sample], profiles: Profiles) -> KernelPredictor:
    return _fit(samples, profiles, "lr")


def fit_ridge(samples: Sequence[Sample], profiles: Profiles) -> KernelPredictor:
    return _fit(samples, profiles, "ridge")


def fit_forest(samples: Sequence[Sample], profiles: Profiles) -> KernelPredictor:
    return _fit(samples, profiles, "rf")


def fit_network(samples: Sequence[Sample], profiles: Profiles) -> KernelPredictor:
    return _fit(samples, profiles, "nn")


def fit_automl(samples: Sequence[Sample], profiles: Profiles) -> KernelPredictor:
    return _fit(samples, profiles, "automl")


def _fit(samples: Sequence[Sample], profiles: Profiles, technique: str) -> KernelPredictor:
    known = feature_table(profiles, _named(sample.victim for sample in samples) | _named(_neighbours(samples)))
    rows = np.array([_row(known, sample.victim, sample.colocated) for sample in samples])
    names = [*(f"{name} of the victim" for name in known.names), *known.names]
    return KernelPredictor(
        known, fit_technique(rows, names, np.log([sample.slowdown for sample in samples]), technique)
    )


def _row(known: FeatureTable, victim: Load, colocated: Sequence[Load]) -> Vector:
    return np.concatenate([known.of(victim), known.together([victim, *colocated])])


class ColocatedRun(msgspec.Struct, frozen=True):
    """Models that ran together. rows_per_s: of each."""

    loads: tuple[Load, ...]
    rows_per_s: tuple[float, ...]


class ThroughputSum(msgspec.Struct, frozen=True):
    """The throughputs of models that run together, added up, in rows per second."""

    sheet: FeatureTable
    learnt: LearnedPredictor

    def rows_per_s(self, sets: Sequence[Sequence[Load]]) -> list[float]:
        """Of each set of models. Raises PlanError for a model without features."""
        rows = np.array([self.sheet.together(loads) for loads in sets])
        return self.learnt.predict(rows).tolist()  # type: ignore[no-any-return]


def fit_sum(
    runs: Sequence[ColocatedRun], profiles: Profiles, technique: str = "lr", *, seed: int = 0, effort: int = 10
) -> ThroughputSum:
    if not runs:
        raise PlanError("no co-located runs to learn from; measure pairs with `cotenant profile --pairs`")
    known = feature_table(profiles, _named(load for run in runs for load in run.loads))
    rows = np.array([known.together(run.loads) for run in runs])
    targets = np.array([sum(run.rows_per_s) for run in runs])
    return ThroughputSum(known, fit_technique(rows, known.names, targets, technique, seed=seed, effort=effort))


def runs_of(samples: Iterable[Sample]) -> list[ColocatedRun]:
    """Runs of whose models each was measured as a victim; of several measurements the mean."""
    found: dict[tuple[Load, ...], dict[Load, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        loads = tuple(sorted((sample.victim, *sample.colocated), key=msgspec.structs.astuple))
        found[loads][sample.victim].append(sample.victim.batch / sample.together)
    return [
        ColocatedRun(loads, tuple(float(np.mean(seen[load])) for load in loads))
        for loads, seen in found.items()
        if all(load in seen for load in loads)
    ]


def _named(loads: Iterable[Load]) -> set[tuple[str, str]]:
    return {(load.model, load.kind) for load in loads}


def _neighbours(samples: Iterable[Sample]) -> Iterable[Load]:
    return (load for sample in samples for load in sample.colocated)
