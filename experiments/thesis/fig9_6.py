"""Reproduce Figure 9.6: the distribution of distances for low objectives, by scheduler (simulated).

Low objectives: 0.8 to 1.2 times what a workload reaches on a quarter of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.parallel import Options
from experiments.thesis import paper
from experiments.thesis.distributions import Row, plot_distributions, rows_of

TITLE = "distances for low objectives (NTUA thesis, Figure 9.6)"


def run(options: Options) -> list[Row]:
    """Simulate the experiments. every: of the 20 seeds, take one in so many."""
    met = paper.FIG96_MET
    return rows_of(options, "low", met, {})


def plot(rows: Sequence[Row], path: Path) -> None:
    plot_distributions(rows, path, "NTUA thesis, Figure 9.6: low objectives")
