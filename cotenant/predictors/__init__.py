"""How much models that share a device slow each other: one method, `slowdown(victim, neighbours)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from cotenant.errors import PlanError

REMEMBERED = 100_000  # answers of a predictor


class Load(msgspec.Struct, frozen=True, cache_hash=True):
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
            " other kind of device; plan for one kind, or take 'gaussian-process', which"
            " is less sure of others but answers"
        )


class Interference(Protocol):
    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        """Latency beside the neighbours over latency alone, at least 1."""
        ...


class NoInterference:
    """Nobody slows anybody."""

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1.0


class ConstantMargin(msgspec.Struct, frozen=True):
    """Any neighbours slow a model by the same factor: not a prediction, but room left for one that is missing."""

    factor: float

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return self.factor if colocated else 1.0


def remembered(slowdown: Callable[[Any, Load, Sequence[Load]], float]) -> Callable[[Any, Load, Sequence[Load]], float]:
    """Works out each question once, and none without neighbours: planners ask the same again and again.

    For the method of a value, which keeps its answers in its `__dict__`.
    """

    @functools.wraps(slowdown)
    def answer(self: Any, victim: Load, colocated: Sequence[Load]) -> float:
        if not colocated:
            return 1.0
        answers: dict[tuple[Load, ...], float] | None = self.__dict__.get("_answers")
        if answers is None:
            answers = self.__dict__["_answers"] = {}
        asked = (victim, *colocated)
        known = answers.get(asked)
        if known is None:
            if len(answers) >= REMEMBERED:
                answers.clear()
            known = answers[asked] = slowdown(self, victim, colocated)
        return known

    return answer
