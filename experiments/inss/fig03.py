"""Reproduce Figures 3 and 4: latency and throughput of one request by share. In the paper more than 60 % gains ResNet50
little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cotenant.published import v100
from experiments.inss import lines
from experiments.inss.lines import MODELS, Row
from experiments.parallel import Options

TITLE = "latency and throughput by share (InSS, Figures 3 and 4)"
PAPER = {"resnet50": "gains little from 60 % on"}


def run(options: Options) -> list[Row]:
    profiles = v100.profiles()
    rows = []
    for what in ("latency of a request, ms", "requests/s"):
        for name in MODELS:
            for point in profiles[name, v100.KIND].points:
                if point.batch == 1:
                    value = 1 / point.latency if what == "requests/s" else 1e3 * point.latency
                    rows.append(Row(what=what, line=name, x=point.share / 10, measured=value, paper=PAPER.get(name)))
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    lines.plot(rows, path, xlabel="share, %", title="InSS, Figures 3 and 4")
