"""Read what models of the thesis lose beside each other on one GPU, and draw it, for Figures 6.9 and 6.10."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.render.figure import figure_for, save_figure
from experiments.data import thesis
from experiments.thesis.models import by_model, short_name


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a model beside another (or itself), as medians over the runs of their workloads; some runs are outliers.

    alone, together: queries/s; lost_percent: of those alone; runs: that were published, of up to nine.
    """

    model: str
    beside: str
    alone: float | None
    together: float | None
    lost_percent: float | None
    runs: int


def rows_of(gpu: str) -> list[Row]:
    """Return all pairs of models on a GPU, "A30" or "V100". The result is deterministic."""
    names, alone, lost = thesis.alone_and_lost(gpu)
    groups = by_model(names)
    rows = []
    for model, victims in groups.items():
        for beside, others in groups.items():
            ran = [(i, j) for i in victims for j in others if not np.isnan(lost[i, j])]
            before = np.array([alone[i] for i, _ in ran])
            gone = np.array([lost[pair] for pair in ran])
            rows.append(
                Row(
                    model=model,
                    beside=beside,
                    alone=float(np.median(before)) if ran else None,
                    together=float(np.median(before - gone)) if ran else None,
                    lost_percent=float(100 * np.median(gone / before)) if ran else None,
                    runs=len(ran),
                )
            )
    return rows


def plot_lost(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the losses in percent as a matrix, victims by co-located models."""
    models = list(dict.fromkeys(row.model for row in rows))
    lost = np.full((len(models), len(models)), np.nan)
    for row in rows:
        if row.lost_percent is not None:
            lost[models.index(row.model), models.index(row.beside)] = row.lost_percent
    figure = figure_for(path, 7.2, 5.2)
    axes = figure.subplots()
    image = axes.imshow(lost, cmap="YlOrRd", vmin=0, vmax=60)
    for (i, j), percent in np.ndenumerate(lost):
        text = "not run" if np.isnan(percent) else f"{percent:.1f}"
        dark = not np.isnan(percent) and percent > 40
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    labels = [short_name(model) for model in models]
    axes.set_xticks(range(len(models)), labels, fontsize=7)
    axes.set_yticks(range(len(models)), labels, fontsize=7)
    axes.set_xlabel("co-located model", fontsize=8)
    axes.set_ylabel("model", fontsize=8)
    figure.colorbar(image, label="queries/s lost, %", shrink=0.8)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
