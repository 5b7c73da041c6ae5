"""Implement KACE's choice of co-located models and its evaluation: the chosen throughput sum over the best one.

`AsPublished` follows the published program exactly. It holds out a fifth of the training set and trains on the rest;
features of a target's test runs are standardised by their own statistics, which a scheduler that sees one candidate at
a time could not do. `ScaledByTraining` uses the training set's statistics, as Cotenant does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from cotenant.core.profile import Profiles
from cotenant.planners import colocate
from cotenant.predictors import Load
from cotenant.predictors.features import FeatureTable, feature_table
from cotenant.predictors.kernels import ColocatedRun, ThroughputSum, fit_sum
from cotenant.predictors.regression import Regressor, train
from cotenant.published import kace

Values = NDArray[np.float64]
# Predicts the value of each run that contains a target.
Policy = Callable[[Sequence[ColocatedRun]], Values]

HELD_OUT, HELD_OUT_SEED = 0.2, 30  # of every training set, by their trainer


def sums(runs: Sequence[ColocatedRun]) -> Values:
    """Return the throughput sum of each run, in rows per second."""
    return np.array([sum(run.rows_per_s) for run in runs])


def relative(test: Sequence[ColocatedRun], policy: Policy, targets: Sequence[Load] | None = None) -> dict[Load, float]:
    """Return, for each target, the measured sum of the run with the highest prediction over the best one."""
    ratios = {}
    for target in targets or workloads(test):
        mine = [run for run in test if target in run.loads]
        if mine:
            measured = sums(mine)
            ratios[target] = float(measured[int(np.argmax(policy(mine)))] / measured.max())
    return ratios


def random_choice(test: Sequence[ColocatedRun]) -> dict[Load, float]:
    """Return, for each target, the mean sum over all runs over the best one."""
    ratios = {}
    for target in workloads(test):
        measured = sums([run for run in test if target in run.loads])
        ratios[target] = float(measured.mean() / measured.max())
    return ratios


def workloads(runs: Sequence[ColocatedRun]) -> list[Load]:
    """List the loads of all runs without repetition."""
    return list(dict.fromkeys(load for run in runs for load in run.loads))


class AsPublished:
    """Predict sums as published. features: KACE's, or those of Xu et al.; technique: as in `regression`."""

    def __init__(
        self, runs: Sequence[ColocatedRun], technique: str, *, features: str = "KACE", effort: int = 10, seed: int = 0
    ):
        self._sheet = features_of_loads(features)
        kept, _ = train_and_held_out(runs)
        self.regressor: Regressor = train(
            technique, standardized(self._rows(kept)), standardized(sums(kept)), seed=seed, effort=effort
        )

    def __call__(self, runs: Sequence[ColocatedRun]) -> Values:
        return self.regressor.predict(standardized(self._rows(runs)))

    def _rows(self, runs: Sequence[ColocatedRun]) -> Values:
        """Return features without the share, which comes first and is the whole device for all."""
        return np.array([self._sheet.together(run.loads)[1:] for run in runs])


class ScaledByTraining:
    """Predict sums with Cotenant's predictor, fitted to the same four fifths of a training set, or to all of it."""

    def __init__(
        self, runs: Sequence[ColocatedRun], technique: str = "lr", *, whole: bool, effort: int = 10, seed: int = 0
    ):
        kept = list(runs) if whole else train_and_held_out(runs)[0]
        self.model: ThroughputSum = fit_sum(kept, kace.profiles(), technique, seed=seed, effort=effort)

    def __call__(self, runs: Sequence[ColocatedRun]) -> Values:
        return np.array(self.model.rows_per_s([run.loads for run in runs]))


def rule(column: str, highest: bool) -> Policy:
    """Return a policy that ranks runs by one feature of their models, highest or lowest first."""

    def policy(runs: Sequence[ColocatedRun]) -> Values:
        place = features_of_loads().names.index(column)
        return np.array([features_of_loads().together(run.loads)[place] for run in runs]) * (1 if highest else -1)

    return policy


RULES: dict[str, Policy] = {
    name: rule(*colocate.RULES[of]) for name, of in (("MEMCAP", "memcap"), ("SM%", "sm"), ("MEM%", "mem"))
}


def best_rule(test: Sequence[ColocatedRun]) -> dict[Load, float]:
    """Return, for each target, the result of the rule that is best in hindsight."""
    every = [relative(test, policy) for policy in RULES.values()]
    return {target: max(each[target] for each in every) for target in every[0]}


def train_and_held_out(runs: Sequence[ColocatedRun]) -> tuple[list[ColocatedRun], list[ColocatedRun]]:
    """Split a training set as their trainer does."""
    kept, held_out = train_test_split(list(runs), test_size=HELD_OUT, random_state=HELD_OUT_SEED)
    return kept, held_out


def standardized(values: Values) -> Values:
    """Scale to mean 0 and deviation 1 by the values' own statistics; constant columns become 0."""
    deviation = values.std(axis=0, ddof=1)
    scaled: Values = (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return scaled


@functools.cache
def features_of_loads(features: str = "KACE") -> FeatureTable:
    """Return the features of all loads. Those of Xu et al. include neither isolated throughput nor memory."""
    profiles: Profiles = kace.profiles(features)
    return feature_table(profiles, profiles, None if features == "KACE" else tuple(kace.COLUMNS[features].values()))


def unseen(runs: Sequence[ColocatedRun], target: Load) -> list[ColocatedRun]:
    """Return the runs without the target's model, at any batch."""
    return [run for run in runs if all(load.model != target.model for load in run.loads)]


def mean(values: dict[Load, float]) -> float:
    return float(np.mean(list(values.values())))
