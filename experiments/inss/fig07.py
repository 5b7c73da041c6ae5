"""Reproduce Figure 7: how much longer ResNet50 takes on 40 % of a GPU beside AlexNet or VGG with batches of 4. At most
18.7 % in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.published import v100
from experiments.inss import cells, lines
from experiments.inss.lines import Row
from experiments.parallel import Options

TITLE = "increase of ResNet50's latency under co-location (InSS, Figure 7)"
SHARE, BATCH = 400, 4
PAPER = "at most 18.7 %"


def run(options: Options) -> list[Row]:
    predictor = cells.fitted(options.seed)
    rows = []
    for sample in v100.pairs():
        (other,) = sample.colocated
        if (sample.victim.model, sample.victim.share, other.batch) != ("resnet50", SHARE, BATCH):
            continue
        rows.append(
            Row(
                what="increase of the latency, %",
                line=f"beside {other.model} on 60 %",
                x=sample.victim.batch,
                measured=100 * (sample.slowdown - 1),
                fitted=100 * (predictor.slowdown(sample.victim, sample.colocated) - 1),
                paper=PAPER,
            )
        )
    return sorted(rows, key=lambda row: (row.line, row.x))


def plot(rows: Sequence[Row], path: Path) -> None:
    lines.plot(rows, path, xlabel="ResNet50's batch", title="InSS, Figure 7 (lines: its formula, fitted)")
