"""Reproduce Figures 1 and 2: latency and throughput of a batch by its size, on a whole GPU. Both grow with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.published import v100
from experiments.inss import lines
from experiments.inss.lines import MODELS, Row
from experiments.parallel import Options

TITLE = "latency and throughput by batch (InSS, Figures 1 and 2)"
SHARE = 800  # the largest at which batches were measured
PAPER = "grows, not linearly"


def run(options: Options) -> list[Row]:
    profiles = v100.profiles()
    rows = []
    for name in MODELS:
        points = [point for point in profiles[name, v100.KIND].points if point.share == SHARE]
        rows += [
            Row(what="latency of a batch, ms", line=name, x=point.batch, measured=1e3 * point.latency, paper=PAPER)
            for point in points
        ]
        rows += [
            Row(what="requests/s", line=name, x=point.batch, measured=point.batch / point.latency, paper=PAPER)
            for point in points
        ]
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    lines.plot(rows, path, xlabel="batch", title="InSS, Figures 1 and 2")
