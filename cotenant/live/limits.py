"""Limit what callers may send and take: every limit of the front ends, with its default.

Those of `Limits` are chosen for a server; the constants hold for every request.
"""

from __future__ import annotations

import resource

import msgspec

MAX_BODY = 1 << 26  # bytes of a request, unless the settings say otherwise
MAX_RANK = 32  # dimensions of a tensor; NumPy had no more before its version 2
MAX_ELEMENTS = 1 << 40  # of a tensor, an empty dimension not counted; with it, each dimension is bounded
MAX_STRINGS = 1 << 18  # elements of a BYTES tensor: each costs as much as a hundred bytes of another
MAX_LISTED = 1 << 22  # elements in the typed contents of a gRPC input: each becomes a Python object
MAX_FIELDS = 1 << 10  # fields of an inference request over gRPC: a byte of the message can take a hundred in memory
MAX_JSON_ANSWER = 1 << 26  # bytes of a response's tensors as JSON, which takes six times as many as the tensors
MAX_GENERATE = 1 << 20  # bytes of a request to generate: a byte of its JSON can take thirty once it is read
MAX_CLASSES = 1 << 16  # labels in one output
MAX_DIGITS = 19  # of an integer in a header: what 64 bits hold
MAX_STREAMS = 32  # web pages that are open at once
MAX_REGIONS = 256  # of shared memory, that callers register: each is an open file
MAX_AT_ONCE = 1 << 18  # bytes that the event loop itself copies or hashes for a request; more is done in a thread
MAX_ERROR = 600  # characters of an error: gRPC's clients read 8 KiB of it, where one may take 12 bytes


MAX_RATIO = 100  # of a body unpacked to what it was compressed to
MIN_INFLATED = 1 << 20  # bytes that a body may unpack to whatever it was compressed to

_FILES = 1 << 20  # that are shared out where the system sets no limit


def _default_connections() -> int:
    """Allow half of the files that this process may open. gRPC gets a quarter, metrics a sixteenth; workers need the
    rest."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_FILES if files == resource.RLIM_INFINITY else files) // 2


class Limits(msgspec.Struct, frozen=True):
    """Sizes in bytes, times in seconds, kept to within one second.

    body, head: of a request; a trailer counts as a head. json: of the part of a body that is JSON, a byte of which can
    take sixteen once it is read. memory: of all large bodies and responses at once; above it, requests are rejected.
    connections: open at once; more are rejected. idle_timeout: of a connection between two requests. head_timeout: for
    the head of a request, and for setting up TLS. stall_timeout: without progress within a body or a response.
    body_rate: a body may take twice `stall_timeout`, and as long as so many bytes/s take.
    """

    body: int = MAX_BODY
    json: int = 1 << 24
    head: int = 1 << 16
    memory: int = 1 << 30
    connections: int = msgspec.field(default_factory=_default_connections)
    idle_timeout: int = 75
    head_timeout: int = 10
    stall_timeout: int = 30
    body_rate: int = 1 << 16


def metrics_limits() -> Limits:
    """Return the limits of an address that has metrics only, which take no body and few callers."""
    return Limits(body=1 << 16, memory=1 << 26, connections=max(_default_connections() // 8, 4))


def grpc_limits(memory: int = 1 << 30) -> Limits:
    """Return the limits of gRPC, whose connections carry many calls each. memory: of messages, in bytes."""
    return Limits(memory=memory, connections=max(_default_connections() // 2, 4))


class MemoryBudget:
    """Count the bytes of memory that callers hold at once: bodies being received or served, responses being sent."""

    __slots__ = ("total", "used")

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    @property
    def exceeded(self) -> bool:
        return self.used > self.total

    @property
    def scarce(self) -> bool:
        """Whether more than half is taken. One more large body exceeds the rest, and is rejected: who holds most of the
        budget would not be seen above it."""
        return self.used > self.total // 2
