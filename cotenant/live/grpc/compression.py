"""Decompress messages of calls: small ones at once, others in a thread, where they keep nobody from being answered."""

from __future__ import annotations

import zlib

from cotenant.live.grpc.status import CallError, Status
from cotenant.live.http.encoding import inflate, inflated_limit
from cotenant.live.limits import MAX_RATIO

_SMALL = 1 << 16  # bytes, unpacked: some tenth of a millisecond


def unpack_small(message: bytes, encoding: bytes, limit: int) -> bytes | None:
    """Return a message that came compressed; None where it is not small. Raises CallError."""
    if encoding not in (b"gzip", b"deflate"):
        raise CallError(Status.INTERNAL, "a message that is compressed in no encoding that its call names")
    return None if len(message) > _SMALL else _inflate(message, encoding, min(limit, _SMALL))


def unpacked_limit(message: bytes, limit: int) -> int:
    """Return how many bytes a message may unpack to, where none may have more than `limit`."""
    return inflated_limit(len(message), limit)


def unpack(message: bytes, encoding: bytes, limit: int) -> bytes:
    """Return a message that came compressed. Raises CallError."""
    unpacked = _inflate(message, encoding, unpacked_limit(message, limit))
    if unpacked is None:
        reason = "" if MAX_RATIO * len(message) > limit else f", of {MAX_RATIO} times what was sent"
        raise CallError(Status.RESOURCE_EXHAUSTED, f"Decompressed message larger than max{reason}")
    return unpacked


def _inflate(message: bytes, encoding: bytes, limit: int) -> bytes | None:
    try:
        return inflate(message, limit)
    except zlib.error as error:
        raise CallError(Status.INTERNAL, f"a message that is not {encoding.decode()}: {error}") from None
