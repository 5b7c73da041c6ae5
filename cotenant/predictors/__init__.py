"""How much models that share a device slow each other: one method, `slowdown(victim, neighbours)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Load(msgspec.Struct, frozen=True):
    """A model at work on a part of a device: who slows, or is slowed. kind: of the device. share: ‰ of it."""

    model: str
    kind: str
    batch: int
    share: int


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
