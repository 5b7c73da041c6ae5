"""Compose the HTTP front end: listen, drain, stop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cotenant.errors import ConfigError
from cotenant.live.access import Access
from cotenant.live.http.connection import Connection
from cotenant.live.http.connection_table import ConnectionTable
from cotenant.live.http.listener import Listener
from cotenant.live.http.load_shedding import LoadShedder
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.request_handler import RequestHandler
from cotenant.live.http.routes import Services
from cotenant.live.job_service import JobService
from cotenant.live.limits import Limits, MemoryBudget
from cotenant.live.oip import Core
from cotenant.live.page import PageFeed


def cannot_listen(what: str, host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    """Return the error for an address that HTTP, or what else it is, cannot be served on."""
    return ConfigError(
        f"cannot serve {what} on {host}:{port}: {getattr(error, 'strerror', None) or error}; "
        "choose another address or port, or stop what holds it"
    )


class HttpServer:
    """Serve a core over HTTP. page: feeds what is shown at ``/``; status: what ``/cotenant/status`` shows, as JSON;
    admission: what ``/cotenant/admission`` tells routers, as JSON;
    startup: says how far the start of the server is, empty once it has started; reload: has the settings read again, on
    a POST to ``/cotenant/reload``; jobs: answers below ``/cotenant/jobs``.

    only_metrics: offer nothing else, for an address that more people may reach. memory: what bodies and responses are
    counted in; a budget of its own where none is given. access: who may do what; by default
    everybody everything, but control is for the server's own machine. tls: None to serve in the clear. log_access:
    write a line of the log for each request. forward: answers all requests but those for inference, in place of the
    services above. shedder: decides what is rejected unread; one of its own where none is given.
    """

    def __init__(
        self,
        core: Core,
        *,
        page: PageFeed | None = None,
        status: Callable[[], Awaitable[Any]] | None = None,
        admission: Callable[[], Any] | None = None,
        startup: Callable[[], str] = lambda: "",
        reload: Callable[[], Awaitable[None]] | None = None,
        jobs: JobService | None = None,
        only_metrics: bool = False,
        limits: Limits | None = None,
        memory: MemoryBudget | None = None,
        access: Access | None = None,
        tls: ssl.SSLContext | None = None,
        log_access: bool = False,
        forward: Callable[[RequestCycle], None] | None = None,
        shedder: LoadShedder | None = None,
    ) -> None:
        limits = limits or Limits()
        services = Services(
            core=core, page=page, status=status, admission=admission, startup=startup, reload=reload, jobs=jobs
        )
        self.shedder = shedder or LoadShedder(core, time.monotonic)
        self._handler = RequestHandler(
            services,
            only_metrics=only_metrics,
            limits=limits,
            memory=memory,
            access=access or Access(),
            shedder=self.shedder,
            log_access=log_access,
            forward=forward,
        )
        self._connections = ConnectionTable(self._handler, limits)
        self._listener = Listener(self.connect, tls, handshake=limits.head_timeout)
        self._timer: asyncio.TimerHandle | None = None
        self._what = "metrics" if only_metrics else "HTTP"

    @property
    def handler(self) -> RequestHandler:
        """What answers its requests, and can answer those that another process has received."""
        return self._handler

    def connect(self) -> asyncio.BufferedProtocol:
        """Return the protocol of one more connection."""
        return Connection(self._connections)

    def advance(self, seconds: int) -> None:
        """Advance the clock for the time-outs of connections."""
        self._connections.advance(seconds)

    async def listen(self, host: str, port: int) -> int:
        """Start to serve; return the port (a free one for port 0). Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            bound = await self._listener.open(host, port)
        except (OSError, OverflowError) as error:
            raise cannot_listen(self._what, host, port, error) from None
        self._attach(loop)
        return bound

    def adopt(self, listening: Sequence[socket.socket]) -> None:
        """Start to serve on sockets that listen."""
        self._listener.adopt(listening)
        self._attach(asyncio.get_running_loop())

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.shedder.attach(loop)
        self._timer = loop.call_later(1, self._tick)

    async def stop(self, grace: float) -> None:
        """Reject new connections, answer pending requests within `grace` seconds, then abort the rest."""
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        self._connections.drain()
        try:
            await asyncio.wait_for(self._connections.empty.wait(), grace)
        except TimeoutError:
            self._connections.abort()
        await self._handler.stop()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(1, self._tick)
        self._connections.advance(1)
