"""Cells of InSS' tables: theirs on RTX 2060s, and ours on the V100 of iGniter's authors, by InSS' own protocol.

No profile of InSS was published, so that its predictions cannot be made again. What can is the method: from 16 runs of
each model alone (4 batches, 4 shares) and five beside others, least squares; then latencies beside others, which no
coefficient was fitted to. Of the V100 there are pairs only, whose shares add up to the device.
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
from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.data import igniter, inss, v100

BATCHES, SHARES = (2, 4, 8, 16), (200, 400, 600, 800)
BESIDE = 5  # runs of each model
NAMES = {"A": "alexnet", "R": "resnet50", "V": "vgg19", "S": "ssd"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """models: the first's latency, beside the others; * those that stay as they are. x: batch, or share in percent."""

    of: str
    models: str
    x: int
    observed_ms: float
    predicted_ms: float
    error_percent: float


def theirs(table: int) -> list[Row]:
    return [
        _row("RTX 2060, paper", cell.label, cell.x, cell.observed_ms, cell.predicted_ms) for cell in inss.table(table)
    ]


def ours(models: str, x: int, batch: int, share: int, fixed: int, seed: int) -> Row:
    """models as in `NAMES`; fixed: the batch of the neighbour, which has the rest of the device."""
    first, *beside = models.replace("*", "").split("&")
    victim = Load(NAMES[first], v100.KIND, batch, share)
    others = tuple(Load(NAMES[name], v100.KIND, fixed, WHOLE - share) for name in beside)
    seen = _observed()[victim, others]
    return _row("V100, ours", models, x, 1e3 * seen, 1e3 * fitted(seed).latency(victim, others))


def _row(of: str, models: str, x: int, observed: float, predicted: float) -> Row:
    error = 100 * abs(predicted - observed) / observed
    return Row(of=of, models=models, x=x, observed_ms=observed, predicted_ms=predicted, error_percent=error)


@functools.cache
def fitted(seed: int) -> Analytic:
    rng = np.random.default_rng(seed)
    profiles = {
        key: Profile(*key, [point for point in each.points if point.batch in BATCHES and point.share in SHARES])
        for key, each in igniter.profiles().items()
    }
    by_victim: dict[str, list[Sample]] = {}
    for sample in v100.pairs():
        by_victim.setdefault(sample.victim.model, []).append(sample)
    chosen = [every[i] for every in by_victim.values() for i in rng.choice(len(every), BESIDE, replace=False)]
    return analytic.fit(chosen, profiles)


@functools.cache
def _observed() -> dict[tuple[Load, tuple[Load, ...]], float]:
    """Seconds of a batch alone, and beside a neighbour."""
    found: dict[tuple[Load, tuple[Load, ...]], float] = {
        (sample.victim, sample.colocated): sample.together for sample in v100.pairs()
    }
    return found | {(sample.victim, ()): sample.alone for sample in v100.pairs()}


def plot(rows: Sequence[Row], path: Path, *, xlabel: str, title: str) -> None:
    """Observed as rings, predicted as lines; what a panel has is of one origin."""
    origins = list(dict.fromkeys(row.of for row in rows))
    figure = figure_for(path, 5 * len(origins), 3.8)
    for axes, origin in zip(figure.subplots(1, len(origins), squeeze=False).flat, origins, strict=True):
        mine = [row for row in rows if row.of == origin]
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
