"""One call of gRPC: a stream of HTTP/2 that carries messages both ways and ends with a status."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from cotenant.errors import CotenantError, UnavailableError
from cotenant.live.access import Permission
from cotenant.live.grpc.access_log import log_call
from cotenant.live.grpc.compression import unpack, unpack_small, unpacked_limit
from cotenant.live.grpc.frames import DATA, END_HEADERS, END_STREAM, HEAD, HEADERS, MAX_FRAME
from cotenant.live.grpc.headers import RESPONSE, TRAILERS, CallHead, trailers
from cotenant.live.grpc.status import CallError, Status, expected, status_of
from cotenant.live.http.request_handler import TOO_MUCH
from cotenant.live.limits import MAX_ERROR
from cotenant.live.oip import public_message

if TYPE_CHECKING:
    from cotenant.live.grpc.connection import Connection

STREAM_WINDOW = 1 << 20  # bytes of a call that may come before it takes them
MAX_MESSAGE = (1 << 32) - 1  # bytes that a prefix can tell

_ONE_MESSAGE = "a call of this method has exactly one message"
_PREFIX = 5  # bytes before a message: whether it is compressed, and its length
_RESPONSE_HEAD = len(RESPONSE) << 8 | HEADERS
_TRAILERS_HEAD = len(TRAILERS) << 8 | HEADERS
_LAST = END_HEADERS | END_STREAM


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """Say how calls of a method are answered.

    unary: takes the one message of a call, which it ends now or later. stream: runs with a call, takes and sends
    messages, and ends it with OK by returning. permission: of the caller; None where the method looks itself.
    message_size: of its largest message, in bytes: few need much, and many are for everybody.
    """

    unary: Callable[[Call, bytes], None] | None = None
    stream: Callable[[Call], Coroutine[Any, Any, None]] | None = None
    permission: Permission | None = None
    message_size: int = 1 << 16


class Call:
    """Take the messages of a caller, and send it messages and a status.

    on_cancel: called when the caller has left, or its deadline has passed. ended: the caller has sent all. begun: by
    the loop's clock. window: bytes that the caller takes now. pending: what it does not take yet. ending: the trailers
    to send after that. sent: bytes of messages, pending ones included. waiting: bytes of responses that are to be sent
    later, and of messages that are being unpacked. held: bytes that count as memory of the server.
    """

    __slots__ = (
        "_buffer",
        "_drained",
        "_more",
        "_started",
        "_timer",
        "_unlogged",
        "begun",
        "connection",
        "ended",
        "ending",
        "head",
        "held",
        "method",
        "on_cancel",
        "pending",
        "received",
        "sent",
        "stream",
        "unacknowledged",
        "waiting",
        "window",
    )

    def __init__(self, connection: Connection, stream: int, head: CallHead, method: Method, window: int) -> None:
        self.connection = connection
        self.stream = stream
        self.head = head
        self.method = method
        self.window = window
        self.ended = False
        self.received = self.sent = 0
        self.held = 0
        self.waiting = 0
        self.unacknowledged = 0
        self.on_cancel: Callable[[], object] | None = None
        self.pending: deque[memoryview] = deque()
        self.ending: bytes | None = None
        self.begun = connection.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._buffer: bytes | bytearray = b""
        self._started = False
        self._unlogged = connection.shared.log_access
        self._more: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        if head.timeout is not None:
            self._timer = connection.loop.call_at(self.begun + head.timeout, self._expire)

    def remaining(self) -> float | None:
        """Return the seconds that the caller still waits; None for any time."""
        timeout = self.head.timeout
        return None if timeout is None else max(0.0, timeout - (self.connection.loop.time() - self.begun))

    # What comes in. The connection calls these.

    def feed(self, data: bytes) -> None:
        """Take bytes of messages; `ended` tells whether they are the last."""
        buffer = self._buffer
        if buffer or not self.ended:
            self._buffer_more(data)
        elif self.method.unary is not None and data[:1] == b"\0" and len(data) == _message_end(data):
            self.method.unary(self, data[_PREFIX:])  # by far the most calls: one message, in one frame
            return
        else:
            self._buffer = data
        try:
            if self.method.stream is not None:
                self.wake()
            elif self.ended:
                self._start_unary()
            elif 0 < self._check_size() < len(self._buffer):
                raise CallError(Status.UNIMPLEMENTED, _ONE_MESSAGE)
        except CallError as error:
            self.fail(error)

    def _buffer_more(self, data: bytes) -> None:
        if not isinstance(self._buffer, bytearray):
            self._buffer = bytearray(self._buffer)
        self._buffer += data
        self.account()
        if self.connection.shared.memory.exceeded:
            self._break_off(UnavailableError(TOO_MUCH))

    def _start_unary(self) -> None:
        assert self.method.unary is not None
        taken = self._take()
        if taken is None or self._buffer:
            raise CallError(Status.UNIMPLEMENTED, _ONE_MESSAGE)
        message, packed = taken
        small = unpack_small(message, self.head.encoding, self._limit()) if packed else message
        if small is not None:
            self.method.unary(self, small)
        else:
            self._unpack(message).add_done_callback(self._start_unpacked)

    def _start_unpacked(self, work: asyncio.Future[bytes]) -> None:
        assert self.method.unary is not None
        error = work.exception()
        if self.connection.calls.get(self.stream) is not self:
            return
        if isinstance(error, Exception):
            self.fail(error)  # raised here, it would hold itself, and the message, by its traceback
            return
        try:
            self.method.unary(self, work.result())
        except Exception as failure:  # noqa: BLE001  # `fail` logs what nobody expects
            self.fail(failure)

    def _unpack(self, message: bytes) -> asyncio.Future[bytes]:
        """Decompress a message in a thread. What it may take counts as memory meanwhile. Raises UnavailableError."""
        limit = self._limit()
        most = unpacked_limit(message, limit)
        self.keep(most)
        if self.connection.shared.memory.exceeded:
            raise UnavailableError(TOO_MUCH)
        work = self.connection.loop.run_in_executor(None, unpack, message, self.head.encoding, limit)
        work.add_done_callback(lambda done: self.keep(-most))
        return work

    def _check_size(self) -> int:
        """Return where the first message ends, 0 where its length is not there yet. Raises CallError."""
        if len(self._buffer) < _PREFIX:
            return 0
        end, limit = _message_end(self._buffer), self._limit()
        if end - _PREFIX > limit:
            raise CallError(
                Status.RESOURCE_EXHAUSTED, f"SERVER: Received message larger than max ({end - _PREFIX} vs. {limit})"
            )
        return end

    def _limit(self) -> int:
        return min(self.method.message_size, self.connection.shared.message_size)

    def _take(self) -> tuple[bytes, bool] | None:
        """Return the next message and whether it is compressed, None where it is not there yet. Raises CallError."""
        end = self._check_size()
        if not end or len(self._buffer) < end:
            return None
        packed, message = self._buffer[0], bytes(self._buffer[_PREFIX:end])
        if isinstance(self._buffer, bytearray):
            del self._buffer[:end]
        else:
            self._buffer = self._buffer[end:]
        return message, bool(packed)

    def wake(self) -> None:
        """Tell whoever waits for messages that there is more, or the end."""
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def receive(self) -> bytes | None:
        """Return the caller's next message, None after its last. Raises CallError."""
        while True:
            taken = self._take()
            self.account()
            # What is taken makes room for more; so does the part of a message that is waited for.
            if taken is not None:
                self.connection.acknowledge(self, keep=len(self._buffer))
                message, packed = taken
                small = unpack_small(message, self.head.encoding, self._limit()) if packed else message
                return small if small is not None else await self._unpack(message)
            self.connection.acknowledge(self)
            if self.ended:
                if self._buffer:
                    raise CallError(Status.INTERNAL, "the call ends within a message")
                return None
            self._more = self.connection.loop.create_future()
            await self._more

    # What goes out

    def respond(self, message: bytes) -> None:
        """Send the one message of a response, and end the call."""
        connection, size = self.connection, len(message) + _PREFIX
        writer = connection.writer
        if connection.calls.get(self.stream) is not self:
            return
        if size > min(MAX_FRAME, self.window, connection.window) or writer.blocked or writer.block_prefix:
            self.write(message)
            self.finish()
            return
        if self._unlogged:
            self._log(Status.OK, size - _PREFIX)
        connection.window -= size
        pack, stream = HEAD.pack, self.stream
        writer.write(
            b"".join(
                (
                    pack(_RESPONSE_HEAD, END_HEADERS, stream),
                    RESPONSE,
                    pack(size << 8 | DATA, 0, stream),
                    b"\0",
                    (size - _PREFIX).to_bytes(4, "big"),
                    message,
                    pack(_TRAILERS_HEAD, _LAST, stream),
                    TRAILERS,
                )
            )
        )
        connection.end(self)

    def write(self, message: bytes) -> None:
        """Send a message as soon as the caller takes it."""
        if self.connection.calls.get(self.stream) is not self:
            return
        if not self._started:
            self._started = True
            self.connection.writer.write_headers(self.stream, RESPONSE)
        self.sent += len(message)
        self.pending.append(memoryview(b"\0" + len(message).to_bytes(4, "big")))
        if message:
            self.pending.append(memoryview(message))
        self.connection.pump(self)

    async def send(self, message: bytes) -> None:
        """Send a message, and wait until the caller takes it."""
        self.write(message)
        while self.pending:
            self._drained = self.connection.loop.create_future()
            await self._drained

    def drained(self) -> None:
        """All messages are sent. The connection calls this."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call, after all messages that are still to be sent."""
        if self.ending is not None or self.connection.calls.get(self.stream) is not self:
            return
        if self._unlogged:
            self._log(status, self.sent)
        self.ending = trailers(status, message[:MAX_ERROR])
        if not self._started:
            self.ending = RESPONSE + self.ending
        self.connection.pump(self)

    def fail(self, error: Exception) -> None:
        """End the call with the status of an error; one that nobody expects is logged."""
        if isinstance(error, CallError):
            self.finish(error.status, str(error))
        else:
            told: CotenantError = expected(error)
            self.finish(status_of(told), public_message(told))

    def work(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what answers the call and end the call as that ends, or stop it when nobody waits any more."""
        task = self.connection.loop.create_task(self._run(work))
        self.on_cancel = task.cancel

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001  # `fail` logs what nobody expects
            self.fail(error)
        else:
            self.finish()

    # Its end

    def close(self) -> None:
        """Let go of all that the call holds. The connection calls this."""
        self.on_cancel = None
        if self._unlogged:
            self._log(Status.CANCELLED, self.sent)  # its caller has left
        if self._timer is not None:
            self._timer.cancel()
        self.pending.clear()
        self.waiting = 0
        self._buffer = b""
        if self.held:
            self.account()
        if self._drained is not None or self._more is not None:
            self.drained()
            self.ended = True
            self.wake()

    def _log(self, status: Status, size: int) -> None:
        self._unlogged = False
        log_call(self.connection, self.head, status, size, self.connection.loop.time() - self.begun)

    def account(self) -> None:
        """Count the memory that the call holds now: what it has not taken, and what its caller has not."""
        held = len(self._buffer) + self.waiting + sum(map(len, self.pending))
        self.connection.shared.memory.used += held - self.held
        self.held = held

    def keep(self, size: int) -> None:
        """Count so many bytes more, or less, of responses that are to be sent later."""
        if self.connection.calls.get(self.stream) is self:
            self.waiting += size
            self.account()

    def _expire(self) -> None:
        self._break_off(CallError(Status.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _break_off(self, error: Exception) -> None:
        """End the call at once with the status of an error, and stop what works for it."""
        stop = self.on_cancel
        self.pending.clear()
        self.ending = None
        self.fail(error)
        if stop is not None:
            stop()  # after the call's end, which it cannot change any more


def _message_end(data: bytes | bytearray) -> int:
    return _PREFIX + int.from_bytes(data[1:_PREFIX], "big")
