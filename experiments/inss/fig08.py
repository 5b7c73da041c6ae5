"""Reproduce Figure 8: how long a decision takes.

In the paper gpulet and GSLICE take longer than many requests, InSS and iGniter as long as each other; its text gives no
numbers.

InSS' decision is that of a trained policy, with numpy; a wrong one takes as long, so an untrained one is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from cotenant.planners import Problem, load_planner
from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.training import TrainingOptions, train
from cotenant.planners.rates import at_rates
from experiments.inss import cluster
from experiments.inss.evaluation import INSS, PLANNERS, rates_at
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "time of a decision, ms (InSS, Figure 8)"
REPEATS = 7
PAPER = {"gpulet": "longer than many requests", "GSLICE": "longer than many requests", INSS: "about iGniter's"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one system: median and longest ms over moments and repeats, once its tables are filled."""

    system: str
    median_ms: float
    longest_ms: float
    paper: str | None


def run(options: Options) -> list[Row]:
    asked = cluster.problem()
    systems = {name: (load_planner(planner), asked) for name, planner in PLANNERS.items()}
    systems[INSS] = load_planner("inss"), _with_policy(asked, options.seed)
    rows = []
    for name, (planner, problem) in systems.items():
        planner(problem)
        seconds = []
        for number in range(REPEATS):
            moment = at_rates(problem, rates_at(problem, number))
            begun = perf_counter()
            planner(moment)
            seconds.append(perf_counter() - begun)
        rows.append(
            Row(
                system=name,
                median_ms=1e3 * float(np.median(seconds)),
                longest_ms=1e3 * max(seconds),
                paper=PAPER.get(name),
            )
        )
    return rows


def _with_policy(asked: Problem, seed: int) -> Problem:
    """Return the problem with a policy of one short training."""
    low, high = (cluster.scaled(asked, which) for which in ("low", "high"))
    options = TrainingOptions(episodes=1, steps=2, batch=1, seed=seed)
    return msgspec.structs.replace(asked, policy=train(Cluster.of(asked), low, high, options))


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar("median", row.system, "V100s", "cotenant", row.median_ms) for row in rows]
    grouped(path, bars, lines=[], ylabel="ms", title="InSS, Figure 8", columns=1)
