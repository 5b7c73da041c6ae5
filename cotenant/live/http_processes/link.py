"""Carry messages between two processes over a Unix socket: all of a round of the event loop in one frame."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from cotenant.errors import WorkerError
from cotenant.live.http_processes.event_loop import EventLoop
from cotenant.live.http_processes.messages import HEAD
from cotenant.worker.wire import MAX_MESSAGE, Inbox

logger = logging.getLogger(__name__)

CLOSED = "it closed its socket"  # the reason of a `Link` that has ended otherwise than by what is not the protocol

_In = TypeVar("_In")
_encoder = msgspec.msgpack.Encoder()


class Outbox:
    """Collect messages, and give them to `write` as one frame when the round of the event loop ends.

    failed: called with each message that cannot be encoded, and why. may_write: whether a frame may be written now;
    where not, `flush` is called again later.
    """

    def __init__(
        self,
        loop: EventLoop,
        write: Callable[[bytearray], None],
        failed: Callable[[object, Exception], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loop = loop
        self._write = write
        self._failed = failed
        self._may_write = may_write
        self._messages: list[object] = []
        self._due = False

    def send(self, message: object) -> None:
        """Send a message with the others of this round."""
        self._messages.append(message)
        if not self._due:
            self._due = True
            self._loop.call_soon(self.flush)

    @property
    def waiting(self) -> bool:
        return bool(self._messages)

    def flush(self) -> None:
        """Send what was collected."""
        self._due = False
        if not self._messages or not self._may_write():
            return
        messages, self._messages = self._messages, []
        for frame in encode_frames(messages, self._failed):
            self._write(frame)


def encode_frames(messages: list[object], failed: Callable[[object, Exception], None]) -> Iterator[bytearray]:
    """Encode messages, in as many frames as their size needs, each with its length before it. failed: called with each
    message that cannot be encoded or is too long for any frame, and why."""
    buffer = bytearray(HEAD.size)
    reason: Exception
    try:
        _encoder.encode_into(messages, buffer, HEAD.size)
    except Exception as error:  # noqa: BLE001  # msgspec raises many kinds
        reason = error
    else:
        if len(buffer) <= MAX_MESSAGE:
            HEAD.pack_into(buffer, 0, len(buffer) - HEAD.size)
            yield buffer
            return
        reason = WorkerError(f"a message of {len(buffer)} bytes; at most {MAX_MESSAGE} are sent")
    del buffer
    if len(messages) == 1:
        failed(messages[0], reason)
        return
    half = len(messages) // 2
    yield from encode_frames(messages[:half], failed)
    yield from encode_frames(messages[half:], failed)


class Link(Generic[_In]):
    """Hold this end of the socket. All methods belong to the event loop.

    kinds: the messages that come. take: called with each, and its frame's last one last; taken: after each frame. lost:
    called once, with the reason, when the other process has ended or sends what is not the protocol.
    """

    def __init__(
        self,
        connection: socket.socket,
        kinds: Any,
        take: Callable[[_In], None],
        *,
        taken: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        connection.setblocking(False)
        self._decoder = msgspec.msgpack.Decoder(list[kinds])
        self._take = take
        self._taken = taken
        self._lost = lost
        self._inbox = Inbox(connection)
        self._unsent = bytearray()
        self._open = True
        self._loop.add_reader(connection.fileno(), self.receive)

    def write(self, frame: bytearray) -> None:
        """Write a frame without blocking: what the socket does not take now follows later."""
        if not self._open:
            return
        if not self._unsent:
            self._unsent = frame
            self._push()
            if self._unsent:
                self._loop.add_writer(self._connection.fileno(), self._write_rest)
        else:
            self._unsent += frame

    def receive(self) -> None:
        """Take what has come, without blocking."""
        if not self._open:
            return
        try:
            ended = not self._inbox.fill()
        except BlockingIOError:
            return
        except ConnectionResetError:
            ended = True
        try:
            while self._open and (data := self._inbox.take()) is not None:
                for message in self._decoder.decode(data):
                    self._take_one(message)
                self._taken()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, WorkerError) as error:
            self._end(f"it broke the protocol: {error}")
            return
        if ended:
            self._end(CLOSED)

    def _take_one(self, message: _In) -> None:
        try:
            self._take(message)
        except WorkerError:
            raise
        except Exception:  # what is wrong with one request must not cost others theirs
            logger.exception("a message was lost: %s", type(message).__name__)

    def close(self) -> None:
        """Close this end. `lost` is not called."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()

    def _end(self, reason: str) -> None:
        if self._open:
            self.close()
            self._lost(reason)

    def _push(self) -> None:
        """Keep what the socket does not take, without a copy of it: a long rest takes many turns."""
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # the other process has ended, as `receive` will find out

    def _write_rest(self) -> None:
        self._push()
        if not self._unsent:
            self._loop.remove_writer(self._connection.fileno())
