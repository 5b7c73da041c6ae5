"""Reproduce Figure 9.5: the distribution of distances for high objectives, by scheduler (simulated).

High objectives: 0.8 to 1.2 times what a workload reaches on a whole GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.parallel import Options
from experiments.thesis import paper
from experiments.thesis.distributions import Row, plot_distributions, rows_of

TITLE = "distances for high objectives (NTUA thesis, Figure 9.5)"

PODS = 60  # of the paper's experiments with high objectives


def run(options: Options) -> list[Row]:
    """Simulate the experiments. every: of the 20 seeds, take one in so many."""
    met = {name: 100 * (1 - below / PODS) for name, below in paper.FIG95_BELOW.items()}
    return rows_of(options, "high", met, paper.FIG95_SHORT)


def plot(rows: Sequence[Row], path: Path) -> None:
    plot_distributions(rows, path, "NTUA thesis, Figure 9.5: high objectives")
