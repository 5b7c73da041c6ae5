"""Serve methods of gRPC on a listening socket: listen, drain, stop."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from typing import cast

from cotenant.errors import ConfigError
from cotenant.live.access import Access
from cotenant.live.grpc.call import Method
from cotenant.live.grpc.connection import Connection
from cotenant.live.grpc.misuse import MAX_RAPID
from cotenant.live.grpc.shared import Shared
from cotenant.live.limits import MAX_BODY, Limits, MemoryBudget, grpc_limits

Services = Mapping[str, Mapping[str, Method]]  # by name of the service, methods by name


class GrpcListener:
    """Serve services over gRPC. message_size: of the largest request, in bytes. limits: of connections and memory.
    memory: what messages are counted in; a budget of its own where none is given. access: who may do what. tls: None to
    serve in the clear. log_access: write a line of the log for each call. rapid_resets: see `Misuse`."""

    def __init__(
        self,
        services: Services,
        *,
        message_size: int = MAX_BODY,
        limits: Limits | None = None,
        memory: MemoryBudget | None = None,
        access: Access | None = None,
        tls: ssl.SSLContext | None = None,
        log_access: bool = False,
        rapid_resets: int = MAX_RAPID,
    ) -> None:
        methods = {
            f"/{service}/{name}".encode(): method
            for service, methods in services.items()
            for name, method in methods.items()
        }
        self._shared = Shared(
            methods,
            access or Access(),
            message_size,
            limits or grpc_limits(),
            memory,
            log_access=log_access,
            rapid_resets=rapid_resets,
        )
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connect(self) -> asyncio.Protocol:
        """Return the protocol of one more connection."""
        return Connection(self._shared)

    async def listen(self, host: str, port: int) -> int:
        """Start to serve; return the port (a free one for port 0). Raises ConfigError."""
        loop = asyncio.get_running_loop()
        handshake = None if self._tls is None else self._shared.limits.head_timeout
        starting = loop.create_task(
            loop.create_server(self.connect, host, port, backlog=1024, ssl=self._tls, ssl_handshake_timeout=handshake)
        )
        try:
            self._server = await asyncio.shield(starting)
        except asyncio.CancelledError:
            (await starting).close()  # nobody else knows of it yet
            raise
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number is not None and number > 0 else str(error)  # of a name: negative
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise ConfigError(
                f"cannot serve gRPC on {address}: {reason}; choose another address or port, or stop what holds it"
            ) from None
        self._timer = loop.call_later(1, self._tick)
        return cast(int, self._server.sockets[0].getsockname()[1])

    async def stop(self, grace: float) -> None:
        """Reject new calls, finish those in flight within `grace` seconds, then abort the rest."""
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        shared = self._shared
        shared.draining = True
        for connection in list(shared.open):
            connection.drain()
        if not shared.open:
            return
        try:
            await asyncio.wait_for(shared.empty.wait(), grace)
        except TimeoutError:
            for connection in list(shared.open):
                connection.abort()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(1, self._tick)
        for connection in list(self._shared.open):
            connection.tick()
