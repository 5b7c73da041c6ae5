"""Status lines, content types, and the HTTP status of every error."""

from __future__ import annotations

import msgspec

from cotenant.errors import (
    CancelledError,
    CotenantError,
    InvalidError,
    MalformedError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)

JSON = "application/json"
BINARY = "application/octet-stream"
HTML = "text/html; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_STATUS: dict[type[CotenantError], int] = {
    MalformedError: 500,  # as Triton has it
    InvalidError: 400,
    CancelledError: 400,
    NotFoundError: 404,
    UnsupportedError: 501,
    UnavailableError: 503,
}

# Everything up to the value of Content-Length, by status and content type.
HEADS = {
    (status, content_type): f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: ".encode()
    for status, reason in _REASONS.items()
    for content_type in (JSON, BINARY, HTML, PROMETHEUS)
}


class TextResponse(msgspec.Struct, frozen=True):
    """A response that is text already, rather than an object to be written as JSON."""

    body: str
    content_type: str = JSON


def status_of(error: CotenantError) -> int:
    """Return the HTTP status that tells a caller of an error."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
