"""Figures of KACE are made of many trainings: each is a task, so that several processes can share them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from cotenant.predictors import Load
from cotenant.predictors.kernels import ColocatedRun
from experiments.data import kace
from experiments.kace import protocol
from experiments.parallel import Options

# Settings that a forest tries, and seconds that models are searched for. KACE: 100 settings, of more trees, and 60 s.
EFFORT = {"lr": 0, "ridge": 0, "rf": 4, "nn": 0, "automl": 5}
FULL = {"lr": 0, "ridge": 0, "rf": 100, "nn": 0, "automl": 60}


def effort(technique: str, options: Options) -> int:
    return (FULL if options.full else EFFORT)[technique]


class Training(msgspec.Struct, frozen=True):
    """As published unless `proper`. pairs: of which set of runs; occurrences: of a split of pairs, else a fraction."""

    technique: str
    effort: int
    seed: int
    occurrences: int = 3
    features: str = "KACE"
    proper: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """mse, r2: of standardised sums, mean over targets; relative: of each target; seconds: to train."""

    trained_on: int
    mse: float
    r2: float
    seconds: float
    relative: dict[str, float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.relative.values())))


def outcome(training: Training) -> Outcome:
    """On one of their splits."""
    train, test = kace.split(training.occurrences, training.seed, training.features)
    started = time.perf_counter()
    policy = policy_of(training, train)
    took = time.perf_counter() - started
    errors, explained = [], []
    for target in protocol.workloads(test):
        mine = [run for run in test if target in run.loads]
        if len(mine) > 1:
            error = error_of(policy, mine, proper=training.proper)
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


def error_of(policy: protocol.Policy, runs: Sequence[ColocatedRun], *, proper: bool = False) -> float:
    """Mean squared, of sums standardised by their own statistics, as the published policies answer anyway."""
    measured, predicted = protocol.sums(runs), policy(runs)
    if proper:
        predicted = (predicted - measured.mean()) / measured.std(ddof=1)
    return float(((predicted - protocol.own_scale(measured)) ** 2).mean())


def policy_of(training: Training, train: list[ColocatedRun]) -> protocol.Policy:
    if training.proper:
        return protocol.Proper(train, training.technique, whole=False, effort=training.effort, seed=training.seed)
    return protocol.AsPublished(
        train, training.technique, features=training.features, effort=training.effort, seed=training.seed
    )


class Unseen(msgspec.Struct, frozen=True):
    """A target whose model was never trained on, at any batch. three: of sets of three."""

    technique: str
    effort: int
    target: Load
    three: bool = False
    features: str = "KACE"
    proper: bool = False
    seed: int = 0


def unseen(task: Unseen) -> float:
    every = kace.runs(kace.TRIPLES if task.three else kace.ALL)
    training = Training(task.technique, task.effort, task.seed, features=task.features, proper=task.proper)
    policy = policy_of(training, protocol.unseen(every, task.target))
    return protocol.relative(every, policy, [task.target])[task.target]
