"""One request, from its last byte to its answer: how it is read as inference, and how its end is written as HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cotenant.errors import (
    CancelledError,
    CotenantError,
    InvalidError,
    MalformedError,
    NotFoundError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from cotenant.live import codec
from cotenant.live.http.encoding import deflate, encoding_for
from cotenant.live.oip import Core, Data, InferRequest, InferResponse

if TYPE_CHECKING:
    from cotenant.live.http.connection import Connection

JSON = "application/json"
BINARY = "application/octet-stream"
HTML = "text/html; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

_COMPRESS = 1 << 10  # answers below are not worth it
_THREADED = 1 << 16  # answers from this size on are compressed in a thread, and written without joining their parts

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_STATUS: dict[type[CotenantError], int] = {
    MalformedError: 500,  # as Triton has it
    InvalidError: 400,
    CancelledError: 400,
    NotFoundError: 404,
    UnsupportedError: 501,
    UnavailableError: 503,
}
_HEADS = {
    (status, kind): f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: ".encode()
    for status, reason in _REASONS.items()
    for kind in (JSON, BINARY, HTML, PROMETHEUS)
}


class TextResponse(msgspec.Struct, frozen=True):
    """An answer that is no object to be written as JSON."""

    body: str
    kind: str = JSON


class RequestCycle:
    """A request from its last byte to its answer."""

    __slots__ = (
        "answer",
        "block",
        "body",
        "connection",
        "form",
        "headers",
        "info",
        "last",
        "method",
        "old",
        "request",
        "start",
        "ticket",
        "url",
    )
    request: InferRequest

    def __init__(self, connection: Connection, method: bytes, url: bytes, headers: dict[bytes, bytes]) -> None:
        self.connection = connection
        self.method = method
        self.url = url
        self.headers = headers
        self.body: Data = b""
        self.block: Any = None  # the shared memory that holds the body, from byte `start` on
        self.start = 0
        self.last = False  # the connection closes after it
        self.old = False  # HTTP/1.0, where staying open must be said
        self.ticket: int | None = None
        self.answer: Sequence[Data] | None = None

    def infer(self, core: Core, model: str, version: str) -> None:
        try:
            info = self.info = core.model(model, version)
            header = _header_length(self.headers)
            request, self.form = codec.decode(self.body, info, header=header, block=self.block, start=self.start)
            self.request = request
            self.body, self.block = b"", None
            self.ticket = core.infer(request, self.done)
        except CotenantError as error:
            self.fail(error)

    def done(self, result: InferResponse | RequestError) -> None:
        if self.connection.transport is None:
            return
        if isinstance(result, RequestError):
            self.fail(result)
            return
        try:
            text, tail = codec.encode(self.request, result, self.info, self.form)
        except RequestError as error:
            self.fail(error)
            return
        kind, body, more = JSON, [text, *tail], b""
        if tail:
            kind, more = BINARY, b"Inference-Header-Content-Length: %d\r\n" % len(text)
        if b"accept-encoding" in self.headers:
            self._compress(kind, body, more)
        else:
            self.send(200, kind, body, more)

    def _compress(self, kind: str, body: list[Data], more: bytes) -> None:
        # Only answers to infer: stock tritonclient.http.aio lets aiohttp accept gzip, but unpacks nothing else.
        encoding = encoding_for(self.headers[b"accept-encoding"], kind == BINARY)
        size = sum(map(len, body))
        if encoding is None or size < _COMPRESS:
            self.send(200, kind, body, more)
            return
        more += b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n" % encoding
        if size < _THREADED:
            self.send(200, kind, (deflate(body, encoding),), more)
        else:
            packing = asyncio.get_running_loop().run_in_executor(None, deflate, body, encoding)
            packing.add_done_callback(lambda packed: self.send(200, kind, (packed.result(),), more))

    def fail(self, error: CotenantError) -> None:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
        more = b""
        if isinstance(error, UnavailableError):
            more = b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after))
        self.refuse(status, str(error), more)

    def refuse(self, status: int, message: str, more: bytes = b"") -> None:
        self.send(status, JSON, (msgspec.json.encode({"error": message}),), more)

    def reply(self, payload: Any) -> None:
        if isinstance(payload, TextResponse):
            self.send(200, payload.kind, (payload.body.encode(),))
        else:
            self.send(200, JSON, (msgspec.json.encode(payload),))

    def awaited(self, task: asyncio.Task[Any]) -> None:
        """The work that a request asked for is over."""
        if task.cancelled():
            self.fail(UnavailableError("the server stopped before it was done; ask again once it is up"))
            return
        error = task.exception()
        if error is None:
            self.reply(task.result())
        elif isinstance(error, CotenantError):
            self.fail(error)
        else:
            self.refuse(500, "an error in the server; its log says more")
            raise error

    def send(self, status: int, kind: str, body: Sequence[Data], more: bytes = b"") -> None:
        connection = self.connection
        if connection.server.draining and connection.pending and connection.pending[-1] is self:
            self.last = True
        if self.last:
            more += b"Connection: close\r\n"
        elif self.old:
            more += b"Connection: keep-alive\r\n"
        size = len(body[0]) if len(body) == 1 else sum(map(len, body))
        head = b"%s%d\r\n%s\r\n" % (_HEADS[status, kind], size, more)
        if self.method == b"HEAD":
            self.answer = (head,)
        elif size < _THREADED:
            self.answer = (b"".join((head, *body)),)
        else:
            self.answer = (head, *body)
        connection.flush()


def _header_length(headers: dict[bytes, bytes]) -> int | None:
    text = headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit():
        raise InvalidError(f"Inference-Header-Content-Length is {text!r}; it is a number of bytes")
    return int(text)
