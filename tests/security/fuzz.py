"""Seeded fuzzing of whatever reads bytes that others wrote: `make fuzz`, or a few inputs of each target as a test.

An input is a valid one with some of its bytes, numbers or parts changed. It may be refused with an error that is meant
to be read; anything else raised fails, with the seed that makes the input again. Where requests end is compared with
h11, an HTTP parser that has no line in common with ours.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from typing import Any, cast

import h11
import msgspec

from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import CotenantError, WorkerError
from cotenant.live import codec
from cotenant.live.grpc import tensors
from cotenant.live.http import HttpServer, Limits
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.request_handler import RequestHandler
from cotenant.protocol import messages
from cotenant.worker.wire import BatchResult, FromWorker, Inbox, TensorPart, Timing, ToWorker, encode_message
from tests.live.stub import StubCore
from tests.live.test_http import Wire

INFOS = [
    ModelInfo(
        name="m",
        version="1",
        platform="",
        inputs=(TensorSpec("x", datatype, shape),),
        outputs=(TensorSpec("y", "FP32", (-1, 4)),),
        max_batch_size=rows,
    )
    for datatype, shape, rows in (
        ("FP32", (-1, 4), 8),
        ("BYTES", (-1, -1), 8),
        ("INT8", (2, -1), 0),
        ("FP16", (-1, -1, -1), 4),
    )
]
NUMBERS = (b"0", b"-1", b"1", b"7", b"255", b"4294967296", b"9223372036854775808", b"18446744073709551616", b"1e400")
PIECES = (
    *NUMBERS,
    *(b"\0", b"\xff", b"\x80", b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b";", b",", b'"', b"{", b"}", b"[", b"]"),
    *(b"[[[[[[[[", b"null", b"true", b"NaN", b"\\ud800", b'"x"', b"chunked", b"gzip, ", b"close", b"h2c"),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n"),
    *(
        b"0\r\n\r\n",
        b"5\r\nhello\r\n",
        b"Expect: 100-continue\r\n",
        b"Host: a\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ),
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with up to four changes: one replaced, some cut out, repeated, swapped, or a piece put in."""
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 8, 40)))
        match rng.randrange(6):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:end] + data[at:]
            case 3:
                data = data[:at] + rng.choice(PIECES) + data[end:]
            case _:
                data = data[:at] + rng.choice(PIECES) + data[at:]
    return data


# Where requests end


class Recording(RequestHandler):
    """Keep the requests, and answer each at once."""

    requests: list[tuple[bytes, bytes, bytes]]

    def start(self, request: RequestCycle) -> None:
        self.requests.append((request.method, request.url, bytes(request.body)))
        request.reply({})


def ours(core: StubCore, data: bytes, size: int) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """Return the requests in some bytes, and whether what follows them was refused or would never be read."""
    server = HttpServer(core, limits=Limits(body=1 << 20))
    handler = server._handler
    handler.__class__ = Recording
    recording = cast(Recording, handler)
    recording.requests = []
    wire = Wire(server)
    wire.say(data, size=size)
    ended = wire.closed or wire.eof
    if not wire.closed:
        wire.protocol.connection_lost(None)
    assert handler.memory.used == 0, "memory is still counted after the caller left"
    return recording.requests, ended


def theirs(data: bytes) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """Return the same, as h11 reads it."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    requests: list[tuple[bytes, bytes, bytes]] = []
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, url, body = event.method, event.target, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                requests.append((method, url, body))
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return requests, True  # it closes
                connection.start_next_cycle()
            else:
                return requests, event is not h11.NEED_DATA
    except h11.RemoteProtocolError:
        return requests, True


BODY = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
REQUESTS = (
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n3;x=y\r\nefg\r\n0\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n\r\nbody",
    b"POST /x HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: t\r\n\r\n",
)
_core = StubCore()


def framing(rng: random.Random) -> None:
    data = mutated(b"".join(rng.choices(REQUESTS, k=rng.randint(1, 4))), rng)
    requests, ended = ours(_core, data, 1 << 16)
    for size in (1, rng.randint(2, 50)):
        again = ours(_core, data, size)
        assert again == (requests, ended), f"read in pieces of {size} it is {again}"
    others, others_ended = theirs(data)
    common = min(len(requests), len(others))
    assert requests[:common] == others[:common], f"h11 reads {others}"
    # Who reads fewer has to have refused the next: one who waits for more of it would take what follows for its body.
    assert len(requests) >= len(others) or ended, f"it waits, and h11 reads {others}"
    assert len(others) >= len(requests) or others_ended, f"h11 waits after {others}"


# What requests mean


def http_json(rng: random.Random) -> None:
    data = mutated(_body(rng), rng)
    _decode(data, None, rng)


def http_binary(rng: random.Random) -> None:
    size = rng.choice((0, 1, 4, 16, 64))
    given = {"name": "x", "shape": [1, size // 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = mutated(json.dumps({"inputs": [given]}).encode(), rng)
    tail = mutated(rng.choice((bytes(size), b"\2\0\0\0ab" * 3, rng.randbytes(size))), rng)
    _decode(head + tail, rng.choice((len(head), len(head), 0, 1, len(head) + 1, 1 << 62)), rng)


def _body(rng: random.Random) -> bytes:
    info = rng.choice(INFOS).inputs[0]
    shape = [rng.randint(0, 3) if size < 0 else size for size in info.shape]
    element: Any = "a" if info.datatype == "BYTES" else 1
    given = {"name": "x", "shape": shape, "datatype": info.datatype, "data": [element] * rng.randint(0, 9)}
    more = {"outputs": [{"name": "y"}], "id": "é", "parameters": {"timeout": 5, "priority": 1}}
    return json.dumps({"inputs": [given]} | (more if rng.random() < 0.5 else {})).encode()


def _decode(data: bytes, header: int | None, rng: random.Random) -> None:
    try:
        request, _ = codec.decode(data, rng.choice(INFOS), header=header)
    except CotenantError:
        return
    encode_message(_batch(request.inputs))  # whatever is accepted can be sent to a worker


def _batch(inputs: Any) -> Any:
    parts = [TensorPart(each.name, each.datatype, each.shape, memoryview(each.data)) for each in inputs]
    return BatchResult(1, [parts], Timing(0, 0, 0, 0, 0, 0))


def grpc_messages(rng: random.Random) -> None:
    info = rng.choice(INFOS)
    spec = info.inputs[0]
    shape = [rng.randint(0, 3) if size < 0 else size for size in spec.shape]
    message = messages.ModelInferRequest(
        model_name="m",
        inputs=[{"name": "x", "datatype": spec.datatype, "shape": shape, "contents": {"fp32_contents": [1] * 4}}],
        outputs=[{"name": "y", "parameters": {"classification": {"int64_param": 3}}}],
        raw_input_contents=[bytes(16)] if rng.random() < 0.5 else [],
        parameters={"timeout": {"int64_param": rng.choice((1, -1, 2**62))}},
    )
    data = mutated(message.SerializeToString(), rng)
    try:
        tensors.check_fields(data)
        request = tensors.read_request(
            tensors.parse_message(messages.ModelInferRequest, data), info, rng.choice((None, 1.0))
        )
    except CotenantError:
        return
    encode_message(_batch(request.inputs))


class _Stream:
    """A socket that gives some bytes in pieces."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        self.data, self.rng = data, rng

    def recv_into(self, view: memoryview) -> int:
        count = min(len(view), len(self.data), self.rng.choice((1, 7, 1 << 16)))
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        return count


_decoders = msgspec.msgpack.Decoder(FromWorker), msgspec.msgpack.Decoder(ToWorker)
_MESSAGES = b"".join(
    bytes(encode_message(BatchResult(batch, [[TensorPart("y", "FP32", (1, 2), memoryview(bytes(8)))], "no"], timing)))
    for batch, timing in ((1, Timing(0, 0, 0, 0, 0, 0)), (2**40, Timing(1e300, 0, 0, 0, 0, 0)))
)


def worker_protocol(rng: random.Random) -> None:
    inbox = Inbox(cast(Any, _Stream(mutated(_MESSAGES, rng), rng)))
    try:
        while True:
            while (message := inbox.take()) is not None:
                rng.choice(_decoders).decode(message)
            if len(inbox._buffer) > 1 << 20:
                return  # it waits for a long message, which will not come
            if not inbox.fill():
                return
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, WorkerError, MemoryError):
        return


TARGETS: dict[str, Callable[[random.Random], None]] = {
    "framing": framing,
    "http-json": http_json,
    "http-binary": http_binary,
    "grpc": grpc_messages,
    "worker-protocol": worker_protocol,
}


def fuzz(target: str, count: int, seed: int) -> None:
    """Try `count` inputs from a seed on. Raises AssertionError that names the one that failed."""
    for number in range(seed, seed + count):
        try:
            TARGETS[target](random.Random(number))  # noqa: S311  # to be repeated, not to be secret
        except Exception as error:
            raise AssertionError(f"{target}, seed {number}: {error!r}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="Inputs for each target")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the first input")
    parser.add_argument("--target", choices=TARGETS, action="append", help="Target to fuzz; all by default")
    options = parser.parse_args()
    for target in options.target or TARGETS:
        fuzz(target, options.count, options.seed)
        sys.stdout.write(f"{target}: {options.count} inputs from seed {options.seed}, no failure\n")


if __name__ == "__main__":
    main()
