"""Train the policy of a planner that learns: `cotenant train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import typer

from cotenant.cli.loading import write_file
from cotenant.cli.options import Json, Seed
from cotenant.cli.output import StepProgress, aside, console, print_written, progress_bars, show_json
from cotenant.config import read_problem
from cotenant.config.toml import check_exclusive
from cotenant.errors import ConfigError, PlanError
from cotenant.render.figure import COLOURS, check_drawable, figure_for, save_figure

if TYPE_CHECKING:
    from cotenant.planners.inss.sac import SacOptions
    from cotenant.planners.inss.training import Episode

TRAINED = ("inss", "inss-plus")
DONE = {"inss": ("sustained", "late or dropped"), "inss-plus": ("served", "unserved")}
LAST = 20  # episodes that the summary averages


def train(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM", help="Problem file (TOML).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the policy into this JSON file.")],
    planner: Annotated[str, typer.Option("--planner", "-p", help="Planner to train for: inss or inss-plus.")] = "inss",
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="Episodes to train for.")] = 400,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decisions per episode, one per second.")] = 20,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            min=1e-7,
            max=1.0,
            help="Learning rate of all networks. Default: 0.0001 of inss, as published, and 0.001 of inss-plus.",
        ),
    ] = None,
    low: Annotated[float, typer.Option("--low", min=0.0, help="Lowest rates, as a multiple of the problem's.")] = 0.25,
    high: Annotated[
        float, typer.Option("--high", min=0.0, help="Highest rates, as a multiple of the problem's.")
    ] = 1.25,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw the convergence of the training into this .svg, .png or .pdf file."
        ),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Train the policy of planner inss or inss-plus on a problem. Takes minutes on one core.

    A policy of inss is for the devices, models and rates of the problem. One of inss-plus works for any; --steps,
    --low and --high have no effect on it.
    """
    if planner not in TRAINED:
        raise ConfigError(f"--planner {planner}: not trainable; use {check_exclusive(TRAINED)}")
    if low > high:
        raise ConfigError(f"--low {low:g} is above --high {high:g}; give the lowest multiple of the rates first")
    if plot is not None:
        check_drawable(plot)
    asked = read_problem(problem)
    try:
        from cotenant.planners.inss import plus_training
        from cotenant.planners.inss.sac import SacOptions
        from cotenant.planners.inss.training import BATCH, TrainingOptions
        from cotenant.planners.inss.training import train as train_inss
    except ModuleNotFoundError as error:
        raise ConfigError(f"training needs {error.name}: pip install 'cotenant[learn]'") from None
    from cotenant.planners.inss.cluster import Cluster

    if asked.applications:
        raise ConfigError(
            f"{problem}: has applications, whose stages have no rates of their own; train for a problem of models alone"
        )
    if planner == "inss" and episodes * steps < BATCH:
        raise ConfigError(
            f"--episodes {episodes} --steps {steps}: {episodes * steps} decisions are too few to learn from; the first"
            f" update needs {BATCH}"
        )
    curve: list[Episode] = []
    with progress_bars("training") as bars:
        progress = StepProgress(bars)
        progress("episodes", 0, episodes)

        def on_episode(episode: Episode) -> None:
            curve.append(episode)
            progress("episodes", len(curve), episodes)

        try:
            if planner == "inss-plus":
                learner = _at_rate(plus_training.LEARNER, learning_rate)
                plus_options = plus_training.PlusOptions(episodes=episodes, seed=seed, learner=learner)
                policy = plus_training.train([asked], plus_options, on_episode)
            else:
                cluster = Cluster.of(asked)
                rates = np.array([asked.rates.get(name, 0.0) for name in cluster.models])
                learner = _at_rate(SacOptions(), learning_rate)
                options = TrainingOptions(episodes=episodes, steps=steps, seed=seed, learner=learner)
                policy = train_inss(cluster, (low * rates).tolist(), (high * rates).tolist(), options, on_episode)
        except PlanError as error:
            raise ConfigError(f"{problem}: {error}") from None
    write_file(output, policy.to_json().decode() + "\n")
    if plot is not None:
        save_curve(curve, planner, plot)
        print_written(plot)
    if json:
        show_json(curve)
    else:
        last = curve[-LAST:]
        console.print(
            f"{len(curve)} episodes, {policy.updates} updates; over the last {len(last)} episodes: reward"
            f" {_mean(last, 'reward'):.3g}, {_mean(last, 'throughput'):.4g} requests/s {DONE[planner][0]},"
            f" {100 * _mean(last, 'violated'):.2g} % {DONE[planner][1]}",
            highlight=False,
            soft_wrap=True,
        )
    aside.print(
        f'to plan with it: policy = "{output}" in the problem, and --planner {planner}',
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _at_rate(learner: SacOptions, learning_rate: float | None) -> SacOptions:
    return learner if learning_rate is None else msgspec.structs.replace(learner, learning_rate=learning_rate)


def _mean(episodes: Sequence[Episode], what: str) -> float:
    return fmean(getattr(episode, what) for episode in episodes)


def save_curve(curve: Sequence[Episode], planner: str, path: Path) -> None:
    """Draw reward, requests/s and what is missed by episode. Raises ConfigError as `save_figure` does."""
    figure = figure_for(path, 7, 6)
    panels = figure.subplots(3, 1, sharex=True)
    numbers = [episode.number + 1 for episode in curve]
    for axes, colour, (what, label, factor) in zip(
        panels,
        COLOURS,
        (
            ("reward", "reward", 1),
            ("throughput", f"{DONE[planner][0]}, requests/s", 1),
            ("violated", f"{DONE[planner][1]}, %", 100),
        ),
        strict=False,
    ):
        axes.plot(numbers, [factor * getattr(episode, what) for episode in curve], color=colour, linewidth=1)
        axes.set_ylabel(label, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("episode", fontsize=8)
    save_figure(figure, path)
