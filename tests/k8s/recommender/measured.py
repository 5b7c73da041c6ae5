"""Measurements of three models on one kind of device, where the truth is known: time goes with the inverse of the
share, and each model loses to another what both names say."""

from __future__ import annotations

from cotenant.core.profile import Point, Profile
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample

SECONDS = {"a": 0.002, "b": 0.004, "c": 0.008}
LOSS = {"a": 0.05, "b": 0.10, "c": 0.20}  # that a model causes
SHARES, BATCHES = (250, 500, 1000), (1, 4)


def latency(model: str, share: int, batch: int) -> float:
    return SECONDS[model] * (0.5 + batch / 2) * 1000 / share


def profile(model: str, *, without: tuple[tuple[int, int], ...] = ()) -> Profile:
    """without: shares and batches that were not measured."""
    points = [
        Point(share=share, batch=batch, latency=latency(model, share, batch), memory=1 << 30)
        for share in SHARES
        for batch in BATCHES
        if (share, batch) not in without
    ]
    return Profile(model, "gpu", points)


def load(model: str) -> Load:
    return Load(model, "gpu", 4, 500)


def sample(victim: str, other: str) -> Sample:
    alone = latency(victim, 500, 4)
    return Sample(load(victim), (load(other),), alone, alone / (1 - LOSS[other]))


PAIRS = [sample(victim, other) for victim in SECONDS for other in SECONDS]
