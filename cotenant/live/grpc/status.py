"""Say errors as gRPC's status codes."""

from __future__ import annotations

import logging
from enum import IntEnum
from urllib.parse import quote

from cotenant.errors import (
    CancelledError,
    CotenantError,
    FailedError,
    ForbiddenError,
    InvalidError,
    MalformedError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from cotenant.live.oip import UNEXPECTED

logger = logging.getLogger(__name__)

_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # of a message, what is sent as it is


class Status(IntEnum):
    """The status codes of gRPC that this server gives."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_CODES: dict[type[CotenantError], Status] = {
    MalformedError: Status.INVALID_ARGUMENT,
    InvalidError: Status.INVALID_ARGUMENT,
    CancelledError: Status.CANCELLED,
    NotFoundError: Status.NOT_FOUND,
    UnsupportedError: Status.UNIMPLEMENTED,
    UnauthenticatedError: Status.UNAUTHENTICATED,
    ForbiddenError: Status.PERMISSION_DENIED,
    UnavailableError: Status.UNAVAILABLE,
}


class CallError(Exception):
    """A call ends with this status, for a reason of gRPC's and not of the server's."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: CotenantError) -> Status:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), Status.INTERNAL)


def expected(error: Exception) -> CotenantError:
    """Return what to tell a caller of an error, expected or not: it ends this request, and no other."""
    if isinstance(error, CotenantError):
        return error
    logger.error("a request over gRPC ended in an error of the server", exc_info=error)
    return FailedError(UNEXPECTED)


def encoded_message(message: str) -> bytes:
    """Return a status message as its header has it: what is not printable ASCII by percent."""
    return quote(message, safe=_PLAIN, errors="replace").encode()
