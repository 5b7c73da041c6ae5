"""Reproduce Figure 6.10: the throughput that models lose beside each other on the V100, in percent.

Of the Offline scenario. The text has one example, which it calls Onnx Mobilenet and whose picture (b) is of Onnx
ResNet50: 22 queries/s alone, almost 15 beside Onnx Mobilenet, more than 20 beside TensorFlow ResNet50.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.parallel import Options
from experiments.thesis.colocated import Row, plot_lost, rows_of

TITLE = "interference on a V100 (NTUA thesis, Figure 6.10)"


def run(options: Options) -> list[Row]:
    return rows_of("V100")


def plot(rows: Sequence[Row], path: Path) -> None:
    plot_lost(rows, path, "NTUA thesis, Figure 6.10: two models on a V100")
