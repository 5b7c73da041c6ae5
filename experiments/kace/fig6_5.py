"""Reproduce Figure 6.5: targets whose model is absent from training at any batch: seven models at batch 16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.published import kace
from experiments.kace import paper, protocol
from experiments.kace.fig6_1 import mean
from experiments.kace.runs import Unseen, effort, unseen
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "throughput sums over Oracle's, unseen models (KACE, Figure 6.5)"
BATCH = 16


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a result. relative: mean over targets; worst: of the worst target."""

    policy: str
    relative: float
    worst: float
    reported: float | None


def run(options: Options) -> list[Row]:
    every = kace.runs()
    targets = [load for load in protocol.workloads(every) if load.batch == BATCH]
    trainings = {
        "KACE": [Unseen("lr", 0, target) for target in targets],
        "KACE, scaled by training": [Unseen("lr", 0, target, scaled_by_training=True) for target in targets],
        "Xu et al.": [Unseen("rf", effort("rf", options), target, features="hotcloud") for target in targets],
    }
    tasks = [task for each in trainings.values() for task in each]
    found = dict(zip(tasks, run_tasks(unseen, tasks, options, "trainings"), strict=True))
    by_policy = {"Oracle": [1.0]} | {policy: [found[task] for task in each] for policy, each in trainings.items()}
    best = protocol.best_rule(every)
    by_policy["Best rule"] = [best[target] for target in targets]
    for name, policy in protocol.RULES.items():
        by_policy[name] = list(protocol.relative(every, policy, targets).values())
    random = protocol.random_choice(every)
    by_policy["Random"] = [random[target] for target in targets]
    return [
        Row(policy=policy, relative=mean(values), worst=float(np.min(values)), reported=paper.FIG65.get(policy))
        for policy, values in by_policy.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(
            panel="mean over 7 models",
            group=row.policy.replace(", ", ",\n"),
            system="chosen",
            origin=origin,
            height=height,
        )
        for row in rows
        for origin, height in (("cotenant", row.relative), ("published", row.reported))
        if height is not None
    ]
    grouped(path, bars, lines=[], ylabel="throughput sum over Oracle's", title="KACE, Figure 6.5")
