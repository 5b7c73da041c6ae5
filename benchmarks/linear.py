"""Does reading a request cost work in proportion to its bytes, whatever they are?

`python -m benchmarks.linear [--json]`

Each kind of hostile input is read at one size and at `TIMES` that size, within a server's limits: requests by
the HTTP front end with a core that answers at once, messages of gRPC and of workers by what reads them. Reported is the
processor time at the larger size over that at the smaller, divided by the ratio of the sizes: 1 is linear, `TIMES` is
quadratic. Exits with 1 above `LIMIT`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, cast

from benchmarks.harness import show
from benchmarks.http_floor import IdentityCore
from cotenant.errors import CotenantError
from cotenant.live.grpc import tensors
from cotenant.live.http import HttpServer, Limits
from cotenant.live.http.encoding import inflate
from cotenant.live.limits import MAX_RATIO
from cotenant.live.oip import Core
from cotenant.protocol import messages
from cotenant.worker.wire import Inbox

TIMES = 8
LIMIT = 4.0  # processor caches and the garbage collector make larger inputs dearer, too
ROUNDS = 3  # the best of so many
PATH = b"/v2/models/identity/infer"
HEAD = b"POST %s HTTP/1.1\r\nHost: a\r\n" % PATH


class _Caller(asyncio.Transport):
    """A transport of which nobody reads."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.closed = False

    def write(self, data: Any) -> None: ...
    def writelines(self, list_of_data: Any) -> None: ...
    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


_server = HttpServer(cast(Core, IdentityCore()), limits=Limits())


def http(data: bytes, piece: int = 1 << 16) -> None:
    """Let the front end read bytes as they would arrive."""
    caller = _Caller()
    protocol: Any = _server.connect()
    protocol.connection_made(caller)
    at = 0
    while at < len(data) and not caller.closed:
        room = protocol.get_buffer(-1)
        count = min(len(room), len(data) - at, piece)
        room[:count] = data[at : at + count]
        at += count
        protocol.buffer_updated(count)
    if not caller.closed:
        protocol.connection_lost(None)


def body(data: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data


def tensor(**fields: Any) -> bytes:
    return body(json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", **fields}]}).encode())


def rpc(data: bytes) -> None:
    try:
        tensors.check_fields(data)
        tensors.parse_message(messages.ModelInferRequest, data)
    except CotenantError:
        return


def unpack(data: bytes) -> None:
    try:
        inflate(bytearray(data), len(data) * MAX_RATIO)
    except CotenantError:
        return


class _Socket:
    """Gives bytes in pieces."""

    def __init__(self, data: bytes, piece: int) -> None:
        self.data, self.piece, self.at = data, piece, 0

    def recv_into(self, view: memoryview) -> int:
        part = self.data[self.at : self.at + min(len(view), self.piece)]
        view[: len(part)] = part
        self.at += len(part)
        return len(part)


def worker(data: bytes, piece: int) -> None:
    inbox = Inbox(cast(Any, _Socket(data, piece)))
    while inbox.fill():
        while inbox.take() is not None:
            pass


# By name: what is made of a size, and what reads it.
INPUTS: dict[str, tuple[int, Callable[[int], bytes], Callable[[bytes], None]]] = {
    "one byte a chunk": (
        20_000,
        lambda n: HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * n + b"0\r\n\r\n",
        http,
    ),
    "a body one byte at a time": (20_000, lambda n: body(b" " * n), lambda data: http(data, 1)),
    "many header lines": (1_200, lambda n: HEAD + b"X: y\r\n" * n + b"\r\n", http),
    "one long header line": (7_000, lambda n: HEAD + b"X: " + b"y" * n + b"\r\n\r\n", http),
    "a header one byte at a time": (
        7_000,
        lambda n: HEAD + b"X: " + b"y" * n + b"\r\n\r\n",
        lambda data: http(data, 1),
    ),
    "many trailer lines": (
        1_200,
        lambda n: HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * n + b"\r\n",
        http,
    ),
    "many requests at once": (500, lambda n: b"GET /v2/x HTTP/1.1\r\nHost: a\r\n\r\n" * n, http),
    "a long URL": (3_500, lambda n: b"GET /" + b"a/" * n + b" HTTP/1.1\r\nHost: a\r\n\r\n", http),
    "a compressed body": (200_000, lambda n: gzip.compress(b"[1," * n, 1), unpack),
    "numbers": (20_000, lambda n: tensor(shape=[1, n], data=[1.5] * n), http),
    "lists of one": (20_000, lambda n: tensor(shape=[1, n], data=[[1.5]] * n), http),
    "rows, some text": (20_000, lambda n: tensor(shape=[1, n], datatype="BYTES", data=["a"] * n), http),
    "a long name": (200_000, lambda n: tensor(name="x" * n), http),
    "many inputs": (2_000, lambda n: body(json.dumps({"inputs": [{"name": "x"}] * n}).encode()), http),
    "many outputs": (2_000, lambda n: body(json.dumps({"inputs": [], "outputs": [{"name": "y"}] * n}).encode()), http),
    "open brackets": (200_000, lambda n: body(b"[" * n), http),
    "fields of a message": (20_000, lambda n: b"\x2a\x00" * n, rpc),
    "dimensions of a message": (
        20_000,
        lambda n: messages.ModelInferRequest(inputs=[{"shape": [1] * n}]).SerializeToString(),
        rpc,
    ),
    "a worker's messages in pieces": (
        2_000,
        lambda n: (struct.pack("<Q", 100) + bytes(100)) * n,
        lambda data: worker(data, 7),
    ),
    "a worker's large message in pieces": (
        8_000_000,
        lambda n: struct.pack("<Q", n) + bytes(n),
        lambda data: worker(data, 1 << 16),
    ),
}


def seconds(data: bytes, read: Callable[[bytes], None]) -> float:
    """Return the processor time of reading once, the best of some."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        read(data)
        best = min(best, time.process_time() - begun)
    return best


def main() -> None:
    costs = {}
    for name, (size, make, read) in INPUTS.items():
        small, large = make(size), make(TIMES * size)
        costs[name] = seconds(large, read) / seconds(small, read) / (len(large) / len(small))
    worst = max(costs, key=lambda name: costs[name])
    show(
        "linear",
        f"{len(costs)} kinds of input, {TIMES} times the bytes cost {TIMES * costs[worst]:.1f} times ({worst}); "
        + ", ".join(f"{name} {cost:.2f}" for name, cost in costs.items()),
        worst=costs[worst],
        **{name.replace(" ", "_"): cost for name, cost in costs.items()},
    )
    sys.exit(costs[worst] > LIMIT)


if __name__ == "__main__":
    main()
