"""Reproduce Figure 7.1: errors of filled gaps, by the number of hidden entries of a row's six, for each method.

One row at a time loses entries; the others stay complete. The thesis tries ten random choices of entries per row and
number; here all choices are tried, which is the limit of its numbers with more tries. Its program needs the similarity
of two columns but uses that of the rows with the same indices; that is `SVD, as published`. `standard_error` is the
sampling error of ten tries per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.predictors import svd
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.data import thesis
from experiments.parallel import Options, run_tasks

TITLE = "gaps filled by similarity and by regression (NTUA thesis, Figure 7.1)"
TRIES = 10  # of the thesis, for each row and number of hidden entries

METHODS = {
    "SVD, as published": lambda values: svd.predict_by_similarity(values, lambda latent: latent),
    "SVD": svd.predict_by_similarity,
    "regression": svd.predict_by_regression,
    "mix": svd.complete,
}
PUBLISHED = {"SVD, as published": "svd", "regression": "imputer"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold mean squared errors, in (queries/s)².

    z_score: published minus ours, in standard errors of the thesis' sampling.
    """

    hidden: int
    method: str
    mse: float
    paper: float | None
    standard_error: float
    z_score: float | None


class Task(msgspec.Struct, frozen=True):
    """Name a row and its hidden entries."""

    row: int
    hidden: tuple[int, ...]


def run(options: Options) -> list[Row]:
    """Compute errors. every: of the choices of entries of each row, draw one in so many at random."""
    _, _, values = thesis.alone()
    count, columns = values.shape
    rng = np.random.default_rng(options.seed)
    tasks = [
        Task(row, hidden)
        for number in range(1, columns)
        for row in range(count)
        for hidden in _drawn([*itertools.combinations(range(columns), number)], options.every, rng)
    ]
    found = run_tasks(errors, tasks, options, "choices of gaps")
    reported = thesis.published()
    rows = []
    for number in range(1, columns):
        for place, method in enumerate(METHODS):
            by_row = [
                [
                    error[place]
                    for task, error in zip(tasks, found, strict=True)
                    if task == Task(row, task.hidden) and len(task.hidden) == number
                ]
                for row in range(count)
            ]
            mse = float(np.mean([np.mean(each) for each in by_row]))
            standard_error = float(np.sqrt(sum(np.var(each) / TRIES for each in by_row)) / count)
            paper = float(np.mean(reported[number][PUBLISHED[method]])) if method in PUBLISHED else None
            rows.append(
                Row(
                    hidden=number,
                    method=method,
                    mse=mse,
                    paper=paper,
                    standard_error=standard_error,
                    z_score=abs(paper - mse) / standard_error if paper is not None and standard_error else None,
                )
            )
    return rows


def _drawn(choices: Sequence[tuple[int, ...]], every: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return one in `every` of the choices, at least one, in their order."""
    drawn = rng.choice(len(choices), -(-len(choices) // every), replace=False)
    return [choices[index] for index in sorted(drawn)]


def errors(task: Task) -> tuple[float, ...]:
    """Return the mean squared error of each method."""
    _, _, whole = thesis.alone()
    given = whole.copy()
    given[task.row, list(task.hidden)] = np.nan
    gaps = np.isnan(given)
    return tuple(float(((fill(given) - whole)[gaps] ** 2).mean()) for fill in METHODS.values())


def plot(rows: Sequence[Row], path: Path) -> None:
    figure = figure_for(path, 7.5, 4)
    axes = figure.subplots()
    for colour, method in zip(COLOURS, METHODS, strict=False):
        mine = [row for row in rows if row.method == method]
        hidden = [row.hidden for row in mine]
        style = "--" if method == "mix" else "-"
        axes.plot(hidden, [row.mse for row in mine], style, color=colour, marker="o", markersize=4, label=method)
        reported = [(row.hidden, row.paper) for row in mine if row.paper is not None]
        if reported:
            at, heights = zip(*reported, strict=True)
            axes.scatter(at, heights, color=colour, marker="x", s=60, label=f"{method}, paper", zorder=3)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row.hidden for row in rows}))
    axes.set_xlabel("hidden entries, of six", fontsize=8)
    axes.set_ylabel("mean squared error, (queries/s)²", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    figure.suptitle("NTUA thesis, Figure 7.1", fontsize=11)
    save_figure(figure, path)
