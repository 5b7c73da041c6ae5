"""Keep the open connections of a server, and what they share."""

from __future__ import annotations

import asyncio
from typing import Protocol

from cotenant.live.http.request_handler import RequestHandler
from cotenant.live.limits import Limits

_BUFFER = 1 << 16  # bytes read at once, of all but large bodies
_SMALL = 1 << 13  # the same before a body: many small requests at once would take everybody's time
_LEAST = 1 << 10  # the same from a caller that sends many requests together


class OpenConnection(Protocol):
    """What the table needs of a connection."""

    transport: asyncio.Transport | None

    def enforce_timeouts(self) -> None: ...

    def close_if_idle(self) -> None: ...


class ConnectionTable:
    """The open connections of a server, and what they share.

    buffer: what is read goes there first, or into a part of it. now: seconds since the start, near enough for
    time-outs. draining: each connection closes after the responses that it still has to give. empty: set once a
    draining server has no connection left.
    """

    def __init__(self, handler: RequestHandler, limits: Limits) -> None:
        self.handler = handler
        self.limits = limits
        self.open: set[OpenConnection] = set()
        self.buffer = memoryview(bytearray(_BUFFER))
        self.small_buffer = self.buffer[:_SMALL]
        self.least_buffer = self.buffer[:_LEAST]
        self.now = 0
        self.draining = False
        self.empty = asyncio.Event()

    def advance(self, seconds: int) -> None:
        """Advance the clock, and end connections that exceed their time-outs."""
        self.now += seconds
        self.handler.shedder.settle()
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

    def remove(self, connection: OpenConnection) -> None:
        self.open.discard(connection)
        if self.draining and not self.open:
            self.empty.set()
