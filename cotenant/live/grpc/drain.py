"""Tell a caller that its connection ends, in time for the calls that are on their way (RFC 9113, 6.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cotenant.live.grpc import frames
from cotenant.live.grpc.frames import ErrorCode
from cotenant.live.grpc.writer import FrameWriter

NOTICE = 1.0  # seconds after which calls are refused though the caller has not said that it knows
_PING = b"draining"


class Drain:
    """Announce the end by a GOAWAY that refuses no call yet, and a ping; then, once the ping is answered, by one that
    names the last call that is served.

    last: that call's stream; None while calls are still taken. refuse: called when they are not any more.
    """

    def __init__(self, writer: FrameWriter, loop: asyncio.AbstractEventLoop, refuse: Callable[[], None]) -> None:
        self.last: int | None = None
        self._writer = writer
        self._loop = loop
        self._refuse = refuse
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Announce the end, unless that was done."""
        if self._timer is None and self.last is None:
            self._writer.write(frames.goaway(frames.MAX_WINDOW, ErrorCode.NO_ERROR))
            self._writer.write(frames.frame(frames.PING, 0, 0, _PING))
            self._timer = self._loop.call_later(NOTICE, self._refuse)

    def answers(self, payload: bytes) -> bool:
        """Return whether this is the answer to the ping: all calls that began before it are here."""
        return self._timer is not None and payload == _PING

    def end(self, last: int) -> None:
        """Say which call is the last, unless that was done."""
        self.stop()
        if self.last is None:
            self.last = last
            self._writer.write(frames.goaway(last, ErrorCode.NO_ERROR))

    def stop(self) -> None:
        """Wait for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
