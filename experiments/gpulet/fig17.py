"""Figure 17: the largest rates of two applications and five groups of models on four GPUs, over an exhaustive search's.

Section 5.2: 92.6 % on average. The groups are Table 4's, all models at the same rate. The applications ask for several
models at once, some more than once, with targets of their own; only the paper's own models can play them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.core.application import Application, Stage
from experiments.gpulet import paper
from experiments.gpulet.max_rates import Group, Row, bars, compared
from experiments.gpulet.model_sets import CASTS
from experiments.gpulet.systems import Way
from experiments.parallel import Options
from experiments.plotting import grouped

TITLE = "largest rates over those of an exhaustive search (gpulet, Figure 17)"

WAYS = (
    Way(name="ideal", who="published", planner="ideal"),
    Way(name="gpulet+int", who="published", planner="elastic"),
    Way(name="ideal", who="cotenant", planner="ideal"),
    Way(name="SBP", who="cotenant", planner="squishy"),
    Way(name="best fit", who="cotenant", planner="bestfit"),
    Way(name="gpulet+int", who="cotenant", planner="elastic"),
    Way(name="geometry", who="cotenant", planner="geometry"),
    Way(name="geometry, free", who="cotenant", planner="geometry", free=True),
)


def run(options: Options) -> list[Row]:
    """Nothing here is left to chance, or to a sample."""
    every = [group for name in options.profiles or CASTS for way in WAYS if way.there for group in groups(name, way)]
    return compared(every, None, paper.FIG17_OF_IDEAL, options)


def groups(name: str, way: Way) -> list[Group]:
    scenarios = [
        Group(name=group, cast=name, way=way, mix=dict.fromkeys(roles, 1.0)) for group, roles in paper.GROUPS.items()
    ]
    if not name.startswith("synthetic"):
        return scenarios
    players = {f"{role}{i}": role for role, count in paper.GAME.items() for i in range(1, count + 1)}
    game = Group(
        name="game",
        cast=name,
        way=way,
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
        cast=name,
        way=way,
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
    grouped(path, bars(rows), lines=lines, ylabel="largest rate over ideal's", title="gpulet, Figure 17")
