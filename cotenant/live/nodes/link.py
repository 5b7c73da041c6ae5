"""Carry messages over a TCP connection: frames, heartbeats, and the end of it.

A frame is 16 bytes (a magic number, the size of the head in four bytes, that of the body in eight, little-endian), the
head, which is a message in msgpack, and the body, which is the bytes of large tensors. Bodies are received where they
stay (`allocate`), and sent from where they lie. A frame that is wrong ends its connection, and nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from cotenant.core.identity import decode_identity
from cotenant.errors import CotenantError, NodeError
from cotenant.live.nodes.messages import FromNode, Goodbye, Message, Ping, Pong, ToNode
from cotenant.worker.arena import Block

PING_INTERVAL = 0.2  # seconds
SILENCE = 0.7  # seconds without a byte after which a connection is cut
RTT_SAMPLES = 32
RTT_QUANTILE = 0.25  # others are late because this process was busy, most of all while it starts

MAX_FIRST_HEAD = 1 << 12  # bytes of a head before the session
MAX_HEAD = 1 << 26  # bytes of a head: tensors below `wire.LARGE`, and lists of files
MAX_BODY = 1 << 31  # bytes of a body
WRITE_LIMIT = 1 << 26  # bytes that wait to be sent above which a node reads nothing more, and no ping is answered
MAX_IDENTITY = 1 << 9  # characters
FAREWELL = 1.0  # seconds until a connection that is to close is aborted

MAGIC = b"CtN\x01"
_PREFIX = struct.Struct("<4sIQ")
_BUFFER = 1 << 16


def _read_identity(kind: type[Any], value: Any) -> Any:
    """Read an identity: the same few are in every frame, and to read one takes longer than all the rest of it."""
    if not isinstance(value, str) or len(value) > MAX_IDENTITY:
        raise NodeError("an identity is longer than any name")
    return decode_identity(kind, value)


_identity = cast(Callable[[type[Any], Any], Any], functools.lru_cache(maxsize=1 << 12)(_read_identity))

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_from_node = msgspec.msgpack.Decoder(FromNode, dec_hook=_identity)
_to_node = msgspec.msgpack.Decoder(ToNode, dec_hook=_identity)

Body = memoryview | None
_CONTROL = (Ping, Pong, Goodbye)  # what links say to each other


class Receiver:
    """Receive what comes over a link. Raises NodeError (or another CotenantError) for what ends it."""

    def received(self, link: Link, message: Message, body: Body, block: Block | None) -> None:
        """Take a message. block: what the body lies in, where that is in an arena."""
        raise NotImplementedError

    def link_lost(self, link: Link, reason: str) -> None:
        """Hear, once, that the connection is over."""
        raise NotImplementedError


class Link(asyncio.BufferedProtocol):
    """Be one end of a connection. at_node: this end is the node. allocate: gives memory for a body, or None where there
    is none: then the body gets memory of its own."""

    def __init__(
        self, receiver: Receiver, *, at_node: bool, allocate: Callable[[int], Block | None] = lambda size: None
    ) -> None:
        self.receiver = receiver
        self.begun = False  # the session has: from now on frames may be large
        self.reason = ""  # why it is over
        self.dismissed = False  # the peer has ended it, and said why
        self.round_trip = 0.0  # seconds that a message takes to the peer and back; 0 where that is not known
        self._at_node = at_node
        self._decoder: Any = _to_node if at_node else _from_node
        self._allocate = allocate
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._head: bytes | None = None  # of the frame whose body is being received
        self._body: memoryview | None = None
        self._block: Block | None = None
        self._filled = 0
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._pings: dict[int, float] = {}
        self._number = 0
        self._round_trips: deque[float] = deque(maxlen=RTT_SAMPLES)
        self._unsent = 0  # bytes that waited to be sent when that was last looked at
        self._paused = False  # nothing is read until the peer has read
        self._over = False

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._over:  # it was given up while TLS was being set up
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_LIMIT)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heard = self._loop.time()
        self._schedule()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._over:
            self._start = self._end = 0  # nobody looks at what still comes
        if self._body is not None:
            return self._body[self._filled :]
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self._loop.time()
        if self._body is not None:
            self._filled += nbytes
        else:
            self._end += nbytes
        try:
            while not self._over and self._take():
                pass
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
            self.close(f"malformed frame: {error}")
        except CotenantError as error:
            self.close(str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(self.reason or (f"the connection broke: {exc}" if exc else "the other end closed the connection"))

    def pause_writing(self) -> None:
        # A front end that does not read is not read. Were a node treated so, too, neither would read when both have
        # much to send. What a front end sends is bounded by its batches, one for each lane.
        if self._at_node and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    # Frames

    def _take(self) -> bool:
        """Take the next frame out of the buffer; return False where it is not complete."""
        if self._body is not None:
            if self._filled < len(self._body):
                return False
            head, body, block = self._head, self._body, self._block
            self._head = self._body = self._block = None
            self._deliver(cast(bytes, head), body, block)
            return True
        pending = self._end - self._start
        if not pending and len(self._buffer) == _BUFFER:
            self._start = self._end = 0
            return False
        if pending < _PREFIX.size:
            self._make_room(_PREFIX.size)
            return False
        magic, head_size, body_size = _PREFIX.unpack_from(self._buffer, self._start)
        self._check(magic, head_size, body_size)
        if pending < _PREFIX.size + head_size:
            self._make_room(_PREFIX.size + head_size)
            return False
        start = self._start + _PREFIX.size
        end = self._start = start + head_size
        head = bytes(self._view[start:end])
        if body_size:
            self._begin_body(head, body_size)
            return True
        if all_taken := end == self._end and len(self._buffer) == _BUFFER:
            self._start = self._end = 0
        self._deliver(head, None, None)
        return not all_taken

    def _check(self, magic: bytes, head: int, body: int) -> None:
        if magic != MAGIC:
            raise NodeError("malformed frame: this is not a connection between a front end and a node of Cotenant")
        most_head, most_body = (MAX_HEAD, MAX_BODY) if self.begun else (MAX_FIRST_HEAD, 0)
        if head > most_head or body > most_body:
            raise NodeError(
                f"the frame has a head of {head} and a body of {body} bytes; at most {most_head} and {most_body} are "
                "taken here"
            )

    def _begin_body(self, head: bytes, size: int) -> None:
        block = self._allocate(size)
        body = memoryview(bytearray(size)) if block is None else block.view
        have = min(size, self._end - self._start)
        body[:have] = self._view[self._start : self._start + have]
        self._start += have
        self._head, self._body, self._block, self._filled = head, body, block, have

    def _make_room(self, size: int) -> None:
        """Move what is pending to the front of a buffer that holds a frame's head."""
        capacity = max(size, _BUFFER)
        rest = bytes(self._view[self._start : self._end])
        if len(self._buffer) != capacity:
            self._buffer = bytearray(capacity)
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _deliver(self, head: bytes, body: memoryview | None, block: Block | None) -> None:
        message = self._decoder.decode(head)
        if isinstance(message, _CONTROL):
            self._control(message)
        else:
            self.receiver.received(self, message, body, block)

    def _control(self, message: Ping | Pong | Goodbye) -> None:
        match message:
            case Ping(number):
                if self._waiting() <= WRITE_LIMIT:  # else the peer does not read, or hears what is being sent
                    self.send(Pong(number))
            case Pong(number):
                sent = self._pings.pop(number, None)
                if sent is None:
                    raise NodeError("it answered a ping that it was not sent")
                self.answered_after(time.monotonic() - sent)
            case Goodbye(reason):
                self.dismissed = True
                self.abort(reason)

    def answered_after(self, seconds: float) -> None:
        """Take how long the peer's answer to a message took as a sample of the round trip."""
        self._round_trips.append(seconds)
        self.round_trip = sorted(self._round_trips)[int(RTT_QUANTILE * len(self._round_trips))]

    def send(self, message: Message, body: Sequence[bytes | bytearray | memoryview] = ()) -> None:
        """Send a message, and the bytes of its body from where they lie. They must not change until they are sent."""
        if self._over or self._transport is None or self._transport.is_closing():
            return
        frame = bytearray(_PREFIX.size)
        _encoder.encode_into(message, frame, _PREFIX.size)
        size = sum([len(part) for part in body])
        _PREFIX.pack_into(frame, 0, MAGIC, len(frame) - _PREFIX.size, size)
        if body:
            self._transport.writelines([frame, *body])
        else:
            self._transport.write(frame)

    def _waiting(self) -> int:
        """Return the bytes that wait to be sent."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def peer(self) -> str:
        """The address of the other end."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return "?" if not name else f"{name[0]}:{name[1]}"

    # Heartbeats

    def _schedule(self) -> None:
        self._due = self._loop.time() + PING_INTERVAL
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        # A process that is late itself has not listened: the peer gets that time, too.
        self._heard += max(now - self._due - PING_INTERVAL / 4, 0.0)
        unsent = self._waiting()
        if self._paused and unsent < self._unsent:
            self._heard = now  # it reads, and is not read meanwhile
        self._unsent = unsent
        if now - self._heard > SILENCE:
            self.abort(f"nothing was heard for {now - self._heard:.1f} s")
            return
        if self.begun and len(self._pings) < 2 * RTT_SAMPLES:
            self._number += 1
            self._pings[self._number] = time.monotonic()  # uvloop's time is that of the round, in milliseconds
            self.send(Ping(self._number))
        self._schedule()

    # The end

    @property
    def is_over(self) -> bool:
        return self._over

    def close(self, reason: str, *, busy: bool = False) -> None:
        """Tell the peer why, and close."""
        if self._over:
            return
        self.send(Goodbye(reason, busy))
        transport = self._transport
        self._finish(reason)
        if transport is not None:
            transport.close()
            self._loop.call_later(FAREWELL, transport.abort)

    def abort(self, reason: str) -> None:
        """Close at once."""
        transport = self._transport
        self._finish(reason)
        if transport is not None:
            transport.abort()

    def _finish(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        self.reason = reason
        if self._timer is not None:
            self._timer.cancel()
        self._body = self._block = self._head = None
        self.receiver.link_lost(self, reason)
