"""Handle one request from its last byte to its response: read it as inference, and write its outcome."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from cotenant.core.tensor import total_bytes
from cotenant.core.units import show_seconds
from cotenant.errors import CotenantError, InvalidError, RequestError, UnauthenticatedError, UnavailableError
from cotenant.live import codec
from cotenant.live.access import Access, Caller, Permission
from cotenant.live.http.encoding import deflate, encoding_for
from cotenant.live.http.response import BINARY, JSON, EventStream, TextResponse, error_body, head, status_of
from cotenant.live.limits import MAX_AT_ONCE, MAX_DIGITS
from cotenant.live.oip import UNEXPECTED, Core, Data, InferRequest, InferResponse, LookingUpError, public_message
from cotenant.live.shared_memory import SharedMemoryNamedError, SharedTensors
from cotenant.live.threads import run_in_thread

logger = logging.getLogger(__name__)
access = logging.getLogger("cotenant.access")

Decoded = tuple[InferRequest, codec.ResponseFormat]

# Reads and writes long JSON: one thread, since each more would make the event loop wait for the interpreter's lock once
# more, and a response takes memory several times while it is written.
JSON_THREAD = ThreadPoolExecutor(1, "cotenant-json")

_MIN_COMPRESSED = 1 << 10  # bytes; a smaller response is not worth compressing
_MIN_THREADED = 1 << 16  # bytes from which a response is compressed in a thread, and written without joining its parts


# What only a proxy sends.
PROXIED = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"))


class Channel(Protocol):
    """A request's connection. transport: None once the caller has left."""

    transport: asyncio.Transport | None

    def closes_after(self, cycle: RequestCycle) -> bool:
        """Tell whether the server closes the connection after this response, which is its last."""
        ...

    def hold(self, cycle: RequestCycle, size: int) -> None:
        """Count so many bytes of memory until the response is sent."""
        ...

    def flush(self) -> None:
        """Send the responses that are complete, in the order of their requests."""
        ...


class RequestCycle:
    """A request and its response.

    began: when the server had read it, where there is an access log; else 0. block, start: the shared memory that holds
    the body, from byte `start` on. held: bytes of memory that it is counted to hold. closes: the connection closes
    after the response. http_1_0: the caller has to be told that it stays open. handle: of the inference request, to
    cancel it. response: its parts in order; None until it is complete. stream: goes on after these.
    """

    __slots__ = (
        "began",
        "block",
        "body",
        "channel",
        "closes",
        "format",
        "handle",
        "headers",
        "held",
        "http_1_0",
        "info",
        "method",
        "request",
        "response",
        "start",
        "stream",
        "url",
    )
    request: InferRequest

    def __init__(self, channel: Channel, method: bytes, url: bytes, headers: dict[bytes, bytes]) -> None:
        self.channel = channel
        self.method = method
        self.url = url
        self.headers = headers
        self.body: Data = b""
        self.began = 0.0
        self.block: Any = None
        self.start = 0
        self.held = 0
        self.closes = False
        self.http_1_0 = False
        self.handle: int | None = None
        self.response: Sequence[Data] | None = None
        self.stream: EventStream | None = None

    def caller(self) -> Caller:
        """Return who sent the request, as far as its connection and its head tell."""
        headers, transport = self.headers, self.channel.transport
        name = None if transport is None else transport.get_extra_info("peername")

        def header(name: bytes) -> str:
            return headers.get(name, b"").decode("latin-1")

        return Caller(
            peer=str(name[0]) if name else "",
            host=header(b"host"),
            origin=header(b"origin"),
            proxied=not PROXIED.isdisjoint(headers),
            authorization=authorization_of(headers),
        )

    def json_size(self) -> int:
        """Return the bytes of the body that are JSON. Raises InvalidError."""
        header = _header_length(self.headers)
        return len(self.body) if header is None else header

    def infer(self, core: Core, model: str, version: str, lost: float, access: Access) -> None:
        """Submit the body as an inference request; `done` writes the response. lost: seconds of its target that pass
        before it is submitted and after it is answered. access: who may name shared memory."""
        try:
            self.info = core.model(model, version)
            if len(self.body) > MAX_AT_ONCE and self.json_size() > MAX_AT_ONCE:
                self._decode_in_thread(core, model, version, lost, access)
            else:
                self._submit(core, lost, access, self._decode)
        except LookingUpError as pending:
            self._await_model(pending, core, model, version, lost, access)
        except CotenantError as error:
            self.fail(error)

    def _await_model(
        self, pending: LookingUpError, core: Core, model: str, version: str, lost: float, access: Access
    ) -> None:
        """Go on once another process has told of the model."""
        began = time.monotonic()

        def known(error: RequestError | None) -> None:
            if self.channel.transport is None:
                return  # the caller has left
            if error is None:
                self.infer(core, model, version, lost + time.monotonic() - began, access)
            else:
                self.fail(error)

        pending.ask(known)

    def _decode_in_thread(self, core: Core, model: str, version: str, lost: float, access: Access) -> None:
        """Submit the body once it has been read; others are served meanwhile. If the model has changed by then, the
        body is read again, for the model as it is now."""
        began = time.monotonic()

        def decoded(work: asyncio.Future[Decoded]) -> None:
            if self.channel.transport is None:  # the caller has left
                work.exception()
                return
            passed = lost + time.monotonic() - began
            try:
                if core.model(model, version) == self.info:
                    self._submit(core, passed, access, work.result)
                else:
                    self.infer(core, model, version, passed, access)
            except LookingUpError as pending:
                self._await_model(pending, core, model, version, passed, access)
            except CotenantError as error:
                self.fail(error)
            except Exception as error:  # noqa: BLE001  # it is logged
                self.fail_unexpectedly(error)

        run_in_thread(decoded, self._decode, executor=JSON_THREAD)

    def _decode(self, shared: SharedTensors | None = None) -> Decoded:
        header = _header_length(self.headers)
        return codec.decode(self.body, self.info, header=header, block=self.block, start=self.start, shared=shared)

    def _submit(self, core: Core, lost: float, access: Access, decoded: Callable[[], Decoded]) -> None:
        try:
            request, self.format = decoded()
        except SharedMemoryNamedError:
            if not core.shared_memory.enabled:
                raise
            access.check(Permission.SHARE, self.caller())
            request, self.format = self._decode(core.shared_memory.tensors())
        if b"traceparent" in self.headers:
            trace = self.headers[b"traceparent"].decode("latin-1")
            request = msgspec.structs.replace(request, traceparent=trace)
        self.request = request
        self.body, self.block = b"", None
        self.handle = core.infer(request, self.done, lost=lost)

    def done(self, result: InferResponse | RequestError) -> None:
        """Respond with the outcome of the inference request."""
        if self.channel.transport is None:
            return
        if isinstance(result, RequestError):
            self.fail(result)
            return
        if codec.takes_long(self.request, result, self.format):
            self.channel.hold(self, total_bytes(result.outputs))  # they may wait for the thread
            run_in_thread(
                lambda encoded: self._respond(encoded.result),
                codec.encode,
                self.request,
                result,
                self.info,
                self.format,
                executor=None if self.format.regions else JSON_THREAD,
            )
        else:
            self._respond(codec.encode, self.request, result, self.info, self.format)

    def _respond(self, encode: Callable[..., tuple[bytes, list[Data]]], *args: Any) -> None:
        """Respond with outputs, encoded by this call, or why there are none."""
        try:
            text, tail = encode(*args)
        except RequestError as error:
            self.fail(error)
            return
        except Exception as error:  # noqa: BLE001  # it is logged
            self.fail_unexpectedly(error)
            return
        content_type, body, headers = JSON, [text, *tail], b""
        if tail:
            content_type, headers = BINARY, b"Inference-Header-Content-Length: %d\r\n" % len(text)
        if b"accept-encoding" in self.headers:
            self._compress(content_type, body, headers)
        else:
            self.send(200, content_type, body, headers)

    def _compress(self, content_type: str, body: list[Data], headers: bytes) -> None:
        # Only responses to infer: stock tritonclient.http.aio lets aiohttp accept gzip, but unpacks nothing else.
        encoding = encoding_for(self.headers[b"accept-encoding"], content_type == BINARY)
        size = sum(map(len, body))
        if encoding is None or size < _MIN_COMPRESSED:
            self.send(200, content_type, body, headers)
            return
        headers += b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n" % encoding
        if size < _MIN_THREADED:
            self.send(200, content_type, (deflate(body, encoding),), headers)
        else:
            run_in_thread(lambda packed: self._send_packed(packed, content_type, headers), deflate, body, encoding)

    def _send_packed(self, packed: asyncio.Future[bytes], content_type: str, headers: bytes) -> None:
        if error := packed.exception():
            self.fail_unexpectedly(error)
        else:
            self.send(200, content_type, (packed.result(),), headers)

    def fail(self, error: CotenantError) -> None:
        """Respond with an error, in the status that stands for it."""
        headers = b""
        if isinstance(error, UnavailableError):
            headers = b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after))
        elif isinstance(error, UnauthenticatedError):
            headers = b"WWW-Authenticate: Bearer\r\n"
        self.reject(status_of(error), public_message(error), headers)

    def fail_unexpectedly(self, error: BaseException) -> None:
        """Respond to a request on which the server itself failed: this one, and no other of its connection."""
        logger.error("a request to %s ended in an error of the server", self.url[:200], exc_info=error)
        if self.response is None:
            self.reject(500, UNEXPECTED)

    def reject(self, status: int, message: str, headers: bytes = b"") -> None:
        self.send(status, JSON, (error_body(message),), headers)

    def reply(self, payload: Any) -> None:
        """Respond with text as it is, with events as they come, and with any other object as JSON, identities as they
        are spelled."""
        if isinstance(payload, TextResponse):
            self.send(200, payload.content_type, (payload.body,), payload.headers)
        elif isinstance(payload, EventStream):
            if self.began:
                log_access(self, 200, 0)
            self.response = (payload.HEAD,)
            if self.method == b"HEAD":
                self.closes = True
            else:
                self.stream = payload
            self.channel.flush()
        else:
            self.send(200, JSON, (msgspec.json.encode(payload, enc_hook=str),))

    def awaited(self, task: asyncio.Task[Any]) -> None:
        """Respond with the result of the task that the request has started."""
        if task.cancelled():
            self.fail(UnavailableError("the server stopped before it was done; ask again once it is up"))
            return
        error = task.exception()
        if error is None:
            self.reply(task.result())
        elif isinstance(error, CotenantError):
            self.fail(error)
        else:
            self.fail_unexpectedly(error)

    def send(self, status: int, content_type: str, body: Sequence[Data], headers: bytes = b"") -> None:
        """Complete the response. headers: further ones, each with its line end."""
        if self.began:
            log_access(self, status, sum(map(len, body)))
        channel = self.channel
        if channel.closes_after(self):
            self.closes = True
        if self.closes:
            headers += b"Connection: close\r\n"
        elif self.http_1_0:
            headers += b"Connection: keep-alive\r\n"
        size = len(body[0]) if len(body) == 1 else sum(map(len, body))
        start = head(status, content_type, size, headers)
        if self.method == b"HEAD":
            self.response = (start,)
        elif size < _MIN_THREADED:
            self.response = (b"".join((start, *body)),)
        else:
            self.response = (start, *body)
            channel.hold(self, size)
        channel.flush()


def log_access(request: RequestCycle, status: int, size: int) -> None:
    """Write a line of the access log. size: of the response's body, in bytes."""
    seconds, peer = time.monotonic() - request.began, request.caller().peer
    method, url = request.method.decode("latin-1"), request.url.decode("latin-1")
    fields = {"peer": peer, "method": method, "url": url, "status": status, "bytes": size, "seconds": seconds}
    access.info("%s %s %s %d %d B %s", peer, method, url, status, size, show_seconds(seconds), extra={"fields": fields})


def authorization_of(headers: dict[bytes, bytes]) -> str:
    return headers.get(b"authorization", b"").decode("latin-1")


def _header_length(headers: dict[bytes, bytes]) -> int | None:
    text = headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > MAX_DIGITS:
        raise InvalidError(f"Inference-Header-Content-Length is {text[:100]!r}; it is a number of bytes")
    return int(text)
