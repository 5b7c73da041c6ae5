"""Reproduce Figure 6.1: queries per second of each model on a whole, half and quarter of both GPUs.

The published matrix, in its first version, has three workloads of each model; a model's number here is their mean. The
thesis says that throughput falls with the part, that small models lose less, and that some come within 1 % of the
optimum on a part of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.data import thesis
from experiments.parallel import Options
from experiments.plotting import Bar, grouped
from experiments.thesis.models import by_model, short_name

TITLE = "queries per second by configuration (NTUA thesis, Figure 6.1)"

GPUS = ("A30", "V100")
PARTS = {"whole": "1P", "half": "2P", "quarter": "4P"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a model's queries/s on one GPU, and those of a half and a quarter in percent of the whole's."""

    gpu: str
    model: str
    whole: float
    half: float
    quarter: float
    half_percent: float
    quarter_percent: float


def run(options: Options) -> list[Row]:
    """Read the published matrix. The result is deterministic."""
    names, columns, values = thesis.first_configurations()
    rows = []
    for gpu in GPUS:
        for model, indices in by_model(names).items():
            rates = {part: float(values[indices, columns.index(f"{cut}_{gpu}")].mean()) for part, cut in PARTS.items()}
            rows.append(
                Row(
                    gpu=gpu,
                    model=model,
                    **rates,
                    half_percent=100 * rates["half"] / rates["whole"],
                    quarter_percent=100 * rates["quarter"] / rates["whole"],
                )
            )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.gpu, short_name(row.model), part, "measured", getattr(row, part)) for row in rows for part in PARTS]
    grouped(path, bars, lines=[], ylabel="queries/s", title="NTUA thesis, Figure 6.1", columns=1)
