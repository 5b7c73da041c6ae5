"""Define what the server, the shim of a job, and a job that runs in steps say to each other.

Each message is one line of JSON. The server and the shim talk over the shim's standard input, a socket, whose end tells
the shim that the server is gone. A job that runs in steps tells its shim how far it is over a pipe, and reads in a page
of shared memory which share it is granted: one double, in ‰.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

PROGRESS = "COTENANT_JOB_PROGRESS"  # the environment variable with the descriptor of the pipe
SHARE = "COTENANT_JOB_SHARE"  # the same of the shared memory
SHARE_SIZE = mmap.PAGESIZE
_DOUBLE = struct.Struct("<d")

T = TypeVar("T")


class Attempt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start the processes of a job; the first message of the server.

    argv: the program. directory: where it runs; made where `own_directory`. output: the file for what it prints.
    header: a line before that; none where empty. memory: bytes that all its processes together may have; None: no
    limit. cores: those it may run on; empty: any. background: it runs where nobody else wants a processor. waits: it
    waits by itself while its share is 0, between two steps; otherwise it is stopped by a signal. tells_end: exit
    status 0 means that its work is done also after it was told to stop.
    """

    argv: tuple[str, ...]
    directory: str
    own_directory: bool = False
    output: str
    header: str = ""
    memory: int | None = None
    cores: tuple[int, ...] = ()
    background: bool = True
    waits: bool = False
    tells_end: bool = False


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Grant a share of the device, in ‰. processors: that so much is of a machine's; None: no limit but others' use."""

    share: int
    processors: float | None = None


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Tell the job to save what it has and exit."""


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill all processes of the job. reason: for people."""

    reason: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """Report that the program runs, as the leader of this process group."""

    group: int


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report how far a job is. processor: seconds that all its processes have used."""

    steps: int = 0
    total: int | None = None
    metrics: dict[str, float] = {}
    processor: float = 0.0


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that nothing of the job is left; the last message. Fields are those of `JobExited`."""

    completed: bool
    reason: str = ""
    hopeless: bool = False
    processor: float = 0.0


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report a step, from the job to its shim."""

    steps: int
    total: int | None = None
    metrics: dict[str, float] = {}


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report why the work ends unfinished, from the job to its shim. hopeless: to try again would end the same way."""

    reason: str
    hopeless: bool = False


ToShim = Attempt | Grant | Tell | Kill
FromShim = Started | Report | Ended
FromJob = Stepped | Failed


def encode_line(message: ToShim | FromShim | FromJob) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class Lines(Generic[T]):
    """Split a stream into messages. limit: bytes of the longest."""

    def __init__(self, decoder: msgspec.json.Decoder[T], limit: int = 1 << 20) -> None:
        self._decoder = decoder
        self._limit = limit
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the messages that are complete. Raises msgspec.DecodeError for what is none."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield self._decoder.decode(line)
        if len(self._pending) > self._limit:
            raise msgspec.DecodeError(f"a line of more than {self._limit} bytes")


def write_share(memory: mmap.mmap, share: float) -> None:
    _DOUBLE.pack_into(memory, 0, share)


def read_share(memory: mmap.mmap) -> float:
    value: float = _DOUBLE.unpack_from(memory, 0)[0]
    return value
