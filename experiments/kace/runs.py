"""Train and evaluate KACE's predictors as tasks that several processes can run."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from cotenant.predictors import Load
from cotenant.predictors.kernels import ColocatedRun
from cotenant.published import kace
from experiments.kace import protocol
from experiments.parallel import Options

# Settings that a forest tries, and seconds of model search. KACE: 100 settings of larger forests, and 60 s.
EFFORT = {"lr": 0, "ridge": 0, "rf": 4, "nn": 0, "automl": 5}
FULL = {"lr": 0, "ridge": 0, "rf": 100, "nn": 0, "automl": 60}


def effort(technique: str, options: Options) -> int:
    """Return the effort of a technique: settings tried by a forest, or seconds of search."""
    return (FULL if options.full else EFFORT)[technique]


class Training(msgspec.Struct, frozen=True):
    """Describe a training, as published unless `scaled_by_training`. occurrences: of the split of pairs."""

    technique: str
    effort: int
    seed: int
    occurrences: int = 3
    features: str = "KACE"
    scaled_by_training: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """Hold a result.

    mse, r2: of standardised sums, averaged over targets; relative: of each target; seconds: to train.
    """

    trained_on: int
    mse: float
    r2: float
    seconds: float
    relative: dict[str, float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.relative.values())))


def outcome(training: Training) -> Outcome:
    """Train and evaluate on one of their splits."""
    train, test = kace.split(training.occurrences, training.seed, training.features)
    started = time.perf_counter()
    policy = policy_of(training, train)
    took = time.perf_counter() - started
    errors, explained = [], []
    for target in protocol.workloads(test):
        mine = [run for run in test if target in run.loads]
        if len(mine) > 1:
            error = error_of(policy, mine, scaled_by_training=training.scaled_by_training)
            errors.append(error)
            explained.append(1 - error * len(mine) / (len(mine) - 1))
    chosen = protocol.relative(test, policy)
    return Outcome(
        len(train),
        float(np.mean(errors)),
        float(np.mean(explained)),
        took,
        {kace.workload(load): value for load, value in chosen.items()},
    )


def error_of(policy: protocol.Policy, runs: Sequence[ColocatedRun], *, scaled_by_training: bool = False) -> float:
    """Return the mean squared error of standardised sums, which the published policies predict directly."""
    measured, predicted = protocol.sums(runs), policy(runs)
    if scaled_by_training:
        predicted = (predicted - measured.mean()) / measured.std(ddof=1)
    return float(((predicted - protocol.standardized(measured)) ** 2).mean())


def policy_of(training: Training, train: list[ColocatedRun]) -> protocol.Policy:
    """Train and return a policy."""
    if training.scaled_by_training:
        return protocol.ScaledByTraining(
            train, training.technique, whole=False, effort=training.effort, seed=training.seed
        )
    return protocol.AsPublished(
        train, training.technique, features=training.features, effort=training.effort, seed=training.seed
    )


class Unseen(msgspec.Struct, frozen=True):
    """Describe a target whose model is absent from training at any batch. three: use sets of three."""

    technique: str
    effort: int
    target: Load
    three: bool = False
    features: str = "KACE"
    scaled_by_training: bool = False
    seed: int = 0


def unseen(task: Unseen) -> float:
    """Train without the target's model and return its relative throughput sum."""
    every = kace.runs(kace.TRIPLES if task.three else kace.ALL)
    training = Training(
        task.technique, task.effort, task.seed, features=task.features, scaled_by_training=task.scaled_by_training
    )
    policy = policy_of(training, protocol.unseen(every, task.target))
    return protocol.relative(every, policy, [task.target])[task.target]
