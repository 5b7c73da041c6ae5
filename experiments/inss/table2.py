"""Reproduce Table 2: batch latency by batch size, isolated and co-located; errors up to 3.3 % in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.inss import cells
from experiments.inss.cells import Row
from experiments.parallel import Options

TITLE = "latency by batch, observed and predicted (InSS, Table 2)"
SHARE, FIXED = 400, 4  # ours; the paper: 30 % for each model, co-located batch 4


def run(options: Options) -> list[Row]:
    return cells.published_rows(2) + [
        cells.measured_row(models, batch, batch, SHARE, FIXED, options.seed)
        for models in ("R", "A&R*", "V&R*")
        for batch in cells.BATCHES
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    cells.plot(rows, path, xlabel="batch", title="InSS, Table 2")
