"""What callers may send and take: every limit of the front ends, with its default.

Those of `Limits` are chosen for a server; the constants hold for every request.
"""

from __future__ import annotations

import resource
import sys

import msgspec

MAX_RANK = 32  # dimensions of a tensor; NumPy had no more before its version 2
MAX_ELEMENTS = 1 << 40  # of a tensor, an empty dimension not counted; with it, each dimension is bounded
MAX_STRINGS = 1 << 18  # elements of a BYTES tensor: each costs as much as a hundred bytes of another
MAX_LISTED = 1 << 22  # elements in the typed contents of a gRPC input: each becomes a Python object
MAX_FIELDS = 1 << 10  # fields of an inference request over gRPC: a byte of the message can take a hundred in memory
MAX_CLASSES = 1 << 16  # labels in one output
MAX_DIGITS = 19  # of an integer in a header: what 64 bits hold
MAX_ERROR = 600  # characters of an error: gRPC's clients read 8 KiB of it, where one may take 12 bytes


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
