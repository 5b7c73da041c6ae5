"""Compute cells of InSS' tables: theirs on RTX 2060s, and ours on the V100 of iGniter's authors by InSS' protocol.

InSS published no profile, so its predictions cannot be recomputed. Its method can: least squares on 16 runs of each
model in isolation (4 batches, 4 shares) and five under co-location. The cells in isolation are among those 16, and a
few of those under co-location among the five: each cell says whether it was fitted to. On the V100 there are only pairs
whose shares add up to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.predictors import Load, analytic
from cotenant.predictors.analytic import Analytic
from cotenant.predictors.samples import Sample
from cotenant.published import v100
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.data import igniter, inss

BATCHES, SHARES = (2, 4, 8, 16), (200, 400, 600, 800)
COLOCATED_RUNS = 5  # of each model
NAMES = {"A": "alexnet", "R": "resnet50", "V": "vgg19", "S": "ssd"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one cell.

    models: the first one's latency, co-located with the others; * marks fixed ones. x: batch, or share in percent.
    fitted: whether the predictor was fitted to this measurement; None where nobody says.
    """

    origin: str
    models: str
    x: int
    observed_ms: float
    predicted_ms: float
    error_percent: float
    fitted: bool | None = None


def published_rows(table: int) -> list[Row]:
    """Return the cells of a table of the paper."""
    return [
        _row("RTX 2060, paper", cell.label, cell.x, cell.observed_ms, cell.predicted_ms) for cell in inss.table(table)
    ]


def measured_row(models: str, x: int, batch: int, share: int, fixed: int, seed: int) -> Row:
    """Predict a cell on the V100.

    models: as in `NAMES`; fixed: batch of the co-located model, which has the rest of the device.
    """
    first, *colocated = models.replace("*", "").split("&")
    victim = Load(NAMES[first], v100.KIND, batch, share)
    others = tuple(Load(NAMES[name], v100.KIND, fixed, WHOLE - share) for name in colocated)
    seen = _observed()[victim, others]
    row = _row("V100, ours", models, x, 1e3 * seen, 1e3 * fitted(seed).latency(victim, others))
    return msgspec.structs.replace(row, fitted=not others or (victim, others) in chosen_pairs(seed))


def _row(origin: str, models: str, x: int, observed: float, predicted: float) -> Row:
    error = 100 * abs(predicted - observed) / observed
    return Row(origin=origin, models=models, x=x, observed_ms=observed, predicted_ms=predicted, error_percent=error)


@functools.cache
def chosen_pairs(seed: int) -> dict[tuple[Load, tuple[Load, ...]], Sample]:
    """Return the runs under co-location to fit to: COLOCATED_RUNS of each model, drawn by the seed."""
    rng = np.random.default_rng(seed)
    by_victim: dict[str, list[Sample]] = {}
    for sample in v100.pairs():
        by_victim.setdefault(sample.victim.model, []).append(sample)
    chosen = [every[i] for every in by_victim.values() for i in rng.choice(len(every), COLOCATED_RUNS, replace=False)]
    return {(sample.victim, sample.colocated): sample for sample in chosen}


@functools.cache
def fitted(seed: int) -> Analytic:
    """Fit the predictor as InSS does, with runs chosen by the seed."""
    profiles = {
        key: Profile(*key, [point for point in each.points if point.batch in BATCHES and point.share in SHARES])
        for key, each in igniter.profiles().items()
    }
    return analytic.fit([*chosen_pairs(seed).values()], profiles)


@functools.cache
def _observed() -> dict[tuple[Load, tuple[Load, ...]], float]:
    """Return measured batch latencies in seconds, in isolation and under co-location."""
    latencies: dict[tuple[Load, tuple[Load, ...]], float] = {
        (sample.victim, sample.colocated): sample.together for sample in v100.pairs()
    }
    return latencies | {(sample.victim, ()): sample.alone for sample in v100.pairs()}


def plot(rows: Sequence[Row], path: Path, *, xlabel: str, title: str) -> None:
    """Draw observations as rings and predictions as lines, with a panel for each origin."""
    origins = list(dict.fromkeys(row.origin for row in rows))
    figure = figure_for(path, 5 * len(origins), 3.8)
    for axes, origin in zip(figure.subplots(1, len(origins), squeeze=False).flat, origins, strict=True):
        mine = [row for row in rows if row.origin == origin]
        for colour, models in zip(COLOURS, dict.fromkeys(row.models for row in mine), strict=False):
            line = [row for row in mine if row.models == models]
            x = [row.x for row in line]
            axes.plot(x, [row.predicted_ms for row in line], color=colour, label=models)
            axes.scatter(x, [row.observed_ms for row in line], facecolors="none", edgecolors=colour, s=36)
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(which="both", labelsize=8)
        axes.set_xlabel(xlabel, fontsize=8)
        axes.set_ylabel("latency of a batch, ms", fontsize=8)
        axes.set_title(f"{origin}: rings observed, lines predicted", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
