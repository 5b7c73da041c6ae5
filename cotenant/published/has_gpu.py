"""Read four image models on a V100-16GB under MPS (KontonGu/HAS-GPU).

A file for each model and share: latencies in ms of batches of 1, 2, 4 and 8 at shares of 5 to 100 %, by the part of
time that a container may use the GPU. Only those with all of it are read. Memory was not measured, nor co-located runs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cotenant.core.profile import Point, Profile
from cotenant.errors import ConfigError
from cotenant.published import lines

KIND = "has-gpu-v100"
SOURCE = "KontonGu+HAS-GPU/internal/controller/graph_features"
MODELS = ("convnext_large", "mobilenet_v3_large", "resnet50", "shufflenet_v2_x0_5")
SHARES_PCT = range(5, 101, 5)


class _Measured(msgspec.Struct, frozen=True):
    batch: int
    sm: int
    quota: int
    latency: float


class _File(msgspec.Struct, frozen=True):
    profiling_result: list[_Measured]


def profiles(folder: Path | None = None) -> dict[tuple[str, str], Profile]:
    """Return batches of 1 to 8 at shares of 5 to 100 %."""
    return {(model, KIND): Profile(model, KIND, _points(model, folder)) for model in MODELS}


def _points(model: str, folder: Path | None) -> list[Point]:
    points = []
    for percent in SHARES_PCT:
        path = f"{SOURCE}/{model}_{percent}.json"
        text = "".join(line for _, line in lines(path, folder))
        try:
            read = msgspec.json.decode(text, type=_File)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: unexpected content: {error}") from None
        points += [
            Point(share=each.sm * 10, batch=each.batch, latency=each.latency / 1e3, memory=0)
            for each in read.profiling_result
            if each.quota == 100
        ]
    return points
