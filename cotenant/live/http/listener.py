"""Accept connections, several in a round of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # connections that wait to be accepted; the system may allow fewer
_ACCEPTED = 32  # connections that are accepted in a round: each takes some 50 µs
_PAUSE = 1.0  # seconds for which none is accepted where there are no descriptors or no memory for one
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


async def listening_sockets(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Return sockets that listen on a port (a free one for port 0), one for each address of the host. shared: further
    ones of this user may listen there, and the system deals connections out to all. Raises OSError, OverflowError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        sockets = []
        for family, _, _, _, (name, _, *scope) in found:
            listening = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sockets.append(listening)
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own
            listening.bind((name, port, *scope))
            listening.listen(_BACKLOG)
        stack.pop_all()
    return sockets


Failed = Callable[[asyncio.BufferedProtocol, str, OSError], None]


def log_failed(protocol: asyncio.BufferedProtocol, host: str, error: OSError) -> None:
    logger.debug("a connection from %s did not come about: %s", host, error)


class Listener:
    """Own the listening sockets. connect: returns the protocol of one more connection. tls: None to serve in the clear.
    handshake: seconds in which TLS has to be set up. failed: hears of a connection that did not come about: its
    protocol, the host that it came from, and the error.

    The event loop's own server would accept one connection in each of its rounds, as libuv does. Where rounds take
    milliseconds, callers then wait for seconds until they are accepted, or the system drops their connections.
    """

    def __init__(
        self,
        connect: Callable[[], asyncio.BufferedProtocol],
        tls: ssl.SSLContext | None,
        failed: Failed = log_failed,
        *,
        handshake: float = 10.0,
    ) -> None:
        self._connect = connect
        self._tls = tls
        self._handshake = None if tls is None else handshake
        self._failed = failed
        self._sockets: list[socket.socket] = []
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Start to accept; return the port (a free one for port 0). Raises OSError, OverflowError."""
        self.adopt(await listening_sockets(host, port))
        return int(self._sockets[0].getsockname()[1])

    def adopt(self, listening: Sequence[socket.socket]) -> None:
        """Start to accept from sockets that listen."""
        self._sockets += listening
        for each in listening:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    def close(self) -> None:
        """Accept no further connections. Those that are open stay so."""
        for timer in self._paused.values():
            timer.cancel()
        self._paused.clear()
        for listening in self._sockets:
            if listening.fileno() >= 0:
                with contextlib.suppress(RuntimeError):  # there is no loop: it never accepted any
                    asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> None:
        """Accept connections, as many as a round has time for. Those that are left make another round."""
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED):
            try:
                accepted, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    continue  # that caller has left already
                logger.warning("no connection is accepted for %g s: %s", _PAUSE, error.strerror)
                loop.remove_reader(listening)
                self._paused[listening] = loop.call_later(_PAUSE, self._resume, listening)
                return
            accepted.setblocking(False)
            task = loop.create_task(self._open(accepted, address[0]))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _open(self, accepted: socket.socket, host: str) -> None:
        loop, protocol = asyncio.get_running_loop(), self._connect()
        try:
            await loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=self._handshake
            )
        except OSError as error:  # the caller left, or its handshake failed
            accepted.close()
            self._failed(protocol, host, error)
