"""One caller's connection: what it sends is parsed and started at once, and answered in order."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools

from cotenant.live.http.request_cycle import RequestCycle

if TYPE_CHECKING:
    from cotenant.live.http.server import HttpServer

_DIRECT = 1 << 15  # bodies from this size on are received where they will stay
_ALIGNMENT = 64  # of the first binary tensor in shared memory
_PIPELINED = 32  # requests of one connection that may wait for their answers
_LINGER = 5  # seconds that a caller who was refused in mid-sentence has to read why

# Of the others nothing is kept.
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


class _Refused(Exception):  # noqa: N818
    """Stops the parser: the rest of this request is not worth reading."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection(asyncio.BufferedProtocol):
    """One caller. What it sends is parsed and started at once, and answered in order."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.pending: deque[RequestCycle] = deque()
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
        if len(self.server.connections) > self.server.limits.connections:
            self._turn_away()

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
        body, start = self.body, self.filled
        self.filled = end = start + len(data)
        if isinstance(body, memoryview):
            body[start:end] = data
        elif not body:
            self.body = data
        else:
            if not isinstance(body, bytearray):
                self.body = body = bytearray(body)
            body += data
            if end > self.server.limits.body:
                raise _Refused(413, f"a body of more than {self.server.limits.body} bytes, which are the most")

    def on_message_complete(self) -> None:
        self.in_body = False
        if self.deaf:
            return
        parser = self.parser
        exchange = RequestCycle(self, parser.get_method(), self.url, self.headers)
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
        if route is not None and route.infers and header is not None and header.isdigit():
            self.start = -int(header) % _ALIGNMENT
            self.block = self.server.core.allocate(self.start + self.length)
        if self.block is None:
            self.body = memoryview(bytearray(self.length))
        else:
            self.body = self.block.view[self.start : self.start + self.length]

    def _turn_away(self) -> None:
        """There are too many; where files run out, no worker that died could be started again."""
        self.deaf = True
        exchange = RequestCycle(self, b"", b"", {})
        exchange.last = True
        self.pending.append(exchange)
        exchange.refuse(503, "too many connections; use those that are open for more requests", b"Retry-After: 1\r\n")

    def _cut_off(self, status: int, message: str) -> None:
        """Answer a request whose end will not be read, after those before it."""
        if self.deaf:
            return
        self.deaf = self.cut = True
        self.in_head = self.in_body = self.direct = False
        self.body, self.block = b"", None
        exchange = RequestCycle(self, b"", self.url, {})
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
        elif self.in_body and not self.paused:
            if quiet > limits.stall:
                self._cut_off(408, f"the body of this request stopped for more than {limits.stall} s")
            elif now - self.began > 2 * limits.stall + self.filled / limits.pace:
                self._cut_off(408, f"the body of this request comes at less than {limits.pace} bytes/s")
        elif not self.pending and quiet > limits.idle:
            transport.close()

    def retire(self) -> None:
        """The server stops: finish what was asked."""
        if self.transport is not None and not self.pending and not self.in_head and not self.in_body:
            self.transport.close()
