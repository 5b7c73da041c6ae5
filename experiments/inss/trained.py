"""Train InSS' policies for its figures, and keep them in build/inss: one that is there is not trained again.

Trainings have 200 episodes of 20 steps rather than 1,500 of 200, so that each of many takes a minute on one core. At
table 1's learning rate that is enough: with eight models on four devices and seed 10, which no figure uses, the
likeliest actions for 40 states were the same after 200 as after 500.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from cotenant.planners import Problem
from cotenant.planners.inss import plus_training
from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.moves import FEATURES
from cotenant.planners.inss.plus_training import PlusOptions
from cotenant.planners.inss.sac import SacOptions
from cotenant.planners.inss.training import Episode, TrainingOptions, train
from cotenant.planners.policy import Policy
from cotenant.predictors import NoInterference
from experiments.inss import cluster
from experiments.inss.generated import generated

FOLDER = Path(__file__).resolve().parents[2] / "build" / "inss"
EPISODES, STEPS = 200, 20
LEARNING_RATE = 1e-4  # table 1's


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one training. interference: whether latencies have it (InSS), or not (InSS-ni)."""

    seed: int
    models: tuple[str, ...] = cluster.SIX
    devices: int = cluster.DEVICES
    learning_rate: float = LEARNING_RATE
    interference: bool = True
    episodes: int = EPISODES
    steps: int = STEPS


class Trained(msgspec.Struct, frozen=True):
    policy: Policy
    curve: list[Episode]


def problem_of(training: Training) -> Problem:
    asked = cluster.problem(training.models, training.devices)
    return asked if training.interference else msgspec.structs.replace(asked, interference=NoInterference())


def trained(training: Training) -> Trained:
    """Return a policy and how it converged, from the file of an earlier run where there is one."""
    asked = problem_of(training)
    view = Cluster.of(asked)
    file = _file([training, view.fleet_hash, view.models_hash])
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Trained)
    options = TrainingOptions(
        episodes=training.episodes,
        steps=training.steps,
        seed=training.seed,
        learner=SacOptions(learning_rate=training.learning_rate),
    )
    curve: list[Episode] = []
    low, high = cluster.scaled(asked, "low"), cluster.scaled(asked, "high")
    result = Trained(train(view, low, high, options, curve.append), curve)
    _keep(result, file)
    return result


class PlusTraining(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one training of `inss-plus`, on generated fleets."""

    seed: int
    fleets: int = 10
    episodes: int = 500


def trained_plus(training: PlusTraining) -> Trained:
    """Return a policy of `inss-plus` and how it converged, from the file of an earlier run where there is one."""
    file = _file([training, FEATURES])
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Trained)
    curve: list[Episode] = []
    options = PlusOptions(episodes=training.episodes, seed=training.seed)
    fleets = [generated(training.fleets * training.seed + number) for number in range(training.fleets)]
    result = Trained(plus_training.train(fleets, options, curve.append), curve)
    _keep(result, file)
    return result


def _file(identity: object) -> Path:
    return FOLDER / f"{hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]}.json"


def _keep(result: Trained, file: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".new")
    part.write_bytes(msgspec.json.encode(result))
    part.replace(file)
