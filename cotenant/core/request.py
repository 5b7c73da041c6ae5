"""One request, as far as decisions need it: the edge holds the tensors."""

from __future__ import annotations

import enum

import msgspec


class Outcome(enum.Enum):
    """How a request ended. Each ends exactly once."""

    SERVED = "served"  # answered; late or in time is for `measure` to say
    REFUSED = "refused"  # at arrival: it could not have been done in time
    EXPIRED = "expired"  # while it waited: its deadline passed, or can no longer be met
    FAILED = "failed"  # the model or its worker failed
    CANCELLED = "cancelled"  # the caller left


class Request(msgspec.Struct, frozen=True, gc=False):
    """arrived, deadline: seconds of the driver's clock. size: rows, the first dimension of its tensors.

    priority: 0 is the most urgent. Higher numbers run when nothing more urgent waits for the same model.
    """

    id: int
    model: str
    arrived: float
    deadline: float
    size: int = 1
    priority: int = 0
