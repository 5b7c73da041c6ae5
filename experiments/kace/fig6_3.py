"""Reproduce Figure 6.3: KACE and other policies, on splits with about 40 training pairs.

`published` is the mean over their run, `reported` the report's text. "Best rule" uses the best rule for each target in
hindsight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.published import kace
from experiments.kace import paper, protocol
from experiments.kace.fig6_1 import mean
from experiments.kace.fig6_2 import published
from experiments.kace.runs import Training, effort, outcome
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "throughput sums over Oracle's, by policy (KACE, Figure 6.3)"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a result. relative: averaged over targets and seeds; deviation: of the mean over seeds."""

    policy: str
    relative: float
    deviation: float
    published: float | None
    reported: float | None


def run(options: Options) -> list[Row]:
    trainings = {
        "KACE": [Training("lr", 0, seed) for seed in kace.SEEDS],
        "KACE, scaled by training": [Training("lr", 0, seed, scaled_by_training=True) for seed in kace.SEEDS],
        "Xu et al.": [Training("rf", effort("rf", options), seed, features="hotcloud") for seed in kace.SEEDS],
    }
    tasks = [task for each in trainings.values() for task in each]
    found = dict(zip(tasks, run_tasks(outcome, tasks, options, "trainings"), strict=True))
    by_policy = {"Oracle": [1.0] * len(kace.SEEDS)}
    by_policy |= {policy: [found[task].mean for task in each] for policy, each in trainings.items()}
    tests = [kace.split(3, seed)[1] for seed in kace.SEEDS]
    by_policy["Best rule"] = [protocol.mean(protocol.best_rule(test)) for test in tests]
    for name, policy in protocol.RULES.items():
        by_policy[name] = [protocol.mean(protocol.relative(test, policy)) for test in tests]
    by_policy["Random"] = [protocol.mean(protocol.random_choice(test)) for test in tests]
    reported = {
        "KACE": published("KACE"),
        "Xu et al.": published("hotcloud"),
        "MEMCAP": published("KACE", "memcap"),
        "SM%": published("KACE", "sm%"),
        "MEM%": published("KACE", "mem%"),
        "Random": published("KACE", "random"),
    }
    return [
        Row(
            policy=policy,
            relative=mean(values),
            deviation=float(np.std(values)),
            published=reported.get(policy),
            reported=paper.FIG63.get(policy),
        )
        for policy, values in by_policy.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(
            panel="mean over 21 targets, 5 splits",
            group=row.policy.replace(", ", ",\n"),
            system=system,
            origin=origin,
            height=height,
        )
        for row in rows
        for system, origin, height in (("chosen", "cotenant", row.relative), ("chosen", "published", row.published))
        if height is not None
    ]
    grouped(path, bars, lines=[], ylabel="throughput sum over Oracle's", title="KACE, Figure 6.3")
