"""Read four models on a V100 (EC2 p3.2xlarge) under MPS with TensorRT (icloud-ecnu/igniter, iGniter, TPDS 2022).

Latencies are in ms. Batches from 2 on were measured at 20, 40, 50, 60 and 80 % only; at 10 and 100 %, only batch 1. A
profile's latency of a larger batch on the whole device is therefore that at 80 %. Memory was not measured. Of four
versions of the file this reads the only consistent one: the others hold corrupt interference, or throughputs times 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError
from cotenant.predictors import Load
from cotenant.predictors.linear import DRAM, L2
from cotenant.predictors.samples import Sample
from cotenant.published import alone, lines

KIND = "v100"
SOURCE = "icloud-ecnu+igniter/i-Gniter/Profile/tools/gpulet.config"

_Table = dict[int, dict[int, float]]  # batch → share in percent → value


def profiles(folder: Path | None = None) -> dict[tuple[str, str], Profile]:
    """Return batches 1 to 32, with isolated L2 and DRAM utilisation at each point, in percent."""
    tables: dict[str, dict[str, _Table]] = {}
    for place, subject, what, value in _entries(folder):
        if subject != "interference":
            tables.setdefault(subject, {})[what] = _converted(place, value, _Table)
    return {
        (model, KIND): Profile(
            model,
            KIND,
            [
                Point(
                    share=percent * 10,
                    batch=batch,
                    latency=ms / 1e3,
                    memory=0,
                    features={
                        name: table[what][batch][percent]
                        for name, what in ((L2, "l2cache"), (DRAM, "dram"))
                        if percent in table[what][batch]
                    },
                )
                for batch, row in table["latency"].items()
                for percent, ms in row.items()
            ],
        )
        for model, table in tables.items()
    }


def pairs(folder: Path | None = None) -> list[Sample]:
    """Return 750 pairs of different co-located models, each twice: with either model as the victim."""
    before = alone(profiles(folder).values())
    samples = []
    for place, subject, what, value in _entries(folder):
        if (subject, what) != ("interference", "latency"):
            continue
        for one, other, batch, others, percent, ms, others_ms in _converted(
            place, value, list[tuple[str, str, int, int, int, float, float]]
        ):
            a, b = Load(one, KIND, batch, percent * 10), Load(other, KIND, others, WHOLE - percent * 10)
            samples += [
                Sample(victim, (colocated,), before[victim], together / 1e3)
                for victim, colocated, together in ((a, b, ms), (b, a, others_ms))
            ]
    return samples


def _entries(folder: Path | None) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the entries of every line: {subject: {quantity: value}}."""
    for place, line in lines(SOURCE, folder):
        try:
            entry = msgspec.json.decode(line, type=dict[str, dict[str, Any]])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{place}: unexpected content: {error}") from None
        for subject, tables in entry.items():
            for what, value in tables.items():
                yield place, subject, what, value


def _converted(place: str, value: Any, to: Any) -> Any:
    try:
        return msgspec.convert(value, to, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: unexpected content: {error}") from None
