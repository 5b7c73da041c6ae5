"""Read and write what frames of HTTP/2 (RFC 9113) are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">IBI")  # length (3 bytes) and type, flags, stream
HEAD_SIZE = 9
MAX_FRAME = 1 << 14  # bytes; larger frames than every peer has to take are neither read nor written
DEFAULT_WINDOW = (1 << 16) - 1
MAX_WINDOW = (1 << 31) - 1

# Types
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
# Flags
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20
# Settings
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

_INTEGER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")


class ErrorCode(IntEnum):
    """Why a stream or a connection ends early."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):  # noqa: N818
    """The other end breaks the protocol in a way that no stream survives."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StreamFault(Exception):  # noqa: N818
    """The other end breaks the protocol in one stream."""

    def __init__(self, stream: int, code: ErrorCode) -> None:
        super().__init__(stream, code)
        self.stream = stream
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the wire form of a frame."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings_frame(settings: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*item) for item in settings.items()]))


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _INTEGER.pack(increment))


def reset(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _INTEGER.pack(code))


def goaway(last: int, code: ErrorCode, reason: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", last, code) + reason.encode())


def integer(payload: bytes) -> int:
    """Return an integer of four bytes, without its reserved bit. Raises ConnectionFault."""
    if len(payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame of the wrong size")
    return int(_INTEGER.unpack(payload)[0]) & MAX_WINDOW


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Return the settings of a frame, each checked. Raises ConnectionFault."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "settings of the wrong size")
    for setting, value in _SETTING.iter_unpack(payload):
        if setting == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "an initial window above the largest")
        if (setting == ENABLE_PUSH and value > 1) or (setting == MAX_FRAME_SIZE and not MAX_FRAME <= value < 1 << 24):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"setting {setting} has no value {value}")
        yield setting, value


def without_padding(payload: bytes, flags: int) -> bytes:
    """Return what a frame of data or headers carries. Raises ConnectionFault."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding as long as its frame")
    return payload[1 : len(payload) - payload[0]]


def without_priority(block: bytes, flags: int, stream: int) -> bytes:
    """Return a block of headers without the priority before it. Raises ConnectionFault."""
    if not flags & WITH_PRIORITY:
        return block
    if len(block) < 5:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "headers that are shorter than their priority")
    check_dependency(block, stream)
    return block[5:]


def check_dependency(priority: bytes, stream: int) -> None:
    """Raise ConnectionFault where a stream depends on itself. Priorities mean nothing else here.

    No StreamFault: headers that are not decompressed would leave the two ends with different tables.
    """
    if integer(priority[:4]) == stream:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")


def check_stream(right: bool) -> None:
    """Raise ConnectionFault where a frame is of a stream that it cannot be of."""
    if not right:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame of a stream that it cannot be of")


def check_size(right: bool) -> None:
    """Raise ConnectionFault where a frame does not have the size of its type."""
    if not right:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame of the wrong size")
