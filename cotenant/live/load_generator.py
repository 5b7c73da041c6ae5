"""An open-loop load generator: requests are sent when they are due, whether or not earlier ones were answered.

A closed loop slows down with the server that it measures, and so hides what real callers would have seen. Here the
latency of a request counts from its submission, the wait for a connection included. How late that was, for want of CPU
time on this side, is the generator's fault and not the server's: the report gives it apart, as send lag (`lag`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from urllib.parse import quote, urlsplit

import httptools
import msgspec

from cotenant.core.model import Model
from cotenant.core.request import Outcome, Request
from cotenant.errors import ConfigError
from cotenant.measure.histogram import Histogram
from cotenant.measure.ledger import OutcomeLedger
from cotenant.measure.report import Report
from cotenant.runtime.dispatcher import HOPELESS, PASSED
from cotenant.workload.arrivals import Arrivals

_TIMER = 0.001  # seconds; uvloop and epoll both count in whole milliseconds
_MAX_BURST = 64  # requests sent in a row before responses are read
_TICK = 1.0  # seconds between two reports
_EXPIRED = (PASSED.encode(), HOPELESS.encode())


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body that each request of a model carries. headers: such as ``Inference-Header-Content-Length`` of the binary
    form."""

    content: bytes
    headers: Mapping[str, str] = {}

    def with_headers(self, more: Mapping[str, str]) -> RequestBody:
        """Return the same with further headers."""
        return RequestBody(content=self.content, headers={**self.headers, **more})


async def generate_load(
    address: str,
    models: Sequence[Model],
    bodies: Mapping[str, RequestBody],
    arrivals: Arrivals,
    seconds: float,
    *,
    on_tick: Callable[[Report], None] | None = None,
    connections: int = 512,
    grace: float = 10.0,
    tls: ssl.SSLContext | None = None,
) -> Report:
    """Send requests to ``http://host:port`` for some seconds, and return the report of their outcomes.

    arrivals: its sources are indices into `models`. on_tick: called with the report so far, once a second. connections:
    the most that are open; a request that finds none free waits for one, which counts. grace: seconds to wait for the
    last responses; a request without one has failed. tls: for ``https://host:port``.
    Raises ConfigError where nothing listens at the address.
    """
    host, port = _host_port(address, encrypted=tls is not None)
    client = _Client(host, port, [model.name for model in models], connections, tls)
    wires = [_wire(host, port, model.name, bodies[model.name]) for model in models]
    named = [(model.name, model.slo) for model in models]
    try:
        await client.connect()
    except OSError as error:
        raise ConfigError(
            f"no server answers at {address!r}: {error.strerror or error}; start one with `cotenant serve`"
        ) from None

    lag = Histogram()
    start = monotonic()
    next_tick = start + _TICK

    def report(elapsed: float) -> Report:
        return Report.of("live", models, client.ledgers, elapsed, lag=lag.quantile(0.99))

    try:
        sent = burst = 0
        for times, sources in arrivals:
            for offset, source in zip(times.tolist(), sources.tolist(), strict=True):
                due = start + offset
                # Timers are a millisecond coarse: what is due within half of one goes now, rather than late.
                while (wait := due - monotonic()) > _TIMER / 2 or burst >= _MAX_BURST:
                    burst = 0
                    await asyncio.sleep(max(0.0, min(wait, next_tick - monotonic())))
                    if (now := monotonic()) >= next_tick:
                        next_tick = now + _TICK
                        if on_tick is not None:
                            on_tick(report(now - start))
                name, slo = named[source]
                now = monotonic()
                client.send(Request(sent, name, now, now + slo), wires[source])
                lag.extend((max(0.0, now - due),))
                sent += 1
                burst += 1
        elapsed = max(seconds, monotonic() - start)
        await client.drain(start + elapsed + grace)
        return report(elapsed)
    finally:
        client.close()


def _host_port(address: str, *, encrypted: bool) -> tuple[str, int]:
    url = urlsplit(address if "//" in address else f"//{address}")
    try:
        port = url.port
    except ValueError:
        port = None
    if url.scheme not in ("", "https" if encrypted else "http") or not url.hostname or port is None:
        raise ConfigError(f"{address!r} is not the address of a server; write it as http://127.0.0.1:8000")
    return url.hostname, port


def _wire(host: str, port: int, model: str, body: RequestBody) -> bytes:
    name = f"[{host}]" if ":" in host else host
    lines = [
        f"POST /v2/models/{quote(model, safe='')}/infer HTTP/1.1",
        f"Host: {name}:{port}",
        f"Content-Length: {len(body.content)}",
        *(f"{header}: {value}" for header, value in body.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body.content


class _Client:
    """Open keep-alive connections as they are needed, and keep a ledger of each model's outcomes."""

    def __init__(self, host: str, port: int, names: Sequence[str], limit: int, tls: ssl.SSLContext | None) -> None:
        self.ledgers = {name: OutcomeLedger() for name in names}
        self._idle: list[_Connection] = []
        self._address = host, port
        self._limit = limit
        self._tls = tls
        self._open: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Request, bytes]] = deque()
        self._pending = 0
        self._drained: asyncio.Event | None = None
        self._closed = False

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: _Connection(self), *self._address, ssl=self._tls)

    def send(self, request: Request, wire: bytes) -> None:
        self._pending += 1
        if self._idle:
            self._idle.pop().send(request, wire)
        else:
            self._waiting.append((request, wire))
            self._grow()

    def _grow(self) -> None:
        room = not self._closed and len(self._open) + len(self._opening) < self._limit
        if room and len(self._waiting) > len(self._opening):
            task = asyncio.get_running_loop().create_task(self._open_one())
            self._opening.add(task)
            task.add_done_callback(self._on_opened)

    async def _open_one(self) -> None:
        try:
            await self.connect()
        except OSError:
            if self._waiting:
                self.ended(self._waiting.popleft()[0], Outcome.FAILED)

    def _on_opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        self._grow()

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)
        self.release(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if connection.request is not None:
            self.ended(connection.request, Outcome.FAILED)
        self._grow()

    def release(self, connection: _Connection) -> None:
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def ended(self, request: Request, outcome: Outcome) -> None:
        if self._closed:
            return
        self.ledgers[request.model].ended((request,), outcome, monotonic())
        self._pending -= 1
        if not self._pending and self._drained is not None:
            self._drained.set()

    async def drain(self, until: float) -> None:
        """Wait for the last responses; a request without one by then has failed."""
        if self._pending:
            self._drained = asyncio.Event()
            try:
                await asyncio.wait_for(self._drained.wait(), until - monotonic())
            except TimeoutError:
                unanswered = [connection.request for connection in self._open if connection.request is not None]
                for request in unanswered + [request for request, _ in self._waiting]:
                    self.ended(request, Outcome.FAILED)

    def close(self) -> None:
        self._closed = True
        for task in self._opening:
            task.cancel()
        for connection in self._open:
            connection.transport.abort()


class _Connection(asyncio.Protocol):
    """Carry one request at a time."""

    transport: asyncio.Transport

    def __init__(self, client: _Client) -> None:
        self.request: Request | None = None
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._error = b""

    def send(self, request: Request, wire: bytes) -> None:
        self.request = request
        self.transport.write(wire)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()  # whatever this is, it is not HTTP: `connection_lost` counts the request as failed

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost(self)

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._error += body

    def on_message_complete(self) -> None:
        request, self.request = self.request, None
        error, self._error = self._error, b""
        if request is None:
            self.transport.abort()  # a response to no request
            return
        self._client.ended(request, _outcome(self._parser.get_status_code(), error))
        if self._parser.should_keep_alive():
            self._client.release(self)
        else:
            self.transport.close()


def _outcome(status: int, error: bytes) -> Outcome:
    if status == 200:
        return Outcome.SERVED
    if status == 503:
        return Outcome.EXPIRED if any(reason in error for reason in _EXPIRED) else Outcome.REJECTED
    return Outcome.FAILED
