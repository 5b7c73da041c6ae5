"""What one caller may take of the HTTP front end."""

from __future__ import annotations

import resource
import sys

import msgspec


def _default_connections() -> int:
    """Three in four of the files that this process may open: workers, models and gRPC need some, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files * 3 // 4


class Limits(msgspec.Struct, frozen=True):
    """Sizes in bytes, times in seconds, kept to within one second.

    body, head: of a request. connections: open at once; more are rejected. idle_timeout: of a connection between two
    requests. head_timeout: for the head of a request. stall_timeout: without progress within a body or a response.
    body_rate: a body may take twice `stall_timeout`, and as long as so many bytes/s take.
    """

    body: int = 1 << 30
    head: int = 1 << 16
    connections: int = msgspec.field(default_factory=_default_connections)
    idle_timeout: int = 75
    head_timeout: int = 10
    stall_timeout: int = 30
    body_rate: int = 1 << 10
