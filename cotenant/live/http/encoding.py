"""Compress and decompress bodies by gzip and deflate."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence

from cotenant.live.limits import MAX_RATIO, MIN_INFLATED
from cotenant.live.oip import Data


@functools.lru_cache(maxsize=256)
def encoding_for(accept: bytes, binary: bool) -> bytes | None:
    """Return the encoding for a caller that accepts these; None for no compression.

    Binary numbers hardly shrink, and libraries accept gzip by default: binary is compressed only for a caller that
    names a single encoding, and so means it.
    """
    weights: dict[bytes, bool] = {}
    for item in accept.lower().split(b","):
        name, _, weight = item.partition(b";")
        weights[name.strip()] = not re.fullmatch(rb"\s*q\s*=\s*0(\.0*)?\s*", weight)
    if binary and len(weights) > 1:
        return None
    return next((name for name in (b"gzip", b"deflate") if weights.get(name)), None)


def deflate(body: Sequence[Data], encoding: bytes) -> bytes:
    """Return the body in that encoding, gzip or deflate."""
    # Level 1: what more compression would save in transfer, it would take in time.
    packer = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == b"gzip" else 15)
    return b"".join([*map(packer.compress, body), packer.flush()])


def inflated_limit(size: int, limit: int) -> int:
    """Return how many bytes a body of `size` bytes may unpack to, where no body may have more than `limit`."""
    return min(limit, max(MIN_INFLATED, MAX_RATIO * size))


def inflate(body: Data, limit: int) -> bytes | None:
    """Return the unpacked body, None where it has more than `limit` bytes. Raises zlib.error."""
    unpacker = zlib.decompressobj(47)  # zlib or gzip, as its head says
    data = unpacker.decompress(body, limit + 1)
    if len(data) > limit:
        return None
    if not unpacker.eof:
        raise zlib.error("it ends too early")
    if unpacker.unused_data:
        raise zlib.error("something follows its end")
    return data
