"""The Open Inference Protocol v2 in our own values: what the HTTP and gRPC front ends share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from cotenant.core.tensor import ModelInfo, Tensor
from cotenant.errors import RequestError

Parameters = Mapping[str, bool | int | float | str]


class RequestedOutput(msgspec.Struct, frozen=True):
    """classification: how many of the highest values to answer as labels; 0 for the tensor itself."""

    name: str
    classification: int = 0


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """outputs: those asked for; empty: all. timeout: seconds from now, None for the model's own target.

    priority: 0 is the most urgent.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    timeout: float | None = None
    priority: int = 0
    parameters: Parameters = {}


class InferResponse(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: str
    id: str = ""
    outputs: tuple[Tensor, ...]


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """state: READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


Done = Callable[[InferResponse | RequestError], None]


class Core(Protocol):
    """What the front ends ask of the server. Every method raises RequestError's children for what it cannot do."""

    def live(self) -> bool: ...

    def ready(self) -> bool: ...

    def model(self, name: str, version: str = "") -> ModelInfo: ...

    def model_ready(self, name: str, version: str = "") -> bool: ...

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        """Triton's ModelConfig in its JSON shape."""
        ...

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Triton's `model_stats`, one entry a model; all models where no name is given."""
        ...

    def index(self, *, ready: bool = False) -> list[IndexEntry]: ...

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None: ...

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None: ...

    def trace_setting(self, model: str = "", update: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def log_settings(self, update: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def metrics(self) -> str:
        """Prometheus' text format."""
        ...

    def allocate(self, size: int) -> Any | None:
        """A block of memory that workers share (`worker.arena.Block`), or None where there is no room."""
        ...

    def infer(self, request: InferRequest, done: Done) -> int:
        """Take a request in; `done` is called exactly once, perhaps before this returns. Answers a ticket."""
        ...

    def cancel(self, ticket: int) -> None:
        """The caller left: `done` will be called with CancelledError unless it was called already."""
        ...
