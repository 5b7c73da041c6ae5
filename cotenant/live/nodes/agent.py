"""Offer this machine's devices to one front end at a time."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import cast

from cotenant.errors import ConfigError
from cotenant.live.http.listener import Listener
from cotenant.live.nodes.link import SILENCE, Link
from cotenant.live.nodes.session import HANDSHAKE, BusyError, NodeOffer, Session
from cotenant.live.nodes.tls_failures import TlsFailures

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32


class Agent:
    """Listen for front ends, and let one of them have the node: for as long as its connection lives, and until what ran
    for it has ended.

    tokens: any of which a front end has to know; none: whoever reaches the address is served.
    """

    def __init__(self, offer: NodeOffer, tokens: Sequence[str], tls: ssl.SSLContext | None = None) -> None:
        self._offer = offer
        self._tokens = tokens
        self._tls = tls
        self._tls_failures = TlsFailures()
        self._server: asyncio.Server | Listener | None = None
        self._sessions: set[Session] = set()
        self._owner: Session | None = None
        self._front_end = self._name = self._host = ""  # the owner's: its identity, and what it calls this node
        self._idle = asyncio.Event()
        self._idle.set()

    async def listen(self, host: str, port: int) -> int:
        """Start to listen; return the port. Raises ConfigError."""
        try:
            return await self._listen(host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot offer this node on {host}:{port}: {getattr(error, 'strerror', None) or error}; choose another "
                "address or port, or stop what holds it"
            ) from None

    async def _listen(self, host: str, port: int) -> int:
        if self._tls is not None:  # of a handshake that failed the loop's own server would not tell
            self._server = listener = Listener(self._connect, self._tls, self._tls_failed, handshake=HANDSHAKE)
            return await listener.open(host, port)
        self._server = server = await asyncio.get_running_loop().create_server(self._connect, host, port)
        return int(server.sockets[0].getsockname()[1])

    def _tls_failed(self, link: asyncio.BufferedProtocol, host: str, error: OSError) -> None:
        self._tls_failures.add(host, error)
        cast(Link, link).abort(f"TLS failed: {error}")

    async def stop(self, reason: str) -> None:
        """Listen no longer, and end what runs for the front end."""
        if self._server is not None:
            self._server.close()
        for session in list(self._sessions):
            session.link.close(reason)
        await self._idle.wait()

    @property
    def front_end(self) -> str:
        """Who has the node, in words; empty where nobody has."""
        return self._host if self._owner is not None else ""

    def _connect(self) -> asyncio.BufferedProtocol:
        session = Session(self._offer, self._tokens, self._claim, self._ended)
        self._sessions.add(session)
        self._idle.clear()
        asyncio.get_running_loop().call_soon(self._connected, session)
        return session.link

    def _connected(self, session: Session) -> None:
        if len(self._sessions) > MAX_CONNECTIONS:
            session.link.close("too many connections at once", busy=True)
            return
        session.connected()

    def _claim(self, session: Session, front_end: str, name: str, host: str) -> None:
        owner = self._owner
        if owner is not None:
            if owner.link.is_over:
                raise BusyError(f"the workers of {self._host} are still ending; try again")
            if front_end != self._front_end:
                raise BusyError(
                    f"front end {self._host} has this node, until it has been silent for {SILENCE:g} s: a node serves"
                    " one front end at a time"
                )
            if name != self._name:
                raise BusyError(
                    f"this front end has this node already, as {self._name}: {name} is the same under another address;"
                    " remove one of the two"
                )
            owner.link.abort("its front end has connected anew")
            raise BusyError("the session before this one is still ending; try again")
        self._owner, self._front_end, self._name, self._host = session, front_end, name, host

    def _ended(self, session: Session) -> None:
        self._sessions.discard(session)
        if session is self._owner:
            self._owner = None
            logger.info("the node is free")
        if not self._sessions:
            self._idle.set()
