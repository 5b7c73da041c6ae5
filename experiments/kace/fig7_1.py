"""Reproduce Figure 7.1: sets of three models, by technique and size of the training set.

400 of the report's 560 sets were published. Splits are random and not theirs: those of five seeds. The relative sum is
that of the set with the highest prediction in the test set over the highest measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.published import kace
from cotenant.render.figure import figure_for, save_figure
from experiments.kace import line_plots, paper, protocol
from experiments.kace.fig6_1 import mean
from experiments.kace.runs import Training, effort, error_of, policy_of
from experiments.parallel import Options, run_tasks

TITLE = "three co-located models: prediction, and choice of the best set (KACE, Figure 7.1)"
PERCENT = (10, 30, 50, 70)


class Task(msgspec.Struct, frozen=True):
    technique: str
    effort: int
    percent: int
    seed: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a result.

    mse, r2: of standardised sums; relative: of the chosen set; reported_mse: in the report, over all techniques.
    """

    technique: str
    percent: int
    mse: float
    reported_mse: str | None
    r2: float
    relative: float


def run(options: Options) -> list[Row]:
    tasks = [
        Task(technique, effort(technique, options), percent, seed)
        for technique in paper.TECHNIQUES
        for percent in PERCENT
        for seed in kace.SEEDS
    ]
    results = run_tasks(outcome, tasks, options, "trainings")
    by_technique: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for task, result in zip(tasks, results, strict=True):
        by_technique.setdefault((task.technique, task.percent), []).append(result)
    return [
        Row(
            technique=paper.TECHNIQUES[technique],
            percent=percent,
            mse=mean([mse for mse, _, _ in values]),
            reported_mse="> 0.2" if percent == PERCENT[0] else "around 0.15",
            r2=mean([r2 for _, r2, _ in values]),
            relative=mean([relative for _, _, relative in values]),
        )
        for (technique, percent), values in by_technique.items()
    ]


def outcome(task: Task) -> tuple[float, float, float]:
    """Train and test; return mean squared error, R², and the chosen set's sum over the best."""
    every = kace.runs(kace.TRIPLES)
    order = np.random.default_rng(task.seed).permutation(len(every))
    count = round(len(every) * task.percent / 100)
    train, test = ([every[i] for i in part] for part in (order[:count], order[count:]))
    policy = policy_of(Training(task.technique, task.effort, task.seed), train)
    mse, measured = error_of(policy, test), protocol.sums(test)
    chosen = float(measured[int(np.argmax(policy(test)))] / measured.max())
    return mse, 1 - mse * len(test) / (len(test) - 1), chosen


def plot(rows: Sequence[Row], path: Path) -> None:
    figure = figure_for(path, 10, 3.4)
    panels = figure.subplots(1, 3)
    fields = (("r2", "R²"), ("mse", "mean squared error"), ("relative", "sum of the chosen set over the best"))
    for axes, (field, label) in zip(panels, fields, strict=True):
        line_plots.draw(axes, rows, field, x="training sets, %", y=label)
    panels[1].axhline(paper.MSE_THREE, color="#444444", linestyle="--", linewidth=1, zorder=0)
    panels[0].legend(fontsize=7, frameon=False)
    figure.suptitle("KACE, Figure 7.1 (dashed: report, larger training sets)", fontsize=11)
    save_figure(figure, path)
