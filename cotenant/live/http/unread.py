"""Recognize whole inference requests by their heads, so that they can be rejected unread on a connection that stays
usable."""

from __future__ import annotations

from collections.abc import Callable

import httptools
import msgspec

from cotenant.live.http.response import JSON, error_body, head
from cotenant.live.http.routes import Route
from cotenant.live.limits import MAX_DIGITS
from cotenant.live.oip import rejection

_MAX_HEAD = 2048  # bytes of a head that is looked at
_HEADS = 512  # heads that are remembered: most callers send the same again and again
_END = b"\r\n\r\n"
_SINGLE = frozenset((b"host", b"content-length"))  # headers that a request has exactly once
_REFUSED = frozenset((b"transfer-encoding", b"upgrade", b"expect"))  # headers of what is better read in full


class UnreadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An inference request of which the head alone was read. size: of its body, in bytes; response: that rejects it;
    closes: the connection closes after it."""

    route: Route
    size: int
    response: bytes
    closes: bool


class HeadCache:
    """Remember heads and what they say: the parser of all requests has read each once. find_route: by URL."""

    def __init__(self, find_route: Callable[[bytes], Route | None]) -> None:
        self._find_route = find_route
        self._known: dict[bytes, UnreadRequest | None] = {}

    def find(self, data: bytes) -> UnreadRequest | None:
        """Return the inference request that these bytes are, from its first to its last; None if they are anything
        else."""
        end = data.find(_END, 0, _MAX_HEAD) + len(_END)
        if end < len(_END):
            return None
        text = data[:end]
        try:
            found = self._known[text]
        except KeyError:
            if len(self._known) >= _HEADS:
                self._known.clear()
            found = self._known[text] = self._read(text)
        return found if found is not None and found.size == len(data) - end else None

    def _read(self, text: bytes) -> UnreadRequest | None:
        read = _Head()
        parser = httptools.HttpRequestParser(read)
        try:
            parser.feed_data(text)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        names = [name for name, _ in read.headers]
        length = dict(read.headers).get(b"content-length", b"")
        if (
            not read.complete
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or any(names.count(name) != 1 for name in _SINGLE)
            or not _REFUSED.isdisjoint(names)
            or not length.isdigit()
            or len(length) > MAX_DIGITS
        ):
            return None
        route = self._find_route(read.url)
        if route is None or not route.infers:
            return None
        closes = not parser.should_keep_alive()
        body = error_body(rejection(route.model))
        headers = b"Retry-After: 1\r\n" + (b"Connection: close\r\n" if closes else b"")
        response = head(503, JSON, len(body), headers) + body
        return UnreadRequest(route=route, size=int(length), response=response, closes=closes)


class _Head:
    """Take what the parser finds in a head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True
