"""Read the headers of calls, and write those of responses."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import hpack

from cotenant.live.grpc.frames import ConnectionFault, ErrorCode
from cotenant.live.grpc.status import Status, encoded_message

MAX_HEADERS = 1 << 14  # bytes of a call's headers, as HPACK counts them
TABLE_SIZE = 4096  # bytes of the table by which a caller compresses headers: HTTP/2's default
CONTENT_TYPE = b"application/grpc"

logging.getLogger("hpack").setLevel(logging.INFO)  # for debugging it logs headers, tokens included

_CACHED = 64  # blocks of headers of a connection whose meaning is remembered
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_NO_VALUE = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")
_OF_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600, b"M": 60, b"S": 1}
_PARTS = {b"m": 10**3, b"u": 10**6, b"n": 10**9}  # of a second

Headers = Sequence[tuple[bytes, bytes]]


class CallHead:
    """What the headers of a call say. Several calls with the same headers share it.

    valid: they are headers of a request of HTTP/2. timeout: seconds from now that the caller waits; None for any time.
    length: bytes of the body, where they tell. metadata: all but pseudo-headers; of several with a name, a list.
    """

    __slots__ = ("content_type", "encoding", "length", "metadata", "method", "path", "timeout", "valid")

    def __init__(self, headers: Headers) -> None:
        pseudo: dict[bytes, bytes] = {}
        metadata: dict[bytes, bytes] = {}
        self.valid = True
        for name, value in headers:
            given = metadata
            if _NO_VALUE.search(value):
                self.valid = False
            if name[:1] == b":":
                given = pseudo
                self.valid &= name in _PSEUDO and name not in pseudo and not metadata
            elif not _NAME.fullmatch(name) or name in _OF_CONNECTION or (name == b"te" and value != b"trailers"):
                self.valid = False
            given[name] = given[name] + b", " + value if name in given else value
        self.metadata = metadata
        self.method = pseudo.get(b":method", b"")
        self.path = pseudo.get(b":path", b"")
        self.content_type = metadata.get(b"content-type", b"")
        self.encoding = metadata.get(b"grpc-encoding", b"identity")
        length = metadata.get(b"content-length")
        self.length = None if length is None else int(length) if length.isdigit() and len(length) < 20 else -1
        self.timeout = _read_timeout(metadata.get(b"grpc-timeout"))
        self.valid &= bool(self.method and self.path and pseudo.get(b":scheme")) and self.length != -1


def _read_timeout(text: bytes | None) -> float | None:
    match = _TIMEOUT.fullmatch(text or b"")
    if match is None:
        return None
    return int(match[1]) * _SECONDS.get(match[2], 1) / _PARTS.get(match[2], 1)


def is_grpc(content_type: bytes) -> bool:
    """Return whether a content type is gRPC's, and not gRPC-Web's, whose responses end in another way."""
    return content_type.startswith(CONTENT_TYPE) and content_type[len(CONTENT_TYPE) :][:1] in (b"", b"+", b";")


def is_trailer(headers: Headers) -> bool:
    """Return whether headers may stand after a body."""
    return all(_NAME.fullmatch(name) and name[:1] != b":" for name, _ in headers)


class HeaderReader:
    """Read blocks of headers of one connection.

    Clients of gRPC repeat their headers, and compress them to references into a table that both ends keep. Such a block
    means the same until the table changes, and is decoded once.
    """

    __slots__ = ("_decoder", "_heads")

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADERS)
        self._heads: dict[bytes, CallHead] = {}

    def call_head(self, block: bytes) -> CallHead:
        """Return what a block says of a call. Raises ConnectionFault."""
        head = self._heads.get(block)
        if head is None:
            head = CallHead(self.read(block))
            # Every byte above 0x7F: the block consists of references, which leave the table as it is.
            if min(block, default=0) > 0x7F and len(self._heads) < _CACHED:
                self._heads[block] = head
        return head

    def read(self, block: bytes) -> Headers:
        """Return the headers of a block. Raises ConnectionFault."""
        if min(block, default=0) <= 0x7F:
            self._heads.clear()
        try:
            headers: Headers = list(self._decoder.decode(block, raw=True))
        except hpack.OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADERS} bytes") from None
        except (hpack.HPACKError, IndexError, ValueError):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "headers that cannot be decompressed") from None
        return headers


# Responses. Nothing goes into the other end's table, so that they can be written ahead.

NO_TABLE = b"\x20"  # at the beginning of a block: the table has no room


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text
    prefix, size = bytearray((0x7F,)), size - 0x7F
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + text


RESPONSE = b"\x88" + _literal(b"content-type", CONTENT_TYPE)  # 0x88: `:status: 200`
TRAILERS = _literal(b"grpc-status", b"0")


def trailers(status: Status, message: str) -> bytes:
    """Return the block of headers that ends a response."""
    block = _literal(b"grpc-status", b"%d" % status)
    if message:
        block += _literal(b"grpc-message", encoded_message(message))
    if status is Status.UNIMPLEMENTED:
        block += _literal(b"grpc-accept-encoding", b"identity, deflate, gzip")
    return block


def http_error(code: int) -> bytes:
    """Return the block of headers that ends a response to what is no call of gRPC."""
    return _literal(b":status", b"%d" % code) + trailers(Status.UNKNOWN, "this address speaks gRPC")
