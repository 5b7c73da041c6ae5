"""Recognize whole inference requests by their heads: most callers send the same head again and again.

A request whose head is known need not be parsed, and can be rejected without a look at its body, on a connection that
stays usable.
"""

from __future__ import annotations

from collections.abc import Callable

import httptools
import msgspec

from cotenant.live.http.request_cycle import PROXIED
from cotenant.live.http.response import JSON, error_body, head
from cotenant.live.http.routes import Route
from cotenant.live.limits import MAX_DIGITS
from cotenant.live.oip import rejection

# Of the others nothing is kept.
HEADERS = frozenset(
    (
        b"accept",
        b"accept-encoding",
        b"authorization",
        b"cotenant-proof",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"host",
        b"inference-header-content-length",
        b"origin",
        b"traceparent",
        b"transfer-encoding",
        b"upgrade",
        *PROXIED,
    )
)
# A request may have several lines of these, which together are one list.
LISTS = frozenset((b"accept", b"accept-encoding", b"connection", b"upgrade", *PROXIED))

_MAX_HEAD = 2048  # bytes of a head that is looked at
_HEADS = 512  # heads that are remembered
_END = b"\r\n\r\n"
_REFUSED = frozenset((b"transfer-encoding", b"upgrade", b"expect"))  # headers of what is better parsed each time
MAX_WHOLE = 1 << 15  # bytes of a body, from which on it has memory of its own
MAX_READ = _MAX_HEAD + MAX_WHOLE  # bytes, of which more are not worth looking at


class KnownHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the head of an inference request says.

    length: its bytes; size: bytes of the body. headers: those of HEADERS; nobody changes them. rejection: the response
    that rejects the request; closes: the connection closes after it. whole: the body is small, and is to be used as it
    was sent.
    """

    route: Route
    url: bytes
    headers: dict[bytes, bytes]
    length: int
    size: int
    rejection: bytes
    closes: bool
    whole: bool


class HeadCache:
    """Remember heads and what they say: the parser of all requests has read each once. find_route: by URL. may_infer:
    whether whoever sends these headers may infer. max_body: bytes of a body that is taken as it comes.

    A head is read when it comes for the second time, since some callers never send one again (a `traceparent` is in
    each).
    """

    def __init__(
        self,
        find_route: Callable[[bytes], Route | None],
        may_infer: Callable[[dict[bytes, bytes]], bool],
        *,
        max_body: int = MAX_WHOLE,
    ) -> None:
        self._find_route = find_route
        self._may_infer = may_infer
        self._max_body = min(max_body, MAX_WHOLE - 1)
        self._known: dict[bytes, KnownHead | None] = {}
        self._once: set[bytes] = set()

    def find(self, data: bytes) -> KnownHead | None:
        """Return the head of the inference request that these bytes are, from its first to its last; None if they are
        anything else, or the head is not known yet."""
        end = data.find(_END, 0, _MAX_HEAD) + len(_END)
        if end < len(_END):
            return None
        text = data[:end]
        try:
            found = self._known[text]
        except KeyError:
            found = self._learn(text)
        return found if found is not None and found.size == len(data) - end else None

    def _learn(self, text: bytes) -> KnownHead | None:
        if text not in self._once:
            if len(self._once) >= _HEADS:
                self._once.clear()
            self._once.add(text)
            return None
        self._once.discard(text)
        if len(self._known) >= _HEADS:
            self._known.clear()
        found = self._known[text] = self._read(text)
        return found

    def _read(self, text: bytes) -> KnownHead | None:
        read = _Head()
        parser = httptools.HttpRequestParser(read)
        try:
            parser.feed_data(text)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        headers = read.headers
        length = headers.get(b"content-length", b"")
        if (
            not read.complete
            or not read.unambiguous
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or b"host" not in headers
            or not _REFUSED.isdisjoint(headers)
            or not length.isdigit()
            or len(length) > MAX_DIGITS
            or not int(length)  # the message ends with its head, and the parser forgets whether the connection does
        ):
            return None
        route = self._find_route(read.url)
        if route is None or not route.infers or not self._may_infer(headers):
            return None
        size, closes = int(length), not parser.should_keep_alive()
        body = error_body(rejection(route.model))
        further = b"Retry-After: 1\r\n" + (b"Connection: close\r\n" if closes else b"")
        return KnownHead(
            route=route,
            url=read.url,
            headers=headers,
            length=len(text),
            size=size,
            rejection=head(503, JSON, len(body), further) + body,
            closes=closes,
            whole=size <= self._max_body and not closes and b"content-encoding" not in headers,
        )


class _Head:
    """Take what the parser finds in a head. unambiguous: no header is there twice that is no list."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.unambiguous = True

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in HEADERS:
            return
        if name in self.headers:
            self.unambiguous = self.unambiguous and name in LISTS
            value = self.headers[name] + b", " + value
        self.headers[name] = value

    def on_headers_complete(self) -> None:
        self.complete = True
