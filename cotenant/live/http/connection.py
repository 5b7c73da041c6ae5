"""Serve one caller's connection: parse and start requests as they arrive, and answer them in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, cast

import httptools

from cotenant.errors import RequestError
from cotenant.live.http.connection_table import ConnectionTable
from cotenant.live.http.heads import HEADERS, LISTS, MAX_READ, MAX_WHOLE, KnownHead
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.request_handler import TOO_MUCH
from cotenant.live.http.response import EventStream, status_of
from cotenant.live.limits import MAX_DIGITS
from cotenant.live.oip import UNEXPECTED, public_message, rejection

logger = logging.getLogger(__name__)

_MIN_DIRECT = MAX_WHOLE  # bytes of a body from which on it is received straight into its final memory
_ALIGNMENT = 64  # alignment of the first binary tensor in shared memory, in bytes
_MAX_PIPELINED = 32  # requests of one connection that may wait for their responses
_LAGGING = 2  # of them while the event loop lags: other callers have one
_FEW = 4  # requests in one read; after more, the least is read at once: a caller that sends many waits for its turn
_CHUNK = 256  # bytes; of a body in chunks that are smaller the least is read at once: each costs as much as a large one
_SEPARATORS = 4  # bytes of a line of a head besides name and value
_LINGER = 5  # seconds that a caller whose request was cut short has to read the response


class _Rejected(Exception):  # noqa: N818
    """Stop the parser: the rest of this request is not worth reading."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
        self._completed = 0  # requests of which the last read had the end
        self._parts = 0  # of a body, in the last read
        self._caution = 0  # 2 where these were small, which a caller works off by two reads in larger parts
        self._unsent = 0
        self._unread = 0  # bytes of responses that the caller has not taken
        self._held = 0  # bytes of the body that is being received, as far as they are counted
        self._rejected: KnownHead | None = None  # whose rejection has still to be sent
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._expect_request()

    def _expect_request(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = self._in_body = self._upgrading = False
        self._direct = False  # what comes in goes straight into the body
        self._head_size = 0  # bytes of the head, and of the trailer, so far
        self._overhead = 0  # bytes since the parser last told of anything but headers
        self._progress = False
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
        self._drop_body()
        self._cancel_pending()
        self._handler.memory.used -= self._unread
        self._unread = 0
        self._table.remove(self)

    def eof_received(self) -> bool:
        # A closed connection and a half-closed one look the same from here; the latter are rare, so the caller is taken
        # to have left.
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._direct:
            return cast(memoryview, self._body)[self._filled :]
        # One buffer for all connections: nothing is left in it after buffer_updated.
        if self._in_body:
            return (self._table.buffer, self._table.small_buffer, self._table.least_buffer)[self._caution]
        return self._table.small_buffer if self._completed <= _FEW else self._table.least_buffer

    def buffer_updated(self, count: int) -> None:
        if self._discarding:
            return
        self._active = self._table.now
        if self._direct:
            self._filled += count
            self._held += count
            self._handler.memory.used += count
            if self._handler.memory.exceeded:
                self._cut_off(503, TOO_MUCH)
            elif self._filled == self._length:
                self.on_message_complete()
                self._expect_request()
            return
        if self._rejected is not None:
            self._send_rejection()
        lags = self._handler.shedder.read()
        if count <= MAX_READ and not self._in_head and not self._in_body and self._read_known(count, lags=lags):
            return
        self._progress = False
        self._completed = self._parts = 0
        try:
            self._feed(self._table.buffer[:count])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _Rejected):
                self._cut_off(error.__context__.status, str(error.__context__))
            else:
                logger.error("a connection ended in an error of the server", exc_info=error)
                self._cut_off(500, UNEXPECTED)
        except httptools.HttpParserError as error:
            self._cut_off(400, f"not HTTP/1.1: {error}")
        else:
            self._caution = 2 if self._parts * _CHUNK > count else max(self._caution - 1, 0)
            if self._in_body and isinstance(self._body, memoryview):
                self._direct = True
            elif self._progress:
                self._overhead = 0
            elif self._in_head or self._in_body:
                self._overhead += count
                if self._overhead > self._table.limits.head:
                    self._cut_off(431, self._too_large())

    def _feed(self, data: memoryview) -> None:
        """Parse bytes. The protocol never changes: a request to upgrade it is read again as if it had not asked."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrading:
                    return
                rest = data[upgrade.args[0] :]
            head = [self._parser.get_method() + b" " + self._url + b" HTTP/1.1"]
            head += [name + b": " + value for name, value in self._headers.items() if name != b"upgrade"]
            self._expect_request()
            self._parser.feed_data(b"\r\n".join([*head, b"", b""]))
            data = rest

    def pause_writing(self) -> None:
        self._write_blocked = True
        self._control_flow()

    def resume_writing(self) -> None:
        self._write_blocked = False
        self._handler.memory.used -= self._unread
        self._unread = 0
        self._control_flow()

    # The parser calls these.

    def on_message_begin(self) -> None:
        self._in_head = self._progress = True
        self._head_size = 0
        self._begun = self._table.now
        self._url = b""
        self._headers = {}

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + _SEPARATORS)
        # Not from the trailer of a chunked body.
        if self._in_head and (name := name.lower()) in HEADERS:
            if name in self._headers:
                if name not in LISTS:
                    raise _Rejected(400, f"more than one {name.decode()}")
                value = self._headers[name] + b", " + value
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._progress = False, True, True
        headers, limits = self._headers, self._table.limits
        if b"upgrade" in headers and self._parser.should_upgrade():
            return  # it comes again
        if b"host" not in headers or b"connection" in headers or not self._parser.should_keep_alive():
            self._check_version()
        if b"transfer-encoding" in headers and headers[b"transfer-encoding"].lower() != b"chunked":
            raise _Rejected(501, "unsupported transfer encoding; only chunked is supported")
        self._body, self._block, self._filled, self._start = b"", None, 0, 0
        self._length = int(headers.get(b"content-length", 0))
        if self._length > limits.body:
            raise _Rejected(413, f"a body of {self._length} bytes; at most {limits.body} are taken")
        if self._handler.access.authenticates and (self._length or b"transfer-encoding" in headers):
            self._check_access()
        if self._length >= _MIN_DIRECT:
            if self._handler.shedder.active:
                self._shed_body()
            if b"content-encoding" not in headers:
                self._allocate_body()
        if b"expect" in headers:
            if headers[b"expect"].lower() != b"100-continue":
                raise _Rejected(417, "unsupported expectation; only 100-continue is supported")
            if not self._pending and not self._discarding and self.transport is not None:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check_access(self) -> None:
        """Read no body of a caller without permission: memory is for those who have one."""
        method = self._parser.get_method()
        try:
            self._handler.admits(method, self._url, RequestCycle(self, method, self._url, self._headers))
        except RequestError as error:
            raise _Rejected(status_of(error), public_message(error)) from None

    def _shed_body(self) -> None:
        """Receive no large body that will be rejected for overload."""
        route = self._handler.route(self._url)
        if route is not None and route.infers and self._handler.sheds(route, b""):
            raise _Rejected(503, rejection(route.model))

    def on_body(self, data: bytes) -> None:
        self._progress = True
        self._parts += 1
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
            self._held += len(data)
            self._handler.memory.used += len(data)
            if end > self._table.limits.body:
                raise _Rejected(413, f"a body of more than {self._table.limits.body} bytes, which are the most")
            if self._handler.memory.exceeded:
                raise _Rejected(503, TOO_MUCH)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._completed += 1
        if self._discarding:
            return
        parser = self._parser
        request = RequestCycle(self, parser.get_method(), self._url, self._headers)
        if not parser.should_keep_alive() or parser.should_upgrade():
            if parser.should_upgrade() and request.method != b"CONNECT":
                self._upgrading = True
                return
            self._discarding = request.closes = True
        elif b"connection" in self._headers:
            request.http_1_0 = parser.get_http_version() == "1.0"
        request.body, request.block, request.start = self._body, self._block, self._start
        if self._held:
            request.held, self._held = self._held, 0
        self._body, self._block = b"", None
        self._pending.append(request)
        self._handler.start(request)
        if len(self._pending) >= _LAGGING:
            self._control_flow()

    # The requests call these.

    def closes_after(self, cycle: RequestCycle) -> bool:
        """Tell whether the server drains, and this is the last request of the connection."""
        return self._table.draining and bool(self._pending) and self._pending[-1] is cycle

    def hold(self, cycle: RequestCycle, size: int) -> None:
        """Count so many bytes of memory until the response is sent."""
        if self.transport is not None:
            cycle.held += size
            self._handler.memory.used += size

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
            if pending[0].stream is not None:
                self._open_stream(pending[0], pending[0].stream)
                break
            sent = pending.popleft()
            if sent.held:
                self._release(sent)
            if sent.closes:
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
        if self._read_paused:
            self._control_flow()  # a caller that is not read from is not seen to leave; the loop may lag no more
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
        """Close the connection unless a request is being read or answered; a stream ends."""
        if self.transport is not None and self._pending and self._pending[0].stream is not None:
            self.transport.close()
        if self._rejected is not None:
            self._send_rejection()
        elif self.transport is not None and not self._pending and not self._in_head and not self._in_body:
            self.transport.close()

    # Our own.

    def _open_stream(self, request: RequestCycle, stream: EventStream) -> None:
        """Send events until the caller leaves. Requests after it wait for ever."""
        request.response = None
        self._discarding = True
        if self._table.draining:
            self.close_if_idle()
        else:
            stream.open(self._send_events)

    def _send_events(self, data: bytes) -> None:
        """Send events, or leave them out while the caller does not take what it was sent."""
        if self.transport is not None and not self._write_blocked:
            self.transport.write(data)
            self._active = self._table.now

    def _read_known(self, count: int, *, lags: bool) -> bool:
        """Start or reject what was read, if it is one whole inference request whose head is known. Return whether it
        was. lags: the event loop does, so that requests may have to be shed."""
        handler = self._handler
        data = bytes(self._table.buffer[:count])
        head = handler.heads.find(data)
        if head is None or self.transport is None:
            return False
        if lags:
            if self._pending or self._table.draining or not handler.rejects_unread:
                return False
            if handler.sheds(head.route, data):
                self._rejected = head
                handler.shedder.reject(self._send_rejection)
                return True
        if not head.whole:
            return False
        request = RequestCycle(self, b"POST", head.url, head.headers)
        request.body = data[head.length :]
        self._pending.append(request)
        handler.start_known(request, head.route)
        if len(self._pending) >= _LAGGING:
            self._control_flow()
        return True

    def _send_rejection(self) -> None:
        """Send the rejection of a request that was not read, unless that was done or the caller has left."""
        request, self._rejected = self._rejected, None
        if request is None or self.transport is None or self.transport.is_closing():
            return
        self._active = self._table.now
        self.transport.write(request.rejection)
        if request.closes or self._table.draining:
            self._discarding = True
            self.transport.close()

    def _count_head(self, size: int) -> None:
        """Reject a head or trailer that is too large. The parser tells of a header once it has all of it."""
        self._head_size += size
        if self._head_size > self._table.limits.head:
            raise _Rejected(431, self._too_large())

    def _too_large(self) -> str:
        return f"the head or trailer of this request is above {self._table.limits.head} bytes"

    def _check_version(self) -> None:
        """Reject a version that is not spoken here, and a request of HTTP/1.1 without a host."""
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Rejected(505, f"HTTP/{version} is not supported; use HTTP/1.1")
        if version == "1.1" and b"host" not in self._headers:
            raise _Rejected(400, "no Host, which every request of HTTP/1.1 has")

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
        """Reject a request without reading its end, after responding to those before it."""
        if self._discarding:
            return
        self._discarding = self._cut_short = True
        self._in_head = self._in_body = self._direct = False
        self._drop_body()
        headers = b"Retry-After: 1\r\n" if status == 503 else b""
        self._last_request(self._url).reject(status, message, headers)

    def _drop_body(self) -> None:
        self._body, self._block = b"", None
        self._handler.memory.used -= self._held
        self._held = 0

    def _release(self, request: RequestCycle) -> None:
        """Count a request's memory no more, unless the caller has still to take its response."""
        if self._write_blocked:
            self._unread += request.held
        else:
            self._handler.memory.used -= request.held
        request.held = 0

    def _last_request(self, url: bytes) -> RequestCycle:
        request = RequestCycle(self, b"", url, {})
        request.closes = True
        self._pending.append(request)
        return request

    def _cancel_pending(self) -> None:
        """Cancel what has no response yet: nobody will read it."""
        pending, self._pending = self._pending, deque()
        for request in pending:
            self._handler.memory.used -= request.held
            request.held = 0
            if request.stream is not None:
                request.stream.close()
            if request.handle is not None and request.response is None:
                self._handler.core.cancel(request.handle)

    def _control_flow(self) -> None:
        """Stop reading from a caller that does not take its responses, or waits for many."""
        most = _LAGGING if self._handler.shedder.active else _MAX_PIPELINED
        wanted = self._write_blocked or len(self._pending) >= most
        if wanted != self._read_paused and self.transport is not None and not self.transport.is_closing():
            self._read_paused = wanted
            if wanted:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
