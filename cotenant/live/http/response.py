"""Define status lines, content types, and the HTTP status of every error."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cotenant.errors import (
    CancelledError,
    CotenantError,
    ForbiddenError,
    InvalidError,
    MalformedError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

JSON = "application/json"
BINARY = "application/octet-stream"
HTML = "text/html; charset=utf-8"

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_STATUS: dict[type[CotenantError], int] = {
    MalformedError: 500,  # as Triton has it
    InvalidError: 400,
    CancelledError: 400,
    NotFoundError: 404,
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    UnsupportedError: 501,
    UnavailableError: 503,
}


def _format_head(status: int, content_type: str) -> bytes:
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: ".encode("latin-1")


_HEADS = {
    (status, content_type): _format_head(status, content_type)
    for status in _REASONS
    for content_type in (JSON, BINARY, HTML)
}


class TextResponse(msgspec.Struct, frozen=True):
    """A response that is text already, rather than an object to be written as JSON. headers: further ones, each with
    its line end."""

    body: bytes
    content_type: str = JSON
    headers: bytes = b""


class EventStream:
    """A response that goes on until its caller leaves or the server drains: server-sent events.

    subscribe: takes what sends bytes to the caller, and returns what ends that. unopened: called where the caller has
    left before the first of them.
    """

    HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"

    def __init__(
        self,
        subscribe: Callable[[Callable[[bytes], None]], Callable[[], None]],
        unopened: Callable[[], None] | None = None,
    ) -> None:
        self._subscribe = subscribe
        self._leave = unopened

    def open(self, send: Callable[[bytes], None]) -> None:
        self._leave = self._subscribe(send)

    def close(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None


def head(status: int, content_type: str, size: int, headers: bytes = b"") -> bytes:
    """Return the head of a response with a body of `size` bytes. headers: further ones, each with its line end."""
    start = _HEADS.get((status, content_type)) or _format_head(status, content_type)
    return b"%s%d\r\n%s\r\n" % (start, size, headers)


def error_body(message: str) -> bytes:
    return msgspec.json.encode({"error": message})


def status_of(error: CotenantError) -> int:
    """Return the HTTP status that tells a caller of an error."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
