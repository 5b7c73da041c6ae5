"""Reproduce Table 3: batch latency by share, isolated and co-located; errors up to 3.9 % in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.inss import cells
from experiments.inss.cells import Row
from experiments.parallel import Options

TITLE = "latency by share, observed and predicted (InSS, Table 3)"
BATCH = 4


def run(options: Options) -> list[Row]:
    return cells.published_rows(3) + [
        cells.measured_row(models, share // 10, BATCH, share, BATCH, options.seed)
        for models in ("A", "R&A*", "V&R*", "S&V*")
        for share in cells.SHARES
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    cells.plot(rows, path, xlabel="share, %", title="InSS, Table 3")
