"""Predict interference by KACE: learn it from what each model's kernels demand of a device when it runs alone.

KACE (RPE report, 2024), chapter 4: the features of models that run together are summed, percentages are averaged,
everything is standardised, and the sum of their throughputs is learnt by linear regression (`ThroughputSum`). A
slowdown is that of one model, so `KernelPredictor` gets the victim's own features as well. Features are any columns
that the profiles have, such as `threads`, `registers`, `sm_throughput_pct`, and what every profile implies: rows/s
alone, memory, share.
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
    """Predict by a regressor with standardised inputs. centre, spread: mean and standard deviation of the targets."""

    scale: Scale
    centre: float
    spread: float
    regressor: Regressor

    def predict(self, rows: Vector) -> Vector:
        return self.centre + self.spread * self.regressor.predict(self.scale.apply(rows))


def fit_technique(
    rows: Vector, names: Sequence[str], targets: Vector, technique: str = "lr", *, seed: int = 0, effort: int = 10
) -> LearnedPredictor:
    """Fit a technique. rows: samples by features, with these names. Raises PlanError as `regression.train` does."""
    scale, centre, spread = Scale.of(rows, names), float(targets.mean()), float(targets.std()) or 1.0
    scaled = (targets - centre) / spread
    return LearnedPredictor(
        scale, centre, spread, train(technique, scale.apply(rows), scaled, seed=seed, effort=effort)
    )


class KernelPredictor(msgspec.Struct, frozen=True, dict=True):
    """Predict a slowdown from the victim's features and those of all models that run."""

    features: FeatureTable
    learnt: LearnedPredictor

    interferes: ClassVar[bool] = True

    @remembered
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Predict a slowdown. Raises PlanError for a model without features."""
        row = _row(self.features, victim, colocated)
        return max(1.0, float(np.exp(self.learnt.predict(row[None, :])[0])))

    def with_profiles(self, profiles: Profiles) -> KernelPredictor:
        """Return the predictor with the models of these profiles added; they need features, but no samples."""
        more = feature_table(profiles, (), self.features.columns).known
        redefined = {(each.name, each.kind) for each in more}
        kept = [each for each in self.features.known if (each.name, each.kind) not in redefined]
        return KernelPredictor(FeatureTable(self.features.columns, (*kept, *more)), self.learnt)


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
    table = feature_table(profiles, _named(sample.victim for sample in samples) | _named(_colocated_loads(samples)))
    rows = np.array([_row(table, sample.victim, sample.colocated) for sample in samples])
    names = [*(f"{name} of the victim" for name in table.names), *table.names]
    return KernelPredictor(
        table, fit_technique(rows, names, np.log([sample.slowdown for sample in samples]), technique)
    )


def _row(table: FeatureTable, victim: Load, colocated: Sequence[Load]) -> Vector:
    return np.concatenate([table.of(victim), table.together([victim, *colocated])])


class ColocatedRun(msgspec.Struct, frozen=True):
    """Hold a measurement of models that ran together. rows_per_s: of each."""

    loads: tuple[Load, ...]
    rows_per_s: tuple[float, ...]


class ThroughputSum(msgspec.Struct, frozen=True):
    """Predict the sum of the throughputs of models that run together, in rows/s."""

    features: FeatureTable
    learnt: LearnedPredictor

    def rows_per_s(self, sets: Sequence[Sequence[Load]]) -> list[float]:
        """Predict the sum for each set of loads. Raises PlanError for a model without features."""
        rows = np.array([self.features.together(loads) for loads in sets])
        return self.learnt.predict(rows).tolist()  # type: ignore[no-any-return]


def fit_sum(
    runs: Sequence[ColocatedRun], profiles: Profiles, technique: str = "lr", *, seed: int = 0, effort: int = 10
) -> ThroughputSum:
    """Fit the sum of throughputs to runs. Raises PlanError without runs, and as `regression.train` does."""
    if not runs:
        raise PlanError("no co-located runs to learn from; measure pairs with `cotenant profile --pairs`")
    table = feature_table(profiles, _named(load for run in runs for load in run.loads))
    rows = np.array([table.together(run.loads) for run in runs])
    targets = np.array([sum(run.rows_per_s) for run in runs])
    return ThroughputSum(table, fit_technique(rows, table.names, targets, technique, seed=seed, effort=effort))


def runs_of(samples: Iterable[Sample]) -> list[ColocatedRun]:
    """Combine samples into runs whose every model was measured as a victim; several measurements are averaged."""
    by_loads: dict[tuple[Load, ...], dict[Load, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        loads = tuple(sorted((sample.victim, *sample.colocated), key=msgspec.structs.astuple))
        by_loads[loads][sample.victim].append(sample.victim.batch / sample.together)
    return [
        ColocatedRun(loads, tuple(float(np.mean(rates[load])) for load in loads))
        for loads, rates in by_loads.items()
        if all(load in rates for load in loads)
    ]


def _named(loads: Iterable[Load]) -> set[tuple[str, str]]:
    return {(load.model, load.kind) for load in loads}


def _colocated_loads(samples: Iterable[Sample]) -> Iterable[Load]:
    return (load for sample in samples for load in sample.colocated)
