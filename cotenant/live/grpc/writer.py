"""Send what the calls of a connection answer, in as few system calls as it takes."""

from __future__ import annotations

import asyncio

from cotenant.live.grpc.frames import END_HEADERS, HEADERS, MAX_FRAME, frame
from cotenant.live.grpc.headers import NO_TABLE, TABLE_SIZE

_COLLECTED = 64  # writes of at most a frame or a small call, after which they are sent within a turn


class FrameWriter:
    """Collect frames, and send them at the end of each turn of the event loop.

    transport: None where the connection is lost. blocked: the caller's socket takes nothing now. block_prefix: what the
    next block of headers begins with.
    """

    __slots__ = ("_loop", "_unsent", "_without_table", "block_prefix", "blocked", "transport")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.transport: asyncio.Transport | None = None
        self.blocked = False
        self.block_prefix = b""
        self._loop = loop
        self._unsent: list[bytes] = []
        self._without_table = False

    def limit_table(self, size: int) -> None:
        """Agree to a smaller table of headers than HTTP/2's default, as one has to. None is used here."""
        if size < TABLE_SIZE and not self._without_table:
            self._without_table, self.block_prefix = True, NO_TABLE

    def write(self, data: bytes) -> None:
        """Send bytes, with all others of this turn: a system call takes longer than a small call of gRPC."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(data)
        if len(self._unsent) >= _COLLECTED:
            self.flush()

    def write_headers(self, stream: int, block: bytes, flags: int = END_HEADERS) -> None:
        prefix, self.block_prefix = self.block_prefix, b""
        self.write(frame(HEADERS, flags, stream, prefix + block))

    def write_parts(self, parts: list[bytes | memoryview], size: int) -> None:
        """Send frames of `size` bytes of messages; what is large at once, so that a caller who takes no more is
        noticed."""
        if size < MAX_FRAME and parts:
            self.write(b"".join(parts))
        elif parts:
            self.flush()
            if self.transport is not None:
                self.transport.writelines(parts)

    def flush(self) -> None:
        """Send what is collected."""
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            if self.transport is not None:
                self.transport.write(b"".join(unsent))
