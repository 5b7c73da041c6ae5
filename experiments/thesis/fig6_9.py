"""Reproduce Figure 6.9: what models reach beside each other in one partition of the A30.

Of the Offline scenario. The thesis draws queries per second beside each other workload and gives no number in the text:
some are hardly slowed, others "dramatically impaired". Its matrix has what was lost, relative to a quarter of the GPU,
and has no model beside the same model with the same number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.parallel import Options
from experiments.thesis.colocated import Row, plot_lost, rows_of

TITLE = "interference in one partition of an A30 (NTUA thesis, Figure 6.9)"


def run(options: Options) -> list[Row]:
    return rows_of("A30")


def plot(rows: Sequence[Row], path: Path) -> None:
    plot_lost(rows, path, "NTUA thesis, Figure 6.9: two models in one partition of an A30")
