"""The server: listens, keeps its connections to their time limits, and has done what their requests ask."""

from __future__ import annotations

import asyncio
import inspect
import resource
import sys
import zlib
from collections.abc import Callable
from typing import Any, cast

import msgspec

from cotenant.errors import ConfigError, CotenantError
from cotenant.live.http.connection import Connection
from cotenant.live.http.encoding import inflate
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.routes import Route, find_route, metrics
from cotenant.live.oip import Core

_RECEIVE = 1 << 16  # bytes read at once, of all but large bodies
_ROUTES = 4096  # addresses that are remembered


def _most_connections() -> int:
    """Three in four of the files that this process may open: workers, models and gRPC need some, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files * 3 // 4


class Limits(msgspec.Struct, frozen=True):
    """body, head: bytes of a request. connections: at once; more are turned away. idle, begin, stall: seconds, kept to
    within one: how long a connection may be idle between requests, how long the head of one may take, and how long
    nothing may move within a body or an answer. A body may take twice `stall`, and as long as `pace` bytes/s do."""

    body: int = 1 << 30
    head: int = 1 << 16
    connections: int = msgspec.field(default_factory=_most_connections)
    idle: int = 75
    begin: int = 10
    stall: int = 30
    pace: int = 1 << 10


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
        self.connections: set[Connection] = set()
        self.draining = False
        self.tick = 0  # seconds since the start, near enough for time limits
        self._routes: dict[bytes, Route | None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    def connect(self) -> asyncio.BufferedProtocol:
        """The protocol of one more connection."""
        return Connection(self)

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

    def lost(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self.draining and not self.connections:
            self._empty.set()

    # Requests

    def start(self, exchange: RequestCycle) -> None:
        """Do what a request asks."""
        if b"content-encoding" in exchange.headers:
            self._inflate(exchange)
            return
        route = self.route(exchange.url)
        if route is None:
            exchange.refuse(404, "Not Found")
            return
        method = b"GET" if exchange.method == b"HEAD" else exchange.method
        if method not in route.handlers:
            exchange.refuse(405, "Method Not Allowed", b"Allow: %s\r\n" % b", ".join(route.handlers))
        elif (handler := route.handlers[method]) is None:
            exchange.infer(self.core, route.model, route.version)
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

    def _inflate(self, exchange: RequestCycle) -> None:
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

        work = asyncio.get_running_loop().run_in_executor(None, inflate, exchange.body, self.limits.body)
        work.add_done_callback(unpacked)

    def route(self, url: bytes) -> Route | None:
        try:
            return self._routes[url]
        except KeyError:
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            route = find_route(url)
            if self.only_metrics and route is not None and metrics not in route.handlers.values():
                route = None
            self._routes[url] = route
            return route
