"""Define the protocols that receive the results of batches, and the type of the tensors of one request or answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cotenant.core.identity import LaneId
from cotenant.core.tensor import Tensor
from cotenant.errors import RequestError
from cotenant.worker.wire import BatchResult, Timing

Payload = tuple[Tensor, ...]


class BatchListener(Protocol):
    """Receive the results of batches, from the event loop and never from within `Pool.run`."""

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        """Receive the answers of a batch: each request's outputs, or why the model failed on it."""
        ...

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        """Hear that the model failed on every request of a batch; the worker lives."""
        ...


class ForwardingListener(BatchListener, Protocol):
    """Receive results of batches as workers send them."""

    def answered(self, lane: LaneId, answer: BatchResult) -> None:
        """Receive the answers of a batch, all of whose tensors are inline."""
        ...
