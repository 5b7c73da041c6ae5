"""Cut what a caller sends into frames of HTTP/2, a bounded number in a turn of the event loop, as others wait."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from cotenant.live.grpc import frames
from cotenant.live.grpc.frames import ConnectionFault, ErrorCode, StreamFault
from cotenant.live.grpc.writer import FrameWriter
from cotenant.live.oip import UNEXPECTED

logger = logging.getLogger(__name__)

_MAX_FRAMES = 256  # read in one turn of the event loop, which reads on for as long as a caller has more to send
_STREAM_ID = 0x7FFFFFFF


class FrameReader(asyncio.Protocol, ABC):
    """Read frames from a transport. A subclass takes them rather than another object, which saves a call for each.

    transport: None unless there is a connection.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.writer = FrameWriter(self.loop)
        self.transport: asyncio.Transport | None = None
        self._closing = False  # nothing is read any more
        self._quiet = 0  # seconds without progress
        self._preface_read = False
        self._rest = bytearray()  # of a frame that is not complete
        self._needed = len(frames.PREFACE) + frames.HEAD_SIZE  # bytes, with which it is
        self._postponed = False  # what was read goes on in the next turn

    # The subclass has these.

    @abstractmethod
    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Take a frame. Raises StreamFault or ConnectionFault."""

    @abstractmethod
    def _reset(self, stream: int, code: ErrorCode) -> None:
        """End a stream for a fault of its caller."""

    @abstractmethod
    def _close(self, code: ErrorCode, reason: str) -> None:
        """Tell the caller why the connection ends, and end it."""

    # The transport calls this.

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._quiet = 0
        if self._rest or not self._preface_read:
            self._rest += data
            if self._postponed:
                return
            if len(self._rest) < self._needed and (self._preface_read or frames.PREFACE.startswith(self._rest[:24])):
                return
            data = bytes(self._rest)
            self._rest = bytearray()
        try:
            self._read_frames(data)
        except ConnectionFault as fault:
            self._close(fault.code, str(fault))
        except Exception:
            logger.exception("a connection over gRPC ended in an error of the server")
            self._close(ErrorCode.INTERNAL_ERROR, UNEXPECTED)

    def _read_frames(self, data: bytes) -> None:
        position, end = 0, len(data)
        if not self._preface_read:
            if not data.startswith(frames.PREFACE):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this address speaks gRPC, which is over HTTP/2")
            position = len(frames.PREFACE)
            self._preface_read = True
        unpack, left = frames.HEAD.unpack_from, _MAX_FRAMES
        while end - position >= frames.HEAD_SIZE:
            if not left:
                self._postpone(data[position:])
                return
            left -= 1
            head, flags, stream = unpack(data, position)
            size, kind = head >> 8, head & 0xFF
            if size > frames.MAX_FRAME:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of more than {frames.MAX_FRAME} bytes")
            start = position + frames.HEAD_SIZE
            if end - start < size:
                break
            position = start + size
            try:
                self._on_frame(kind, flags, stream & _STREAM_ID, data[start:position])
            except StreamFault as fault:
                self._reset(fault.stream, fault.code)
            if self._closing:
                return
        self._rest += data[position:]
        self._needed = frames.HEAD_SIZE
        if end - position >= frames.HEAD_SIZE:
            self._needed += unpack(data, position)[0] >> 8

    def _postpone(self, data: bytes) -> None:
        """Go on with these bytes in the next turn, and read no more until then: others wait."""
        self._rest += data
        self._postponed = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._postponed, transport = False, self.transport
        if transport is None or transport.is_closing():
            return
        data, self._rest = bytes(self._rest), bytearray()
        self.data_received(data)
        if not self._postponed and not self.writer.blocked and not transport.is_closing():
            transport.resume_reading()
