"""Describe and draw how far pods are from their objectives, for Figures 9.5 (high) and 9.6 (low)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.render.figure import COLOURS, figure_for, save_figure
from experiments.parallel import Options
from experiments.thesis import evaluation
from experiments.thesis.evaluation import LABELS
from experiments.thesis.schedulers import SCHEDULERS

QUANTILES = (5, 25, 50, 75, 95)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the distribution of achieved less objective over the objective, in percent, of pods that ran.

    met_percent: of all pods, those that failed among them; short: mean of those below, how far; deviation: standard.
    """

    scheduler: str
    met_percent: float
    paper_met: float | None
    short: float
    paper_short: float | None
    mean: float
    deviation: float
    p5: float
    p25: float
    p50: float
    p75: float
    p95: float


def rows_of(options: Options, objectives: str, met: Mapping[str, float], short: Mapping[str, float]) -> list[Row]:
    """Simulate the experiments with these objectives. met, short: the paper's numbers, by scheduler."""
    found = evaluation.experiments(options)
    rows = []
    for name in SCHEDULERS:
        results = [
            each
            for case, many in found.items()
            if (case.scheduler, case.objectives) == (name, objectives)
            for each in many
        ]
        off = 100 * np.array(evaluation.differences(results))
        pods = sum(len(each.outcomes) for each in results)
        at = np.percentile(off, QUANTILES)
        rows.append(
            Row(
                scheduler=name,
                met_percent=100 * (1 - sum(each.violations for each in results) / pods),
                paper_met=met.get(name),
                short=-float(off[off < 0].mean()) if (off < 0).any() else 0.0,
                paper_short=short.get(name),
                mean=float(off.mean()),
                deviation=float(off.std()),
                **{f"p{quantile}": float(value) for quantile, value in zip(QUANTILES, at, strict=True)},
            )
        )
    return rows


def plot_distributions(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw a box for each scheduler: quartiles, with lines to the 5th and 95th percentile."""
    figure = figure_for(path, 6, 3.6)
    axes = figure.subplots()
    boxes = [
        {"med": row.p50, "q1": row.p25, "q3": row.p75, "whislo": row.p5, "whishi": row.p95, "mean": row.mean}
        for row in rows
    ]
    drawn = axes.bxp(
        boxes, showfliers=False, showmeans=True, patch_artist=True, medianprops={"color": "black"}, widths=0.5
    )
    for box, colour in zip(drawn["boxes"], COLOURS, strict=False):
        box.set_facecolor(colour)
    axes.axhline(0, color="#444444", linestyle="--", linewidth=1)
    axes.set_xticks(range(1, len(rows) + 1), [LABELS.get(row.scheduler, row.scheduler) for row in rows], fontsize=8)
    axes.set_ylabel("achieved less objective, % of it", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("quartiles, 5th and 95th percentile; triangles: means", loc="left", fontsize=8)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
