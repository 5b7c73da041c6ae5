"""Describe a request as the dispatcher sees it: the front end holds the tensors."""

from __future__ import annotations

import enum
from typing import Final


class Outcome(enum.Enum):
    """Name how a request ended; each ends exactly once."""

    SERVED = "served"  # answered; whether within target is for `measure` to say
    REJECTED = "rejected"  # at arrival: it could not meet its deadline
    EXPIRED = "expired"  # while it waited: its deadline passed, or can no longer be met
    FAILED = "failed"  # the model or its worker failed
    CANCELLED = "cancelled"  # the caller left


class Request:
    """Describe a request. arrived, deadline: seconds of the driver's clock. size: rows, the first dimension of its
    tensors.

    priority: 0 is the most urgent; higher numbers run when nothing more urgent waits for the same model.

    A plain class: each field is read a dozen times, and mypyc cannot see into msgspec's structs.
    """

    __slots__ = ("arrived", "deadline", "id", "model", "priority", "size")

    def __init__(self, id: int, model: str, arrived: float, deadline: float, size: int = 1, priority: int = 0) -> None:
        self.id: Final = id
        self.model: Final = model
        self.arrived: Final = arrived
        self.deadline: Final = deadline
        self.size: Final = size
        self.priority: Final = priority

    def fields(self) -> tuple[int, str, float, float, int, int]:
        """Return the fields in the order of the constructor."""
        return self.id, self.model, self.arrived, self.deadline, self.size, self.priority

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.fields() == other.fields()

    def __repr__(self) -> str:
        return f"Request{self.fields()}"


def make_requests(ids: list[int], models: list[str], arrived: list[float], deadlines: list[float]) -> list[Request]:
    """Create requests of one row each."""
    return [
        Request(number, model, time, deadline)
        for number, model, time, deadline in zip(ids, models, arrived, deadlines)  # noqa: B905  # mypyc knows this zip
    ]
