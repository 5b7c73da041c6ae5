"""How much models that share a device slow each other: one method, `slowdown(victim, neighbours)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from cotenant.errors import PlanError


class Load(msgspec.Struct, frozen=True):
    """A model at work on a part of a device: who slows, or is slowed. kind: of the device. share: ‰ of it."""

    model: str
    kind: str
    batch: int
    share: int


def require(kind: str, load: Load) -> None:
    """Raises PlanError for a load on another kind of device than the samples of a predictor were measured on."""
    if load.kind != kind:
        raise PlanError(
            f"model {load.model!r} on {load.kind!r}: this predictor was fitted to samples on {kind!r} and knows no"
            " other kind of device; plan for one kind, or take 'ours', which is less sure of others but answers"
        )


class Interference(Protocol):
    def slowdown(self, victim: Load, neighbours: Sequence[Load]) -> float:
        """Latency beside the neighbours over latency alone, at least 1."""
        ...


class Alone:
    """Nobody slows anybody."""

    def slowdown(self, victim: Load, neighbours: Sequence[Load]) -> float:
        return 1.0


class Margin(msgspec.Struct, frozen=True):
    """Any neighbours slow a model by the same factor: not a prediction, but room left for one that is missing."""

    factor: float

    def slowdown(self, victim: Load, neighbours: Sequence[Load]) -> float:
        return self.factor if neighbours else 1.0
