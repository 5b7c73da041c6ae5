"""Define the protocol between the server's process and an HTTP process.

The server's process sends `Setup` first. A frame carries all messages of a round of the sender's event loop, so a crowd
of requests costs two system calls. Requests have numbers that the HTTP process gives; they are unique for its life.
Times are of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from cotenant.core.tensor import ModelInfo
from cotenant.errors import (
    CancelledError,
    FailedError,
    ForbiddenError,
    InvalidError,
    MalformedError,
    NotFoundError,
    RequestError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from cotenant.live.access import ControlPolicy
from cotenant.live.limits import Limits
from cotenant.worker.wire import TensorPart

HEAD = struct.Struct("<Q")  # before each frame: its length in bytes


class TlsFiles(msgspec.Struct, frozen=True, array_like=True):
    """Name the PEM files of a certificate and its key."""

    certificate: str
    key: str


class Setup(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """Set an HTTP process up.

    number: its place on the board. listening: descriptors of its listening sockets. arena: size in bytes; part: where
    the bytes that it may allocate begin, and how many they are. board: offset of the board in the arena. tokens: their
    digests, each with its role.
    """

    number: int
    listening: tuple[int, ...]
    arena: int
    part: tuple[int, int]
    board: int
    limits: Limits
    tokens: tuple[tuple[bytes, str], ...]
    control: ControlPolicy
    tls: TlsFiles | None
    log_level: str
    log_format: str
    access_log: bool


class Infer(msgspec.Struct, tag=1, array_like=True, gc=False):
    """Submit a request for inference, which was checked against the model as it was at `known` (`Board.models`).

    began: since when its target runs. slot: its model's place on the board, -1 for none; rows: that are counted there.
    """

    number: int
    model: str
    version: str
    inputs: list[TensorPart]
    known: int
    began: float
    slot: int = -1
    rows: int = 1
    timeout: float | None = None
    patience: float | None = None
    priority: int = -1
    trace: str = ""


class LookUp(msgspec.Struct, tag=2, array_like=True, gc=False):
    """Ask for a model; `Model` or `Failure` is the answer."""

    number: int
    model: str
    version: str


class Forward(msgspec.Struct, tag=3, array_like=True, gc=False):
    """Pass on a request that is not inference. The answer is `Response`, perhaps with `Event` after it."""

    number: int
    method: bytes
    url: bytes
    headers: dict[bytes, bytes]
    body: bytes
    peer: str
    http_1_0: bool
    closes: bool


class Cancel(msgspec.Struct, tag=4, array_like=True, gc=False):
    """Say that the caller of a request has left, or wants no more events."""

    number: int


class Unread(msgspec.Struct, tag=5, array_like=True, gc=False):
    """Count requests that were rejected unread. waited: seconds of each since it came."""

    model: str
    waited: list[float]


class Returned(msgspec.Struct, tag=6, array_like=True, gc=False):
    """Give back the memory of these requests, or of their answers: nothing here refers to it any more."""

    numbers: list[int]


class Answer(msgspec.Struct, tag=7, array_like=True, gc=False):
    """Answer a request. Outputs that lie in the arena stay there until they are returned."""

    number: int
    version: str
    outputs: list[TensorPart]


class Failure(msgspec.Struct, tag=8, array_like=True, gc=False):
    """Say why a request has no answer. kind: the class of the error."""

    number: int
    kind: str
    message: str
    retry_after: float = 0.0


class Model(msgspec.Struct, tag=9, array_like=True):
    """Describe a model as it is at `known` (`Board.models`). slot: its place on the board, -1 for none."""

    number: int
    info: ModelInfo
    known: int
    slot: int


class Response(msgspec.Struct, tag=10, array_like=True, gc=False):
    """Give the whole response to a request that was passed on. streams: events follow until the caller leaves. closes:
    the connection ends with it."""

    number: int
    data: bytes
    streams: bool = False
    closes: bool = False


class Event(msgspec.Struct, tag=11, array_like=True, gc=False):
    """Send a caller some more of a stream of events."""

    number: int
    data: bytes


class Drain(msgspec.Struct, tag=12, array_like=True):
    """Accept nothing more, answer what is pending within so many seconds, and exit."""

    grace: float


ToServer = Infer | LookUp | Forward | Cancel | Unread | Returned
ToHttpProcess = Setup | Answer | Failure | Model | Response | Event | Drain | Returned

_KINDS: dict[str, type[RequestError]] = {
    kind.__name__: kind
    for kind in (
        RequestError,
        MalformedError,
        InvalidError,
        NotFoundError,
        UnauthenticatedError,
        ForbiddenError,
        UnavailableError,
        UnsupportedError,
        CancelledError,
        FailedError,
    )
}


def failure(number: int, error: RequestError) -> Failure:
    """Describe an error, as the nearest class that both processes know."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    return Failure(number, kind, str(error), error.retry_after if isinstance(error, UnavailableError) else 0.0)


def error_of(failed: Failure) -> RequestError:
    """Return the error that was described."""
    kind = _KINDS.get(failed.kind, FailedError)
    arguments: dict[str, Any] = {"retry_after": failed.retry_after} if kind is UnavailableError else {}
    return kind(failed.message, **arguments)
