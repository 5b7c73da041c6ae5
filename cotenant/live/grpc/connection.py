"""Serve one caller's connection: take its frames of HTTP/2, start calls, and send what they answer as it is taken."""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from functools import partial
from typing import cast

from cotenant.errors import UnavailableError
from cotenant.live.access import Permission
from cotenant.live.grpc import frames
from cotenant.live.grpc.access import caller_of
from cotenant.live.grpc.access_log import log_call
from cotenant.live.grpc.call import STREAM_WINDOW, Call, Method
from cotenant.live.grpc.drain import Drain
from cotenant.live.grpc.frame_reader import FrameReader
from cotenant.live.grpc.frames import ConnectionFault, ErrorCode, StreamFault
from cotenant.live.grpc.greeting import GREETING, MAX_CALLS, WINDOW
from cotenant.live.grpc.headers import (
    MAX_HEADERS,
    RESPONSE,
    CallHead,
    HeaderReader,
    http_error,
    is_grpc,
    is_trailer,
    trailers,
)
from cotenant.live.grpc.misuse import Misuse
from cotenant.live.grpc.shared import Shared
from cotenant.live.grpc.status import CallError, Status
from cotenant.live.http.request_handler import TOO_MUCH

_MAX_BLOCK = 2 * MAX_HEADERS  # bytes of headers, compressed, in as many frames as it takes
_MAX_ABANDONED = 1 << 10  # calls that ended before their callers knew, whose late frames are ignored
_LAST = frames.END_HEADERS | frames.END_STREAM


class Connection(FrameReader):
    """Read what one caller sends, and write what its calls answer.

    calls: by stream, those that have not ended. window: bytes that the caller takes now, of all calls together.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.calls: dict[int, Call] = {}
        self.window = frames.DEFAULT_WINDOW
        self._reader = HeaderReader()
        self._greeted = False
        self._last = 0  # the newest stream
        self._drain = Drain(self.writer, self.loop, self._refuse)
        self._initial_window = frames.DEFAULT_WINDOW
        self._unacknowledged = 0
        # Calls with messages that their windows have room for, but not the connection's, or not the socket.
        self._blocked: OrderedDict[int, Call] = OrderedDict()
        self._abandoned: dict[int, None] = {}
        self._block: bytearray | None = None  # of headers that go on in the next frame
        self._block_stream = self._block_flags = 0
        self._misuse = Misuse(shared.rapid_resets)

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = self.writer.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.shared.open.add(self)
        self.writer.write(GREETING)
        if len(self.shared.open) > self.shared.limits.connections:
            self._close(ErrorCode.ENHANCE_YOUR_CALM, "too many connections; use those that are open for more calls")
        elif self.shared.draining:
            self.drain()  # it was being encrypted when the server stopped

    def connection_lost(self, error: Exception | None) -> None:
        self._drain.stop()
        self.transport = self.writer.transport = None
        for call in list(self.calls.values()):
            self.cancel(call)
        self.shared.open.discard(self)
        if self.shared.draining and not self.shared.open:
            self.shared.empty.set()

    def pause_writing(self) -> None:
        self.writer.blocked = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()  # else answers to frames would pile up

    def resume_writing(self) -> None:
        self.writer.blocked = False
        self._quiet = 0
        if self.transport is not None and not self.transport.is_closing():
            if not self._postponed:
                self.transport.resume_reading()
            self._pump_blocked()

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream != self._block_stream):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "headers that do not go on")
        if not self._greeted and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no settings at the beginning")
        match kind:
            case frames.DATA:
                self._on_data(flags, stream, payload)
            case frames.HEADERS:
                self._on_headers(flags, stream, payload)
            case frames.WINDOW_UPDATE:
                self._on_window_update(stream, frames.integer(payload))
            case frames.PING:
                frames.check_stream(stream == 0)
                frames.check_size(len(payload) == 8)
                if not flags & frames.ACK:
                    self.writer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
                elif self._drain.answers(payload):
                    self._refuse()
            case frames.SETTINGS:
                frames.check_stream(stream == 0)
                self._on_settings(flags, payload)
            case frames.RST_STREAM:
                frames.check_size(len(payload) == 4)
                frames.check_stream(0 < stream <= self._last)
                self._on_reset(stream)
            case frames.CONTINUATION:
                self._on_continuation(flags, payload)
            case frames.PRIORITY:
                frames.check_stream(stream > 0)
                if len(payload) != 5:
                    raise StreamFault(stream, ErrorCode.FRAME_SIZE_ERROR)
                frames.check_dependency(payload, stream)
            case frames.GOAWAY:
                frames.check_stream(stream == 0)
                frames.check_size(len(payload) >= 8)
                self._refuse()
            case frames.PUSH_PROMISE:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a caller pushes nothing")
            case _:
                pass  # of an extension that is not known here

    def _on_headers(self, flags: int, stream: int, payload: bytes) -> None:
        frames.check_stream(stream & 1 == 1)
        block = frames.without_padding(payload, flags) if flags & frames.PADDED else payload
        if flags & frames.WITH_PRIORITY:
            block = frames.without_priority(block, flags, stream)
        if flags & frames.END_HEADERS:
            self._on_block(stream, block, bool(flags & frames.END_STREAM))
        else:
            self._block, self._block_stream, self._block_flags = bytearray(block), stream, flags

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "headers that go on without a beginning")
        self._block += payload
        # Frames without bytes count, too.
        self._block_flags += 1 << 8
        if len(self._block) > _MAX_BLOCK or self._block_flags >> 8 > _MAX_BLOCK // 256:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADERS} bytes")
        if flags & frames.END_HEADERS:
            block, self._block = bytes(self._block), None
            self._on_block(self._block_stream, block, bool(self._block_flags & frames.END_STREAM))

    def _on_block(self, stream: int, block: bytes, ended: bool) -> None:
        if stream <= self._last:
            self._on_trailer(stream, block, ended)
            return
        self._last = stream
        head = self._reader.call_head(block)
        if not head.valid:
            raise StreamFault(stream, ErrorCode.PROTOCOL_ERROR)
        if self._drain.last is not None or len(self.calls) >= MAX_CALLS:
            raise StreamFault(stream, ErrorCode.REFUSED_STREAM)
        if head.method != b"POST" or not is_grpc(head.content_type):
            self._answer(stream, ended, http_error(415 if head.method == b"POST" else 405))
            return
        method = self.shared.methods.get(head.path)
        if method is None:
            log_call(self, head, Status.UNIMPLEMENTED, 0, 0.0)
            self._answer(stream, ended, RESPONSE + trailers(Status.UNIMPLEMENTED, "Method not found!"))
            return
        self._start(stream, head, method, ended)

    def _start(self, stream: int, head: CallHead, method: Method, ended: bool) -> None:
        self.calls[stream] = call = Call(self, stream, head, method, self._initial_window)
        call.ended = ended
        try:
            if head.encoding not in (b"identity", b"gzip", b"deflate"):
                raise CallError(Status.UNIMPLEMENTED, "there are the encodings identity, deflate and gzip")
            # Before a message is read: memory is for those who have the permission.
            if method.permission is not None and method.permission not in self.shared.free:
                self.check(method.permission, call)
            if self.shared.memory.exceeded:
                raise UnavailableError(TOO_MUCH)
            if ended and head.length:
                raise StreamFault(stream, ErrorCode.PROTOCOL_ERROR)
            if method.stream is not None:
                call.work(partial(method.stream, call))
            elif ended:
                call.feed(b"")
        except StreamFault:
            raise
        except Exception as error:  # noqa: BLE001  # `fail` logs what nobody expects
            call.fail(error)

    def check(self, permission: Permission, call: Call) -> None:
        """Raise UnauthenticatedError or ForbiddenError where a caller lacks a permission."""
        if permission not in self.shared.free:
            peer = self.transport.get_extra_info("peername") if self.transport is not None else None
            self.shared.access.check(permission, caller_of(peer, call.head.metadata))

    def _on_trailer(self, stream: int, block: bytes, ended: bool) -> None:
        headers = self._reader.read(block)
        call = self.calls.get(stream)
        if call is not None and not call.ended:
            if not ended or not is_trailer(headers):
                raise StreamFault(stream, ErrorCode.PROTOCOL_ERROR)
            self._take(call, b"", True)
        elif call is not None:
            raise StreamFault(stream, ErrorCode.STREAM_CLOSED)
        elif stream not in self._abandoned:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "headers of a stream that has ended")

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._misuse.moved += size
        self._unacknowledged += size
        if self._unacknowledged > WINDOW // 2:
            if self._unacknowledged > WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more than the connection's window")
            self.writer.write(frames.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        call = self.calls.get(stream)
        if call is None:
            frames.check_stream(0 < stream <= self._last)
            if stream not in self._abandoned:
                raise StreamFault(stream, ErrorCode.STREAM_CLOSED)
            return
        if call.ended:
            raise StreamFault(stream, ErrorCode.STREAM_CLOSED)
        call.unacknowledged += size
        if call.unacknowledged > STREAM_WINDOW:
            raise StreamFault(stream, ErrorCode.FLOW_CONTROL_ERROR)
        if flags & frames.PADDED:
            payload = frames.without_padding(payload, flags)
        self._take(call, payload, bool(flags & frames.END_STREAM))

    def _take(self, call: Call, data: bytes, ended: bool) -> None:
        if call.head.length is not None:
            call.received += len(data)
            if call.received > call.head.length or (ended and call.received < call.head.length):
                raise StreamFault(call.stream, ErrorCode.PROTOCOL_ERROR)
        call.ended = ended
        if call.ending is None:
            call.feed(data)
        if not ended and call.method.unary is not None:
            self.acknowledge(call)

    def acknowledge(self, call: Call, keep: int = 0) -> None:
        """Let a caller send as much again as its call has taken: all but `keep` bytes."""
        taken = call.unacknowledged - keep
        if taken > STREAM_WINDOW // 2 and not call.ended:
            self.writer.write(frames.window_update(call.stream, taken))
            call.unacknowledged = keep

    def _on_reset(self, stream: int) -> None:
        call = self.calls.get(stream)
        if call is None:
            return
        self._misuse.count_reset(self.loop.time() - call.begun)
        self.cancel(call)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            frames.check_size(not payload)
            return
        self._misuse.count_settings()
        window = self._initial_window
        for setting, value in frames.read_settings(payload):
            if setting == frames.HEADER_TABLE_SIZE:
                self.writer.limit_table(value)
            elif setting == frames.INITIAL_WINDOW_SIZE:
                window = value  # the last of a frame: all calls are gone through for it
        self.writer.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._greeted = True
        change, self._initial_window = window - self._initial_window, window
        if change:
            for call in list(self.calls.values()):
                call.window += change
                if call.window > frames.MAX_WINDOW:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window above the largest")
                if call.pending:
                    self.pump(call)

    def _on_window_update(self, stream: int, increment: int) -> None:
        if stream == 0:
            if not increment:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window that grows by nothing")
            self.window += increment
            if self.window > frames.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window above the largest")
            self._pump_blocked()
            return
        frames.check_stream(stream <= self._last)
        if not increment:
            raise StreamFault(stream, ErrorCode.PROTOCOL_ERROR)
        call = self.calls.get(stream)
        if call is None:
            return
        call.window += increment
        if call.window > frames.MAX_WINDOW:
            raise StreamFault(stream, ErrorCode.FLOW_CONTROL_ERROR)
        if call.pending:
            self.pump(call)

    def _pump_blocked(self) -> None:
        # Each round ends a call's wait, or fills the window or the socket: updates of one byte stay cheap.
        while self._blocked and self.window > 0 and not self.writer.blocked:
            self.pump(self._blocked.popitem(last=False)[1])

    def pump(self, call: Call) -> None:
        """Send of a call's messages what the caller takes, and after the last, how it ended."""
        pending, sent = call.pending, 0
        parts: list[bytes | memoryview] = []
        while pending and not self.writer.blocked:
            room = min(call.window, self.window, frames.MAX_FRAME)
            if room <= 0:
                break
            chunk = pending.popleft()
            if len(chunk) > room:
                pending.appendleft(chunk[room:])
                chunk = chunk[:room]
            call.window -= len(chunk)
            self.window -= len(chunk)
            sent += len(chunk)
            parts += [frames.HEAD.pack(len(chunk) << 8 | frames.DATA, 0, call.stream), chunk]
            if sent >= STREAM_WINDOW:
                self.writer.write_parts(parts, sent)
                self._misuse.moved += sent
                parts, sent = [], 0
        self.writer.write_parts(parts, sent)
        self._misuse.moved += sent
        if pending:
            if call.window > 0:
                self._blocked[call.stream] = call
            else:
                self._blocked.pop(call.stream, None)  # until the caller takes more of this call
            call.account()
            return
        self._blocked.pop(call.stream, None)
        if call.ending is not None:
            self._answer(call.stream, call.ended, call.ending)
            self.end(call)
        else:
            call.drained()
        if call.held:
            call.account()

    # What goes out

    def _answer(self, stream: int, ended: bool, block: bytes) -> None:
        """Send the last headers of a stream. A caller that has not ended it is told that nothing more is read."""
        self.writer.write_headers(stream, block, _LAST)
        if not ended:
            self.writer.write(frames.reset(stream, ErrorCode.NO_ERROR))
            self._abandon(stream)

    def _reset(self, stream: int, code: ErrorCode) -> None:
        self.writer.write(frames.reset(stream, code))
        self._abandon(stream)
        call = self.calls.get(stream)
        if call is not None:
            self._misuse.count_reset()  # which the caller provokes, and saves itself the frame
            self.cancel(call)

    def _abandon(self, stream: int) -> None:
        self._abandoned[stream] = None
        if len(self._abandoned) > _MAX_ABANDONED:
            del self._abandoned[next(iter(self._abandoned))]

    def cancel(self, call: Call) -> None:
        """Forget a call whose caller does not wait any more, then stop what works for it: it has nobody to tell."""
        stop = call.on_cancel
        self.end(call)
        if stop is not None:
            stop()

    def end(self, call: Call) -> None:
        """Forget a call that has ended."""
        self.calls.pop(call.stream, None)
        self._blocked.pop(call.stream, None)
        call.close()
        if self._drain.last is not None and not self.calls and not self._closing:
            self._shut()

    # The server calls these.

    def drain(self) -> None:
        """Tell the caller to start no more calls, and close the connection when those that there are have ended."""
        if self._greeted and not self._closing:
            self._drain.begin()
        else:
            self._refuse()

    def tick(self) -> None:
        """Enforce what takes too long. Called once a second."""
        self._quiet += 1
        limits, transport = self.shared.limits, self.transport
        if transport is None:
            return
        stalled = self._misuse.second(self.calls.values(), limits.body_rate)
        if not self._greeted or self._closing or self._block is not None:
            if self._quiet > limits.head_timeout:
                transport.abort()
        elif stalled > limits.stall_timeout and self.shared.memory.scarce:
            transport.abort()  # others need the memory

    def abort(self) -> None:
        """Break off the connection, with all its calls."""
        if self.transport is not None:
            self.transport.abort()

    def _refuse(self) -> None:
        """Start no more calls: the caller knows by now that the connection ends."""
        if not self._closing:
            self._drain.end(self._last)
        if not self.calls:
            self._shut()

    def _close(self, code: ErrorCode, reason: str) -> None:
        """Tell the caller why the connection ends, and end it."""
        self._closing = True
        for call in list(self.calls.values()):
            self.cancel(call)
        self.writer.write(frames.goaway(self._last, code, reason))
        self._shut()

    def _shut(self) -> None:
        self._closing = True
        self.writer.flush()
        if self.transport is not None:
            self.transport.close()
