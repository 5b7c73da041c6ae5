"""Reproduce Figure 17: largest rates of two applications and five groups of models on four GPUs, over ideal's.

Section 5.2: 92.6 % on average. The groups are Table 4's, all models at the same rate. Applications invoke several
models, some more than once, with SLOs of their own; only the paper's own models have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.core.application import Application, Stage
from experiments.gpulet import paper
from experiments.gpulet.max_rates import Group, Row, compare_rates, mean_bars
from experiments.gpulet.model_sets import MODEL_SETS
from experiments.gpulet.systems import System
from experiments.parallel import Options
from experiments.plotting import grouped

TITLE = "largest rates over those of an exhaustive search (gpulet, Figure 17)"

SYSTEMS = (
    System(name="ideal", origin="published", planner="ideal"),
    System(name="gpulet+int", origin="published", planner="elastic"),
    System(name="ideal", origin="cotenant", planner="ideal"),
    System(name="SBP", origin="cotenant", planner="squishy"),
    System(name="best fit", origin="cotenant", planner="bestfit"),
    System(name="gpulet+int", origin="cotenant", planner="elastic"),
    System(name="elastic-plus", origin="cotenant", planner="elastic-plus"),
    System(name="geometry", origin="cotenant", planner="geometry"),
    System(name="geometry, free", origin="cotenant", planner="geometry", free=True),
)


def run(options: Options) -> list[Row]:
    """Compare largest rates. The result is deterministic and uses no sampling."""
    every = [
        group
        for name in options.profiles or MODEL_SETS
        for system in SYSTEMS
        if system.available
        for group in groups(name, system)
    ]
    return compare_rates(every, None, paper.FIG17_OF_IDEAL, options)


def groups(name: str, system: System) -> list[Group]:
    scenarios = [
        Group(name=group, model_set=name, system=system, mix=dict.fromkeys(roles, 1.0))
        for group, roles in paper.GROUPS.items()
    ]
    if not name.startswith("synthetic"):
        return scenarios
    players = {f"{role}{i}": role for role, count in paper.GAME.items() for i in range(1, count + 1)}
    game = Group(
        name="game",
        model_set=name,
        system=system,
        mix=dict.fromkeys(players, 1.0),
        roles=players,
        targets=dict.fromkeys(players, paper.GAME_TARGET_MS / 1e3),
        application=Application(
            name="game",
            slo=paper.GAME_TARGET_MS / 1e3,
            stages=tuple(Stage(name=player, model=player) for player in players),
        ),
    )
    traffic = Group(
        name="traffic",
        model_set=name,
        system=system,
        mix=dict.fromkeys(paper.TRAFFIC_TARGETS_MS, 1.0),
        roles={role: role for role in paper.TRAFFIC_TARGETS_MS},
        targets={role: ms / 1e3 for role, ms in paper.TRAFFIC_TARGETS_MS.items()},
        application=Application(
            name="traffic",
            slo=paper.TRAFFIC_TARGET_MS / 1e3,
            stages=(
                Stage(name="ssd", model="ssd"),
                Stage(name="goo", model="goo", after=("ssd",)),
                Stage(name="vgg", model="vgg", after=("ssd",)),
            ),
        ),
    )
    return [game, traffic, *scenarios]


def plot(rows: Sequence[Row], path: Path) -> None:
    lines = [("gpulet+int, paper", paper.FIG17_OF_IDEAL["gpulet+int"])]
    grouped(path, mean_bars(rows), lines=lines, ylabel="largest rate over ideal's", title="gpulet, Figure 17")
