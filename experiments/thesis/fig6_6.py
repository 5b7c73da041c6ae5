"""Reproduce Figures 6.6a and 6.7: combined queries/s of one, two and four pods of a model on equal parts of the A30.

The thesis' runs (section 6.3) were not published. They are derived from its matrix: pods times what one reaches on its
part, since MIG instances lose next to nothing to each other (section 6.4). What limited pods on the V100 lose to each
other was not published. The text: throughput grows almost linearly in the number of pods. Figure 6.7 shows TensorFlow's
ResNet50 and SSD-MobileNet alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.data import thesis
from experiments.parallel import Options
from experiments.plotting import Bar, grouped
from experiments.thesis.models import by_model, short_name

TITLE = "combined queries per second of several pods of a model (NTUA thesis, Figures 6.6a and 6.7)"

PODS = (1, 2, 4)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold queries/s of one, two and four pods together, the mean of a model's workloads. of_one: four over one."""

    model: str
    one: float
    two: float
    four: float
    of_one: float


def run(options: Options) -> list[Row]:
    """Derive all rows from the published matrix. The result is deterministic."""
    names, columns, rates = thesis.first_configurations()
    rows = []
    for model, workloads in by_model(names).items():
        one, two, four = (float(pods * rates[workloads, columns.index(f"{pods}P_A30")].mean()) for pods in PODS)
        rows.append(Row(model=model, one=one, two=two, four=four, of_one=four / one))
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar("A30", short_name(row.model), f"{pods} pods" if pods > 1 else "1 pod", "derived", height)
        for row in rows
        for pods, height in zip(PODS, (row.one, row.two, row.four), strict=True)
    ]
    grouped(path, bars, lines=[], ylabel="queries/s, all pods", title="NTUA thesis, Figure 6.6a, derived", columns=1)
