"""Figure 7.1: how far filled gaps are off, by how many of a row's six entries are hidden, for each way to fill them.

One row at a time loses entries, the others stay whole. The thesis tries ten choices of entries for each row and number,
at random; here all choices are tried, so that what stands here is what its numbers would come to with more tries. Its
program asks for the likeness of two columns and takes that of the rows with their numbers; that is here `SVD, as
published`. Of its sampling, `standard_error` is what ten tries a row leave.
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
from experiments.parallel import Options, spread

TITLE = "gaps filled by likeness and by regression (NTUA thesis, Figure 7.1)"
TRIES = 10  # of the thesis, for each row and number of hidden entries

WAYS = {
    "SVD, as published": lambda values: svd.predict_by_similarity(values, lambda latent: latent),
    "SVD": svd.predict_by_similarity,
    "regression": svd.predict_by_regression,
    "mix": svd.complete,
}
PUBLISHED = {"SVD, as published": "svd", "regression": "imputer"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Mean squared errors, in (queries/s)². within: published and ours, in standard errors of the thesis' sampling."""

    hidden: int
    way: str
    mse: float
    paper: float | None
    standard_error: float
    within: float | None


class Task(msgspec.Struct, frozen=True):
    """Of a row, which entries are hidden."""

    row: int
    hidden: tuple[int, ...]


def run(options: Options) -> list[Row]:
    """every: of the choices of entries, one in so many."""
    _, _, values = thesis.alone()
    count, columns = values.shape
    tasks = [
        Task(row, hidden)
        for number in range(1, columns)
        for row in range(count)
        for hidden in list(itertools.combinations(range(columns), number))[:: options.every]
    ]
    found = spread(errors, tasks, options, "choices of gaps")
    said = thesis.published()
    rows = []
    for number in range(1, columns):
        for place, way in enumerate(WAYS):
            by_row = [
                [
                    error[place]
                    for task, error in zip(tasks, found, strict=True)
                    if task == Task(row, task.hidden) and len(task.hidden) == number
                ]
                for row in range(count)
            ]
            mse = float(np.mean([np.mean(each) for each in by_row]))
            spread_of = float(np.sqrt(sum(np.var(each) / TRIES for each in by_row)) / count)
            paper = float(np.mean(said[number][PUBLISHED[way]])) if way in PUBLISHED else None
            rows.append(
                Row(
                    hidden=number,
                    way=way,
                    mse=mse,
                    paper=paper,
                    standard_error=spread_of,
                    within=abs(paper - mse) / spread_of if paper is not None and spread_of else None,
                )
            )
    return rows


def errors(task: Task) -> tuple[float, ...]:
    """Mean squared, of each way."""
    _, _, whole = thesis.alone()
    given = whole.copy()
    given[task.row, list(task.hidden)] = np.nan
    gaps = np.isnan(given)
    return tuple(float(((fill(given) - whole)[gaps] ** 2).mean()) for fill in WAYS.values())


def plot(rows: Sequence[Row], path: Path) -> None:
    figure = figure_for(path, 7.5, 4)
    axes = figure.subplots()
    for colour, way in zip(COLOURS, WAYS, strict=False):
        mine = [row for row in rows if row.way == way]
        hidden = [row.hidden for row in mine]
        style = "--" if way == "mix" else "-"
        axes.plot(hidden, [row.mse for row in mine], style, color=colour, marker="o", markersize=4, label=way)
        said = [(row.hidden, row.paper) for row in mine if row.paper is not None]
        if said:
            at, heights = zip(*said, strict=True)
            axes.scatter(at, heights, color=colour, marker="x", s=60, label=f"{way}, paper", zorder=3)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row.hidden for row in rows}))
    axes.set_xlabel("hidden entries, of six", fontsize=8)
    axes.set_ylabel("mean squared error, (queries/s)²", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    figure.suptitle("NTUA thesis, Figure 7.1", fontsize=11)
    save_figure(figure, path)
