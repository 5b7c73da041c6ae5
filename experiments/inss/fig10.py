"""Reproduce Figure 10: the delay in scheduling kernels by the number of models on a GPU, which is a line from two on.

Measured by iGniter's authors on a V100, of one to five copies of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.data import igniter
from experiments.inss import lines
from experiments.inss.lines import Row
from experiments.parallel import Options

TITLE = "scheduling delay by number of models (InSS, Figure 10)"
PAPER = "0 for one, then a line"


def run(options: Options) -> list[Row]:
    delay = igniter.coefficients().delay
    return [
        Row(
            what="added delay of a kernel, µs",
            line="copies of a model on a V100",
            x=models,
            measured=1e6 * seconds,
            fitted=1e6 * delay.of(models),
            paper=PAPER,
        )
        for models, seconds in enumerate(igniter.scheduling_delays(), 1)
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    lines.plot(rows, path, xlabel="models on the GPU", title="InSS, Figure 10")
