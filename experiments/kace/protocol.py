"""How KACE chooses a co-runner and is judged: by the throughput sum beside the chosen one over the best there is.

`AsPublished` is the published program to the letter. Of the training set it holds a fifth back, and learns from the
rest; features of a target's test runs are brought to one scale by their own statistics, which a scheduler that looks at
one candidate at a time could not do. `Proper` uses the training set's statistics, as the library does.
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
from experiments.data import kace

Values = NDArray[np.float64]
# Of runs that one target could be part of: what each promises.
Policy = Callable[[Sequence[ColocatedRun]], Values]

HELD_BACK, HELD_BACK_SEED = 0.2, 30  # by their trainer, of every training set


def sums(runs: Sequence[ColocatedRun]) -> Values:
    return np.array([sum(run.rows_per_s) for run in runs])


def relative(test: Sequence[ColocatedRun], policy: Policy, targets: Sequence[Load] | None = None) -> dict[Load, float]:
    """Of each target: what the run of highest promise measured over what the best did, in the test set."""
    found = {}
    for target in targets or workloads(test):
        mine = [run for run in test if target in run.loads]
        if mine:
            measured = sums(mine)
            found[target] = float(measured[int(np.argmax(policy(mine)))] / measured.max())
    return found


def at_random(test: Sequence[ColocatedRun]) -> dict[Load, float]:
    """The mean over all runs."""
    found = {}
    for target in workloads(test):
        measured = sums([run for run in test if target in run.loads])
        found[target] = float(measured.mean() / measured.max())
    return found


def workloads(runs: Sequence[ColocatedRun]) -> list[Load]:
    return list(dict.fromkeys(load for run in runs for load in run.loads))


class AsPublished:
    """features: KACE's, or those of Xu et al.; a technique as in `regression`."""

    def __init__(
        self, runs: Sequence[ColocatedRun], technique: str, *, features: str = "KACE", effort: int = 10, seed: int = 0
    ):
        self._sheet = known(features)
        kept, _ = kept_and_held_back(runs)
        self.regressor: Regressor = train(
            technique, own_scale(self._rows(kept)), own_scale(sums(kept)), seed=seed, effort=effort
        )

    def __call__(self, runs: Sequence[ColocatedRun]) -> Values:
        return self.regressor.predict(own_scale(self._rows(runs)))

    def _rows(self, runs: Sequence[ColocatedRun]) -> Values:
        """Without the share, which comes first and is all of the device for everyone."""
        return np.array([self._sheet.together(run.loads)[1:] for run in runs])


class Proper:
    """What the library fits to the same four fifths of a training set, or to all of it."""

    def __init__(
        self, runs: Sequence[ColocatedRun], technique: str = "lr", *, whole: bool, effort: int = 10, seed: int = 0
    ):
        kept = list(runs) if whole else kept_and_held_back(runs)[0]
        self.model: ThroughputSum = fit_sum(kept, kace.profiles(), technique, seed=seed, effort=effort)

    def __call__(self, runs: Sequence[ColocatedRun]) -> Values:
        return np.array(self.model.rows_per_s([run.loads for run in runs]))


def rule(column: str, highest: bool) -> Policy:
    """The run whose models have the most, or the least, of a feature."""

    def policy(runs: Sequence[ColocatedRun]) -> Values:
        place = known().names.index(column)
        return np.array([known().together(run.loads)[place] for run in runs]) * (1 if highest else -1)

    return policy


RULES: dict[str, Policy] = {
    name: rule(*colocate.RULES[of]) for name, of in (("MEMCAP", "memcap"), ("SM%", "sm"), ("MEM%", "mem"))
}


def best_rule(test: Sequence[ColocatedRun]) -> dict[Load, float]:
    """Of each target, by the rule that turns out to be the best one."""
    every = [relative(test, policy) for policy in RULES.values()]
    return {target: max(each[target] for each in every) for target in every[0]}


def kept_and_held_back(runs: Sequence[ColocatedRun]) -> tuple[list[ColocatedRun], list[ColocatedRun]]:
    kept, held_back = train_test_split(list(runs), test_size=HELD_BACK, random_state=HELD_BACK_SEED)
    return kept, held_back


def own_scale(values: Values) -> Values:
    """To mean 0 and deviation 1 by their own statistics; what does not vary becomes 0."""
    spread = values.std(axis=0, ddof=1)
    scaled: Values = (values - values.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return scaled


@functools.cache
def known(features: str = "KACE") -> FeatureTable:
    """Xu et al. know neither throughput nor memory of a model alone."""
    profiles: Profiles = kace.profiles(features)
    return feature_table(profiles, profiles, None if features == "KACE" else tuple(kace.COLUMNS[features].values()))


def unseen(runs: Sequence[ColocatedRun], target: Load) -> list[ColocatedRun]:
    """Those without the target's model, at any batch."""
    return [run for run in runs if all(load.model != target.model for load in run.loads)]


def mean(values: dict[Load, float]) -> float:
    return float(np.mean(list(values.values())))
