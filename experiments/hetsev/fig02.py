"""Reproduce Figure 2: how much two co-located models on one GPU slow down.

Section 3.2: for up to 90 % of 160 combinations of four models at four batches, latency increases by 18 %. gpulet's
Figure 7 states the same point of its curve, and the measurements that stand in for either are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.gpulet.fig07 import Row, draw, run

__all__ = ["TITLE", "plot", "run"]

TITLE = "slowdown under co-location, in % (HetSev, Figure 2)"


def plot(rows: Sequence[Row], path: Path) -> None:
    draw(rows, path, "HetSev, Figure 2", "paper (V100)")
