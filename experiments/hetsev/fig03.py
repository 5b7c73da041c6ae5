"""Reproduce Figure 3: whether identical models slow each other more than different ones.

Section 3.2 says that they do, without a number. Here are the A100's pairs, the only ones with identical models: each
run of a model beside itself against those of the same model, batch and share beside the others at the same batch. Of
victims whose latency alone is from other runs (`cotenant/published/a100.py`) none are used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.published import a100
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "slowdown beside an identical model and beside others (HetSev, Figure 3)"


class Row(msgspec.Struct, frozen=True):
    """Hold mean slowdowns in percent, over the same batches and shares. more_often: part of them, in percent, at which
    the identical model slows more than the others do on average."""

    victim: str
    runs: int
    identical: float
    different: float
    more_often: float
    paper: str = "identical more"


def run(options: Options) -> list[Row]:
    """Compare runs by victim. The result is deterministic."""
    runs: dict[tuple[str, int, int, int], dict[str, float]] = defaultdict(dict)
    for sample in a100.matched():
        (other,) = sample.colocated
        at = (sample.victim.model, sample.victim.batch, sample.victim.share, other.batch)
        runs[at][other.model] = 100 * (sample.slowdown - 1)
    pairs = defaultdict(list)
    for (victim, *_), beside in runs.items():
        others = [slower for model, slower in beside.items() if model != victim]
        if victim in beside and others:
            pairs[victim].append((beside[victim], float(np.mean(others))))
    rows = [_row(victim, both) for victim, both in sorted(pairs.items())]
    return [*rows, _row("all", [each for both in pairs.values() for each in both])]


def _row(victim: str, pairs: Sequence[tuple[float, float]]) -> Row:
    identical, different = np.array(pairs).T
    return Row(
        victim,
        len(pairs),
        float(identical.mean()),
        float(different.mean()),
        100 * float((identical > different).mean()),
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar("", row.victim, system, "measured", height)
        for row in rows
        for system, height in (("identical", row.identical), ("different", row.different))
    ]
    grouped(path, bars, lines=[], ylabel="mean slowdown, %", title="HetSev, Figure 3, on an A100")
