"""Reproduce Figures 13 and 14: how training converges, in reward, throughput and violations. By 800 episodes in the
paper, with less than 1 % violated.

Table 1's learner at its learning rate and at ten times that. Points are
interquartile means over seeds of the mean over 20 episodes, with 95 % intervals by the percentile bootstrap over seeds.
`--every N` takes every N-th of five seeds. Trainings are kept in build/inss (experiments/inss/trained.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from cotenant.core.units import show_count
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.inss.evaluation import interquartile_mean, interval
from experiments.inss.trained import LEARNING_RATE, Trained, Training, trained
from experiments.parallel import Options, run_tasks

TITLE = "convergence of the learner (InSS, Figures 13 and 14)"
SEEDS = 5
BIN = 20  # episodes
LEARNERS = {
    f"SAC-D, learning rate {LEARNING_RATE:g} (table 1)": LEARNING_RATE,
    "SAC-D, learning rate 0.001": 1e-3,
}
PAPER = "converges by 800 episodes of 200 steps, below 1 % violated"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold 20 episodes of one learner. episode: the last of them; violated: percent; *_low, *_high: the intervals."""

    learner: str
    seeds: int
    episode: int
    reward: float
    reward_low: float
    reward_high: float
    throughput: float
    violated: float
    violated_low: float
    violated_high: float
    paper: str


def run(options: Options) -> list[Row]:
    seeds = range(options.seed, options.seed + SEEDS, options.every)
    tasks = [Training(seed=seed, learning_rate=rate) for rate in LEARNERS.values() for seed in seeds]
    results = run_tasks(trained, tasks, options, "trainings")
    rows = []
    for n, name in enumerate(LEARNERS):
        rows += rows_of(name, results[n * len(seeds) : (n + 1) * len(seeds)])
    return rows


def rows_of(name: str, runs: Sequence[Trained]) -> list[Row]:
    """Return a row for each 20 episodes of some runs of one learner."""
    rows = []
    for start in range(0, len(runs[0].curve), BIN):
        episodes = [run.curve[start : start + BIN] for run in runs]
        reward, throughput, violated = (
            [fmean(getattr(episode, what) for episode in part) for part in episodes]
            for what in ("reward", "throughput", "violated")
        )
        violated = [100 * each for each in violated]
        reward_low, reward_high = interval(reward)
        violated_low, violated_high = interval(violated)
        rows.append(
            Row(
                learner=name,
                seeds=len(runs),
                episode=start + BIN,
                reward=interquartile_mean(reward),
                reward_low=reward_low,
                reward_high=reward_high,
                throughput=interquartile_mean(throughput),
                violated=interquartile_mean(violated),
                violated_low=violated_low,
                violated_high=violated_high,
                paper=PAPER,
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw reward, violations and throughput by episode, with intervals."""
    figure = figure_for(path, 7.5, 7)
    panels = figure.subplots(3, 1, sharex=True)
    for colour, name in zip(COLOURS, dict.fromkeys(row.learner for row in rows), strict=False):
        own = [row for row in rows if row.learner == name]
        episodes = [row.episode for row in own]
        panels[0].plot(
            episodes, [row.reward for row in own], color=colour, label=f"{name}, {show_count(own[0].seeds, 'seed')}"
        )
        panels[0].fill_between(
            episodes, [row.reward_low for row in own], [row.reward_high for row in own], color=colour, alpha=0.2
        )
        panels[1].plot(episodes, [row.violated for row in own], color=colour)
        panels[1].fill_between(
            episodes, [row.violated_low for row in own], [row.violated_high for row in own], color=colour, alpha=0.2
        )
        panels[2].plot(episodes, [row.throughput for row in own], color=colour)
    panels[1].axhline(1, color="#444444", linestyle="--", linewidth=1, label="paper, in the end: less than this")
    panels[1].set_yscale("log")
    for axes, label in zip(panels, ("reward of a step", "late or dropped, %", "sustained, requests/s"), strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[2].set_xlabel("episode, of 20 steps", fontsize=8)
    for axes in panels[:2]:
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle("InSS, Figures 13 and 14", fontsize=11)
    save_figure(figure, path)
