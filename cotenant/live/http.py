"""The HTTP front end: an asyncio protocol of our own on httptools.

Not an ASGI server, for three things that ASGI cannot give: a request costs no task; a caller that leaves is known at
once, and its request is cancelled; and a large body is received straight into memory that workers share, so that no
byte of it is copied in this process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools
import msgspec

from cotenant.errors import (
    CancelledError,
    ConfigError,
    CotenantError,
    InvalidError,
    MalformedError,
    NotFoundError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from cotenant.live import codec
from cotenant.live.oip import EXTENSIONS, NAME, VERSION, Core, Data, InferRequest, InferResponse

_JSON = "application/json"
_BINARY = "application/octet-stream"
_HTML = "text/html; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

_RECEIVE = 1 << 16  # bytes read at once, of all but large bodies
_DIRECT = 1 << 15  # bodies from this size on are received where they will stay
_ALIGNMENT = 64  # of the first binary tensor in shared memory
_COMPRESS = 1 << 10  # answers below are not worth it
_THREADED = 1 << 16  # answers from this size on are compressed in a thread, and written without joining their parts
_PIPELINED = 32  # requests of one connection that may wait for their answers
_ROUTES = 4096  # addresses that are remembered
_LINGER = 5  # seconds that a caller who was refused in mid-sentence has to read why

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
    for kind in (_JSON, _BINARY, _HTML, _PROMETHEUS)
}
_HEADERS = frozenset(
    (
        b"accept-encoding",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"inference-header-content-length",
    )
)


class Limits(msgspec.Struct, frozen=True):
    """body, head: bytes of a request. The others are seconds, kept to within one: how long a connection may be idle
    between requests, how long the head of one may take, and how long nothing may move within a body or an answer."""

    body: int = 1 << 30
    head: int = 1 << 16
    idle: int = 75
    begin: int = 10
    stall: int = 30


class _Refused(Exception):  # noqa: N818
    """Stops the parser: the rest of this request is not worth reading."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Text(msgspec.Struct, frozen=True):
    """An answer that is no object to be written as JSON."""

    body: str
    kind: str = _JSON


class _Route(msgspec.Struct, frozen=True):
    """What an address stands for. handlers: by method; what they return is answered. infer: it answers by itself."""

    handlers: dict[bytes, Callable[..., Any]]
    model: str = ""
    version: str = ""
    infer: bool = False


class _Exchange:
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

    def __init__(self, connection: _Connection, method: bytes, url: bytes, headers: dict[bytes, bytes]) -> None:
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

    def infer(self, core: Core, route: _Route) -> None:
        try:
            info = self.info = core.model(route.model, route.version)
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
        kind, body, more = _JSON, [text, *tail], b""
        if tail:
            kind, more = _BINARY, b"Inference-Header-Content-Length: %d\r\n" % len(text)
        if b"accept-encoding" in self.headers:
            self._compress(kind, body, more)
        else:
            self.send(200, kind, body, more)

    def _compress(self, kind: str, body: list[Data], more: bytes) -> None:
        # Only answers to infer: stock tritonclient.http.aio lets aiohttp accept gzip, but unpacks nothing else.
        encoding = _encoding(self.headers[b"accept-encoding"], kind == _BINARY)
        size = sum(map(len, body))
        if encoding is None or size < _COMPRESS:
            self.send(200, kind, body, more)
            return
        more += b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n" % encoding
        if size < _THREADED:
            self.send(200, kind, (_deflate(body, encoding),), more)
        else:
            packing = asyncio.get_running_loop().run_in_executor(None, _deflate, body, encoding)
            packing.add_done_callback(lambda packed: self.send(200, kind, (packed.result(),), more))

    def fail(self, error: CotenantError) -> None:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
        more = b""
        if isinstance(error, UnavailableError):
            more = b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after))
        self.refuse(status, str(error), more)

    def refuse(self, status: int, message: str, more: bytes = b"") -> None:
        self.send(status, _JSON, (msgspec.json.encode({"error": message}),), more)

    def reply(self, payload: Any) -> None:
        if isinstance(payload, _Text):
            self.send(200, payload.kind, (payload.body.encode(),))
        else:
            self.send(200, _JSON, (msgspec.json.encode(payload),))

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


class _Connection(asyncio.BufferedProtocol):
    """One caller. What it sends is parsed and started at once, and answered in order."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.pending: deque[_Exchange] = deque()
        self.deaf = False  # what comes in is thrown away
        self.cut = False  # refused in mid-sentence
        self.full = False  # the caller does not take its answers
        self.paused = False
        self.seen = self.began = server.tick  # when something last moved, when the request began
        self.unsent = 0
        self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self._expect_request()

    def _expect_request(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.in_head = self.in_body = False
        self.direct = False  # what comes in goes straight into the body
        self.head = 0
        self.body: bytes | bytearray | memoryview = b""
        self.block: Any = None
        self.length = self.filled = self.start = 0

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.body, self.block = b"", None
        self._forget()
        self.server.lost(self)

    def eof_received(self) -> bool:
        # To close, and to have said all, look the same from here. Those who do the latter are few; the others left.
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.direct:
            return cast(memoryview, self.body)[self.filled :]
        # One buffer for all connections: nothing is left in it after buffer_updated.
        return self.server.buffer

    def buffer_updated(self, count: int) -> None:
        if self.deaf:
            return
        self.seen = self.server.tick
        if self.direct:
            self.filled += count
            if self.filled == self.length:
                self.on_message_complete()
                self._expect_request()
            return
        before = self.headers
        try:
            self.parser.feed_data(self.server.buffer[:count])
        except httptools.HttpParserUpgrade:
            return  # answered as if it had not asked
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Refused):
                raise
            self._cut_off(error.__context__.status, str(error.__context__))
        except httptools.HttpParserError as error:
            self._cut_off(400, f"not HTTP/1.1: {error}")
        else:
            if self.in_head and self.headers is before:
                self.head += count
                if self.head > self.server.limits.head:
                    self._cut_off(431, f"the head of this request is above {self.server.limits.head} bytes")
            elif self.in_body and isinstance(self.body, memoryview):
                self.direct = True

    def pause_writing(self) -> None:
        self.full = True
        self._throttle()

    def resume_writing(self) -> None:
        self.full = False
        self._throttle()

    # The parser calls these.

    def on_message_begin(self) -> None:
        self.in_head = True
        self.head = 0
        self.began = self.server.tick
        self.url = b""
        self.headers = {}

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Not from the trailer of a chunked body.
        if self.in_head and (name := name.lower()) in _HEADERS:
            self.headers[name] = value

    def on_headers_complete(self) -> None:
        self.in_head, self.in_body = False, True
        headers = self.headers
        self.body, self.block, self.filled, self.start = b"", None, 0, 0
        self.length = int(headers.get(b"content-length", 0))
        if self.length > self.server.limits.body:
            raise _Refused(413, f"a body of {self.length} bytes; at most {self.server.limits.body} are taken")
        if self.length >= _DIRECT and b"content-encoding" not in headers:
            self._make_room()
        if b"expect" in headers and not self.pending and not self.deaf and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        body = self.body
        if isinstance(body, memoryview):
            end = self.filled + len(data)
            body[self.filled : end] = data
            self.filled = end
        elif not body:
            self.body = data
        else:
            if not isinstance(body, bytearray):
                self.body = body = bytearray(body)
            body += data
            if len(body) > self.server.limits.body:
                raise _Refused(413, f"a body of more than {self.server.limits.body} bytes, which are the most")

    def on_message_complete(self) -> None:
        self.in_body = False
        if self.deaf:
            return
        parser = self.parser
        exchange = _Exchange(self, parser.get_method(), self.url, self.headers)
        if not parser.should_keep_alive() or parser.should_upgrade():
            self.deaf = exchange.last = True
        elif b"connection" in self.headers:
            exchange.old = parser.get_http_version() == "1.0"
        exchange.body, exchange.block, exchange.start = self.body, self.block, self.start
        self.body, self.block = b"", None
        self.pending.append(exchange)
        self.server.start(exchange)
        if len(self.pending) >= _PIPELINED:
            self._throttle()

    # Our own.

    def _make_room(self) -> None:
        """Decide where a large body will stay: where workers see it if it is binary, its first tensor aligned."""
        route = self.server.route(self.url)
        header = self.headers.get(b"inference-header-content-length")
        if route is not None and route.infer and header is not None and header.isdigit():
            self.start = -int(header) % _ALIGNMENT
            self.block = self.server.core.allocate(self.start + self.length)
        if self.block is None:
            self.body = memoryview(bytearray(self.length))
        else:
            self.body = self.block.view[self.start : self.start + self.length]

    def _cut_off(self, status: int, message: str) -> None:
        """Answer a request whose end will not be read, after those before it."""
        if self.deaf:
            return
        self.deaf = self.cut = True
        self.in_head = self.in_body = self.direct = False
        self.body, self.block = b"", None
        exchange = _Exchange(self, b"", self.url, {})
        exchange.last = True
        self.pending.append(exchange)
        exchange.refuse(status, message)

    def _forget(self) -> None:
        """Nobody will read what is still to be answered."""
        pending, self.pending = self.pending, deque()
        for exchange in pending:
            if exchange.ticket is not None and exchange.answer is None:
                self.server.core.cancel(exchange.ticket)

    def flush(self) -> None:
        """Send the answers that are there, up to the first that is not."""
        transport, pending = self.transport, self.pending
        if transport is None:
            return
        while pending and (answer := pending[0].answer) is not None:
            if len(answer) == 1:
                transport.write(answer[0])
            else:
                transport.writelines(answer)
            if pending.popleft().last:
                self.deaf = True
                self._forget()
                if self.cut and transport.can_write_eof():
                    # Closed at once, the connection would be reset by what is still coming, and the answer lost.
                    transport.write_eof()
                else:
                    transport.close()
                break
        self.seen = self.server.tick
        if self.paused:
            self._throttle()

    def _throttle(self) -> None:
        """Read no further from a caller who does not take its answers, or waits for many."""
        wanted = self.full or len(self.pending) >= _PIPELINED
        if wanted != self.paused and self.transport is not None and not self.transport.is_closing():
            self.paused = wanted
            if wanted:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def check(self) -> None:
        """Once a second: end what takes too long."""
        transport, limits, now = self.transport, self.server.limits, self.server.tick
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        if unsent != self.unsent:
            self.unsent, self.seen = unsent, now
        quiet = now - self.seen
        if unsent:
            if quiet > limits.stall:
                transport.abort()
        elif self.cut:
            if quiet > _LINGER:
                transport.abort()
        elif self.in_head:
            if now - self.began > limits.begin:
                self._cut_off(408, f"the head of this request took more than {limits.begin} s")
        elif self.in_body:
            if quiet > limits.stall:
                self._cut_off(408, f"the body of this request stopped for more than {limits.stall} s")
        elif not self.pending and quiet > limits.idle:
            transport.close()

    def retire(self) -> None:
        """The server stops: finish what was asked."""
        if self.transport is not None and not self.pending and not self.in_head and not self.in_body:
            self.transport.close()


class HttpServer:
    """Serves a core. page: makes what is shown at ``/``; status: what ``/cotenant/status`` answers, as JSON.

    only_metrics: offers nothing else, for an address that more people may reach.
    """

    def __init__(
        self,
        core: Core,
        *,
        page: Callable[[], str] | None = None,
        status: Callable[[], Any] | None = None,
        only_metrics: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.core = core
        self.page = page
        self.status = status
        self.only_metrics = only_metrics
        self.limits = limits or Limits()
        self.buffer = memoryview(bytearray(_RECEIVE))
        self.connections: set[_Connection] = set()
        self.draining = False
        self.tick = 0  # seconds since the start, near enough for time limits
        self._routes: dict[bytes, _Route | None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    def connect(self) -> asyncio.BufferedProtocol:
        """The protocol of one more connection."""
        return _Connection(self)

    async def listen(self, host: str, port: int) -> int:
        """Begin to serve; answers the port, which is a free one where 0 was asked. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self.connect, host, port, backlog=1024)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve HTTP on {host}:{port}: {getattr(error, 'strerror', None) or error}; "
                "choose another address or port, or stop what holds it"
            ) from None
        self._timer = loop.call_later(1, self._tick)
        return cast(int, self._server.sockets[0].getsockname()[1])

    async def stop(self, grace: float) -> None:
        """Take no more connections, answer what was asked within `grace` seconds, then break off what is left."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.connections):
            connection.retire()
        if self.connections:
            try:
                await asyncio.wait_for(self._empty.wait(), grace)
            except TimeoutError:
                for connection in list(self.connections):
                    if connection.transport is not None:
                        connection.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(1, self._tick)
        self.sweep(1)

    def sweep(self, seconds: int) -> None:
        """So much time has passed: look after every connection."""
        self.tick += seconds
        for connection in list(self.connections):
            connection.check()

    def lost(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        if self.draining and not self.connections:
            self._empty.set()

    # Requests

    def start(self, exchange: _Exchange) -> None:
        """Do what a request asks."""
        if b"content-encoding" in exchange.headers:
            self._inflate(exchange)
            return
        route = self.route(exchange.url)
        if route is None:
            exchange.refuse(404, "Not Found")
            return
        method = b"GET" if exchange.method == b"HEAD" else exchange.method
        handler = route.handlers.get(method)
        if handler is None:
            exchange.refuse(405, "Method Not Allowed", b"Allow: %s\r\n" % b", ".join(route.handlers))
        elif route.infer:
            exchange.infer(self.core, route)
        else:
            try:
                payload = handler(self, route, exchange.body)
            except CotenantError as error:
                exchange.fail(error)
                return
            if inspect.iscoroutine(payload):
                task = asyncio.get_running_loop().create_task(payload)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(exchange.awaited)
            else:
                exchange.reply(payload)

    def _inflate(self, exchange: _Exchange) -> None:
        """Unpack the body of a request in a thread: a small one may hold a large one."""
        encoding = exchange.headers.pop(b"content-encoding").lower()
        if encoding == b"identity":
            self.start(exchange)
            return
        if encoding not in (b"gzip", b"deflate"):
            exchange.refuse(415, f"content encoding {encoding!r} is not known here; there are gzip and deflate")
            return

        def unpacked(work: asyncio.Future[bytes | None]) -> None:
            error = work.exception()
            if isinstance(error, zlib.error):
                exchange.refuse(400, f"the body is no {encoding.decode()}: {error}")
                return
            body = work.result()
            if body is None:
                exchange.refuse(413, f"a body of more than {self.limits.body} bytes, unpacked, which are the most")
            elif exchange.connection.transport is not None:
                exchange.body = body
                self.start(exchange)

        work = asyncio.get_running_loop().run_in_executor(None, _inflate, exchange.body, self.limits.body)
        work.add_done_callback(unpacked)

    def route(self, url: bytes) -> _Route | None:
        try:
            return self._routes[url]
        except KeyError:
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            route = _find(url)
            if self.only_metrics and route is not None and HttpServer._metrics not in route.handlers.values():
                route = None
            self._routes[url] = route
            return route

    # What the addresses answer. Each gets the route and the body.

    def _page(self, route: _Route, body: Data) -> Any:
        if self.page is None:
            raise NotFoundError("Not Found")
        return _Text(self.page(), _HTML)

    def _status(self, route: _Route, body: Data) -> Any:
        if self.status is None:
            raise NotFoundError("Not Found")
        return self.status()

    def _metrics(self, route: _Route, body: Data) -> Any:
        return _Text(self.core.metrics(), _PROMETHEUS)

    def _server_metadata(self, route: _Route, body: Data) -> Any:
        return {"name": NAME, "version": VERSION, "extensions": EXTENSIONS}

    def _live(self, route: _Route, body: Data) -> Any:
        if not self.core.live():
            raise InvalidError("the server is not live")
        return {"live": True}

    def _ready(self, route: _Route, body: Data) -> Any:
        if not self.core.ready():
            raise InvalidError("the server is not ready")
        return {"ready": True}

    def _model_ready(self, route: _Route, body: Data) -> Any:
        if not self.core.model_ready(route.model, route.version):
            raise InvalidError(f"model {route.model!r} is not ready")
        return {"name": route.model, "ready": True}

    def _models(self, route: _Route, body: Data) -> Any:
        return {"models": [entry.name for entry in self.core.index(ready=True)]}

    def _model_metadata(self, route: _Route, body: Data) -> Any:
        info = self.core.model(route.model, route.version)
        return {
            "name": info.name,
            "versions": [info.version],
            "platform": info.platform,
            "inputs": info.inputs,
            "outputs": info.outputs,
        }

    def _config(self, route: _Route, body: Data) -> Any:
        return self.core.config(route.model, route.version)

    def _statistics(self, route: _Route, body: Data) -> Any:
        return {"model_stats": self.core.statistics(route.model, route.version)}

    def _index(self, route: _Route, body: Data) -> Any:
        entries = self.core.index(ready=_object(body).get("ready") is True)
        return [{key: value for key, value in msgspec.structs.asdict(entry).items() if value} for entry in entries]

    async def _load(self, route: _Route, body: Data) -> Any:
        await self.core.load(route.model, _parameters(body))
        return _Text("")

    async def _unload(self, route: _Route, body: Data) -> Any:
        await self.core.unload(route.model, _parameters(body))
        return _Text("")

    def _trace_setting(self, route: _Route, body: Data) -> Any:
        return self.core.trace_setting(route.model)

    def _set_trace(self, route: _Route, body: Data) -> Any:
        return self.core.trace_setting(route.model, _object(body))

    def _log_settings(self, route: _Route, body: Data) -> Any:
        return self.core.log_settings()

    def _set_log(self, route: _Route, body: Data) -> Any:
        return self.core.log_settings(_object(body))

    def _no_regions(self, route: _Route, body: Data) -> Any:
        return []

    def _nothing(self, route: _Route, body: Data) -> Any:
        return _Text("")

    def _no_registration(self, route: _Route, body: Data) -> Any:
        raise UnsupportedError(
            "no shared memory is registered here; send tensors in binary, which is as fast on one host"
        )

    def _no_generate(self, route: _Route, body: Data) -> Any:
        raise UnsupportedError("generate is not offered here; use infer")

    def _no_repository(self, route: _Route, body: Data) -> Any:
        raise UnsupportedError("there is one model repository, and it is not named in the address")


_MODEL = r"/v2/models/(?P<model>[^/]+)"
_VERSION = rf"{_MODEL}(?:/versions/(?P<version>[0-9]+))?"
_REGION = r"/v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?"
_INFER = rf"{_VERSION}/infer"

_ADDRESSES: list[tuple[re.Pattern[str], dict[bytes, Callable[..., Any]]]] = [
    (re.compile(pattern), handlers)
    for pattern, handlers in (
        (_INFER, {b"POST": _Exchange.infer}),
        (r"/", {b"GET": HttpServer._page}),
        (r"/cotenant/status", {b"GET": HttpServer._status}),
        (r"/metrics", {b"GET": HttpServer._metrics}),
        (r"/v2", {b"GET": HttpServer._server_metadata}),
        (r"/v2/health/live", {b"GET": HttpServer._live}),
        (r"/v2/health/ready", {b"GET": HttpServer._ready}),
        (r"/v2/models", {b"GET": HttpServer._models}),
        (r"/v2/models/stats", {b"GET": HttpServer._statistics}),
        (rf"{_VERSION}", {b"GET": HttpServer._model_metadata}),
        (rf"{_VERSION}/ready", {b"GET": HttpServer._model_ready}),
        (rf"{_VERSION}/config", {b"GET": HttpServer._config}),
        (rf"{_VERSION}/stats", {b"GET": HttpServer._statistics}),
        (rf"{_VERSION}/generate(?:_stream)?", {b"POST": HttpServer._no_generate}),
        (rf"(?:/v2|{_MODEL})/trace/setting", {b"GET": HttpServer._trace_setting, b"POST": HttpServer._set_trace}),
        (r"/v2/logging", {b"GET": HttpServer._log_settings, b"POST": HttpServer._set_log}),
        (r"/v2/repository/index", {b"POST": HttpServer._index}),
        (r"/v2/repository/models/(?P<model>[^/]+)/load", {b"POST": HttpServer._load}),
        (r"/v2/repository/models/(?P<model>[^/]+)/unload", {b"POST": HttpServer._unload}),
        (r"/v2/repository/[^/]+/(?:index|models/[^/]+/(?:un)?load)", {b"POST": HttpServer._no_repository}),
        (rf"{_REGION}/status", {b"GET": HttpServer._no_regions}),
        (rf"{_REGION}/register", {b"POST": HttpServer._no_registration}),
        (rf"{_REGION}/unregister", {b"POST": HttpServer._nothing}),
    )
]


def _find(url: bytes) -> _Route | None:
    try:
        path = (httptools.parse_url(url).path or b"").decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        return None
    for pattern, handlers in _ADDRESSES:
        if match := pattern.fullmatch(path):
            groups = match.groupdict("")
            try:
                model = unquote_to_bytes(groups.get("model", "")).decode()
            except UnicodeDecodeError:
                return None
            return _Route(handlers, model, groups.get("version", ""), infer=pattern.pattern == _INFER)
    return None


def _header_length(headers: dict[bytes, bytes]) -> int | None:
    text = headers.get(b"inference-header-content-length")
    if text is None:
        return None
    if not text.isdigit():
        raise InvalidError(f"Inference-Header-Content-Length is {text!r}; it is a number of bytes")
    return int(text)


def _object(body: Data) -> dict[str, Any]:
    if not body:
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"the body is no JSON object: {error}") from None
    except RecursionError:
        raise MalformedError("the body is no JSON object: it is nested too deeply") from None


def _parameters(body: Data) -> dict[str, Any]:
    parameters = _object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise MalformedError("'parameters' is no JSON object")
    return parameters


@functools.lru_cache(maxsize=256)
def _encoding(accept: bytes, binary: bool) -> bytes | None:
    """The compression to use for a caller that accepts these.

    Numbers in binary hardly shrink, and libraries accept gzip without being asked: binary is compressed only for a
    caller that names one encoding and so means it.
    """
    weights: dict[bytes, bool] = {}
    for item in accept.lower().split(b","):
        name, _, weight = item.partition(b";")
        weights[name.strip()] = not re.fullmatch(rb"\s*q\s*=\s*0(\.0*)?\s*", weight)
    if binary and len(weights) > 1:
        return None
    return next((name for name in (b"gzip", b"deflate") if weights.get(name)), None)


def _deflate(body: Sequence[Data], encoding: bytes) -> bytes:
    # Level 1: the answer is under way sooner than a better one would be made.
    packer = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == b"gzip" else 15)
    return b"".join([*map(packer.compress, body), packer.flush()])


def _inflate(body: Data, limit: int) -> bytes | None:
    """None where there is more than `limit` bytes in it. Raises zlib.error."""
    unpacker = zlib.decompressobj(47)  # zlib or gzip, as its head says
    data = unpacker.decompress(body, limit + 1)
    if len(data) > limit:
        return None
    if not unpacker.eof:
        raise zlib.error("it ends too early")
    return data
