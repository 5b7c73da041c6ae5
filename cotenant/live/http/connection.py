"""One caller's connection: requests are parsed and started as they come, and answered in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, cast

import httptools

from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.request_handler import RequestHandler
from cotenant.live.limits import MAX_DIGITS, Limits
from cotenant.live.oip import UNEXPECTED

logger = logging.getLogger(__name__)

_BUFFER = 1 << 16  # bytes read at once, of all but large bodies
_MIN_DIRECT = 1 << 15  # bytes of a body from which it is received where it will stay
_ALIGNMENT = 64  # of the first binary tensor in shared memory
_MAX_PIPELINED = 32  # requests of one connection that may wait for their responses
_LINGER = 5  # seconds that a caller whose request was cut short has to read why

# Of the others nothing is kept.
_HEADERS = frozenset(
    (
        b"accept",
        b"accept-encoding",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"inference-header-content-length",
    )
)


class _Rejected(Exception):  # noqa: N818
    """Stop the parser: the rest of this request is not worth reading."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ConnectionTable:
    """The open connections of a server, and what they share.

    now: seconds since the start, near enough for time-outs. draining: each connection closes after the responses that
    it still has to give. empty: set once a draining server has no connection left.
    """

    def __init__(self, handler: RequestHandler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.open: set[Connection] = set()
        self.buffer = memoryview(bytearray(_BUFFER))
        self.now = 0
        self.draining = False
        self.empty = asyncio.Event()

    def advance(self, seconds: int) -> None:
        """Move the time on, and end what takes too long."""
        self.now += seconds
        for connection in list(self.open):
            connection.enforce_timeouts()

    def drain(self) -> None:
        """Close every connection once it has given its responses."""
        self.draining = True
        for connection in list(self.open):
            connection.close_if_idle()
        if not self.open:
            self.empty.set()

    def abort(self) -> None:
        """Break off every connection."""
        for connection in list(self.open):
            if connection.transport is not None:
                connection.transport.abort()

    def remove(self, connection: Connection) -> None:
        self.open.discard(connection)
        if self.draining and not self.open:
            self.empty.set()


class Connection(asyncio.BufferedProtocol):
    """Parse what one caller sends, start its requests, and write their responses in order.

    discarding: what comes in is thrown away. cut_short: a request was rejected before its end. write_blocked: the
    caller does not take its responses. read_paused: nothing is read from the caller. active: when something last
    moved; begun: when the request that is being read began.
    """

    def __init__(self, table: ConnectionTable) -> None:
        self._table = table
        self._handler = table.handler
        self.transport: asyncio.Transport | None = None
        self._pending: deque[RequestCycle] = deque()
        self._discarding = False
        self._cut_short = False
        self._write_blocked = False
        self._read_paused = False
        self._active = self._begun = table.now
        self._unsent = 0
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._expect_request()

    def _expect_request(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = self._in_body = False
        self._direct = False  # what comes in goes straight into the body
        self._head_size = 0
        self._body: bytes | bytearray | memoryview = b""
        self._block: Any = None
        self._length = self._filled = self._start = 0

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._table.open.add(self)
        if len(self._table.open) > self._table.limits.connections:
            self._reject_connection()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._body, self._block = b"", None
        self._cancel_pending()
        self._table.remove(self)

    def eof_received(self) -> bool:
        # To close, and to have said all, look the same from here. Those who do the latter are few; the others left.
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._direct:
            return cast(memoryview, self._body)[self._filled :]
        # One buffer for all connections: nothing is left in it after buffer_updated.
        return self._table.buffer

    def buffer_updated(self, count: int) -> None:
        if self._discarding:
            return
        self._active = self._table.now
        if self._direct:
            self._filled += count
            if self._filled == self._length:
                self.on_message_complete()
                self._expect_request()
            return
        before = self._headers
        try:
            self._parser.feed_data(self._table.buffer[:count])
        except httptools.HttpParserUpgrade:
            return  # answered as if it had not asked
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _Rejected):
                self._cut_off(error.__context__.status, str(error.__context__))
            else:
                logger.error("a connection ended in an error of the server", exc_info=error)
                self._cut_off(500, UNEXPECTED)
        except httptools.HttpParserError as error:
            self._cut_off(400, f"not HTTP/1.1: {error}")
        else:
            if self._in_head and self._headers is before:
                self._head_size += count
                if self._head_size > self._table.limits.head:
                    self._cut_off(431, f"the head of this request is above {self._table.limits.head} bytes")
            elif self._in_body and isinstance(self._body, memoryview):
                self._direct = True

    def pause_writing(self) -> None:
        self._write_blocked = True
        self._control_flow()

    def resume_writing(self) -> None:
        self._write_blocked = False
        self._control_flow()

    # The parser calls these.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_size = 0
        self._begun = self._table.now
        self._url = b""
        self._headers = {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Not from the trailer of a chunked body.
        if self._in_head and (name := name.lower()) in _HEADERS:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        headers, limits = self._headers, self._table.limits
        self._body, self._block, self._filled, self._start = b"", None, 0, 0
        self._length = int(headers.get(b"content-length", 0))
        if self._length > limits.body:
            raise _Rejected(413, f"a body of {self._length} bytes; at most {limits.body} are taken")
        if self._length >= _MIN_DIRECT and b"content-encoding" not in headers:
            self._allocate_body()
        if b"expect" in headers and not self._pending and not self._discarding and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        body, start = self._body, self._filled
        self._filled = end = start + len(data)
        if isinstance(body, memoryview):
            body[start:end] = data
        elif not body:
            self._body = data
        else:
            if not isinstance(body, bytearray):
                self._body = body = bytearray(body)
            body += data
            if end > self._table.limits.body:
                raise _Rejected(413, f"a body of more than {self._table.limits.body} bytes, which are the most")

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._discarding:
            return
        parser = self._parser
        request = RequestCycle(self, parser.get_method(), self._url, self._headers)
        if not parser.should_keep_alive() or parser.should_upgrade():
            self._discarding = request.closes = True
        elif b"connection" in self._headers:
            request.http_1_0 = parser.get_http_version() == "1.0"
        request.body, request.block, request.start = self._body, self._block, self._start
        self._body, self._block = b"", None
        self._pending.append(request)
        self._handler.start(request)
        if len(self._pending) >= _MAX_PIPELINED:
            self._control_flow()

    # The requests call these.

    def closes_after(self, cycle: RequestCycle) -> bool:
        """Tell whether the server drains, and this is the last request of the connection."""
        return self._table.draining and bool(self._pending) and self._pending[-1] is cycle

    def flush(self) -> None:
        """Send the responses that are complete, up to the first that is not."""
        transport, pending = self.transport, self._pending
        if transport is None:
            return
        while pending and (response := pending[0].response) is not None:
            if len(response) == 1:
                transport.write(response[0])
            else:
                transport.writelines(response)
            if pending.popleft().closes:
                self._discarding = True
                self._cancel_pending()
                if self._cut_short and transport.can_write_eof():
                    # Closed at once, the connection would be reset by what is still coming, and the response lost.
                    transport.write_eof()
                else:
                    transport.close()
                break
        self._active = self._table.now
        if self._read_paused:
            self._control_flow()

    # The table calls these.

    def enforce_timeouts(self) -> None:
        """End what takes too long. Called once a second."""
        transport, limits, now = self.transport, self._table.limits, self._table.now
        if transport is None:
            return
        unsent = transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._active = unsent, now
        quiet, elapsed = now - self._active, now - self._begun
        if unsent:
            if quiet > limits.stall_timeout:
                transport.abort()
        elif self._cut_short:
            if quiet > _LINGER:
                transport.abort()
        elif self._in_head:
            if elapsed > limits.head_timeout:
                self._cut_off(408, f"the head of this request took more than {limits.head_timeout} s")
        elif self._in_body and not self._read_paused:
            if quiet > limits.stall_timeout:
                self._cut_off(408, f"the body of this request stopped for more than {limits.stall_timeout} s")
            elif elapsed > 2 * limits.stall_timeout + self._filled / limits.body_rate:
                self._cut_off(408, f"the body of this request comes at less than {limits.body_rate} bytes/s")
        elif not self._pending and quiet > limits.idle_timeout:
            transport.close()

    def close_if_idle(self) -> None:
        """Close the connection unless a request is being read or answered."""
        if self.transport is not None and not self._pending and not self._in_head and not self._in_body:
            self.transport.close()

    # Our own.

    def _allocate_body(self) -> None:
        """Choose the memory of a large body: what workers share for a binary one, with its first tensor aligned."""
        route = self._handler.route(self._url)
        header = self._headers.get(b"inference-header-content-length")
        if route is not None and route.infers and header is not None and header.isdigit() and len(header) <= MAX_DIGITS:
            self._start = -int(header) % _ALIGNMENT
            self._block = self._handler.core.allocate(self._start + self._length)
        if self._block is None:
            self._body = memoryview(bytearray(self._length))
        else:
            self._body = self._block.view[self._start : self._start + self._length]

    def _reject_connection(self) -> None:
        """Turn down one connection too many: where files run out, no worker that died could be started again."""
        self._discarding = True
        request = self._last_request(b"")
        request.reject(503, "too many connections; use those that are open for more requests", b"Retry-After: 1\r\n")

    def _cut_off(self, status: int, message: str) -> None:
        """Respond to a request whose end will not be read, after those before it."""
        if self._discarding:
            return
        self._discarding = self._cut_short = True
        self._in_head = self._in_body = self._direct = False
        self._body, self._block = b"", None
        self._last_request(self._url).reject(status, message)

    def _last_request(self, url: bytes) -> RequestCycle:
        request = RequestCycle(self, b"", url, {})
        request.closes = True
        self._pending.append(request)
        return request

    def _cancel_pending(self) -> None:
        """Cancel what has no response yet: nobody will read it."""
        pending, self._pending = self._pending, deque()
        for request in pending:
            if request.handle is not None and request.response is None:
                self._handler.core.cancel(request.handle)

    def _control_flow(self) -> None:
        """Read no further from a caller who does not take its responses, or waits for many."""
        wanted = self._write_blocked or len(self._pending) >= _MAX_PIPELINED
        if wanted != self._read_paused and self.transport is not None and not self.transport.is_closing():
            self._read_paused = wanted
            if wanted:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
