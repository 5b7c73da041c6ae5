"""Reproduce Figure 12: L2 utilisation by share, which InSS takes to be a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.predictors import analytic
from cotenant.predictors.linear import L2
from cotenant.published import v100
from experiments.inss import lines
from experiments.inss.lines import MODELS, Row
from experiments.parallel import Options

TITLE = "L2 utilisation by share (InSS, Figure 12)"
BATCH = 4
PAPER = "a line"


def run(options: Options) -> list[Row]:
    """Fit as the predictor does, to all batches; show one of them."""
    profiles = v100.profiles()
    rows = []
    for name in MODELS:
        profile = profiles[name, v100.KIND]
        alone = analytic.measured(profile)
        rows += [
            Row(
                what="L2 utilisation, %",
                line=name,
                x=point.share / 10,
                measured=point.features[L2],
                fitted=100 * alone.l2(point.share),
                paper=PAPER,
            )
            for point in profile.points
            if point.batch == BATCH and L2 in point.features
        ]
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    lines.plot(rows, path, xlabel="share, %", title=f"InSS, Figure 12 (rings: batches of {BATCH})")
