"""Train InSS' policies for its figures, and keep them in build/inss: one that is there is not trained again.

Trainings have 200 episodes of 20 steps rather than 1,500 of 200, so that each of many takes minutes on one core. With
so few updates the learning rate is ten times that of table 1 where nothing is said.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from cotenant.planners import Problem
from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.sac import SacOptions
from cotenant.planners.inss.training import Episode, TrainingOptions, train
from cotenant.planners.policy import Policy
from cotenant.predictors import NoInterference
from experiments.inss import cluster

FOLDER = Path(__file__).resolve().parents[2] / "build" / "inss"
EPISODES, STEPS = 200, 20
LEARNING_RATE = 1e-3


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one training. interference: whether latencies have it (InSS), or not (InSS-ni)."""

    seed: int
    planner: str = "inss"
    models: tuple[str, ...] = cluster.SIX
    devices: int = cluster.DEVICES
    learning_rate: float = LEARNING_RATE
    interference: bool = True
    episodes: int = EPISODES


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
    identity = msgspec.json.encode([training, view.fleet_hash, view.models_hash])
    file = FOLDER / f"{hashlib.sha256(identity).hexdigest()[:16]}.json"
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Trained)
    options = TrainingOptions(
        planner=training.planner,
        episodes=training.episodes,
        steps=STEPS,
        seed=training.seed,
        learner=SacOptions(learning_rate=training.learning_rate),
    )
    curve: list[Episode] = []
    low, high = cluster.scaled(asked, "low"), cluster.scaled(asked, "high")
    result = Trained(train(view, low, high, options, curve.append), curve)
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".new")
    part.write_bytes(msgspec.json.encode(result))
    part.replace(file)
    return result
