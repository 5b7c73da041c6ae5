"""Seeded fuzzing of whatever reads bytes that others wrote: `make fuzz`, or a few inputs of each target as a test.

An input is a valid one with some of its bytes, numbers or parts changed. It may be refused with an error that is meant
to be read; anything else raised fails, with the seed that makes the input again. Where requests end is compared with
h11, an HTTP parser that has no line in common with ours, and with llhttp alone, which ours is built on.

    python -m tests.security.fuzz [--count N] [--seed S] [--target NAME …]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import mmap
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest import mock

import h11
import httptools
import msgspec

from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.errors import CotenantError, WorkerError
from cotenant.live import codec
from cotenant.live.batch_tensors import tensor_of
from cotenant.live.grpc import tensors
from cotenant.live.http import HttpServer, Limits
from cotenant.live.http.request_cycle import RequestCycle
from cotenant.live.http.request_handler import RequestHandler
from cotenant.live.http_processes.board import SIZE, Board
from cotenant.live.http_processes.link import CLOSED, Link
from cotenant.live.http_processes.messages import (
    HEAD,
    Answer,
    Cancel,
    Event,
    Failure,
    Forward,
    Infer,
    LookUp,
    Model,
    Response,
    Returned,
    ToHttpProcess,
    ToServer,
    Unread,
)
from cotenant.live.http_processes.publisher import AdmissionPublisher
from cotenant.live.http_processes.remote_core import RemoteCore
from cotenant.live.http_processes.session import HttpProcessSession
from cotenant.live.oip import InferRequest
from cotenant.live.process import WorkerConnection, WorkerProcess
from cotenant.protocol import messages
from cotenant.worker import wire
from cotenant.worker.arena import Block, Region
from cotenant.worker.wire import (
    BatchResult,
    TensorPart,
    Timing,
    ToWorker,
    WorkerBroken,
    WorkerClosed,
    WorkerReady,
    encode_message,
)
from tests.live.remote import StubLoop
from tests.live.stub import StubCore
from tests.live.test_http import Wire, answers

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


VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, 1.5, -0.0, "", "x", "y", "FP32", "BYTES", "\0", "é" * 40),
    *([], [[]], [[[1]]], [1, 2, 3, 4], ["a", "b"], {}, {"binary_data_size": 16}, {"binary_data": True}),
    *({"classification": 2}, {"shared_memory_region": "r"}, {"timeout": 1}, {"sequence_id": 1}),
)


def changed(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one part of it replaced, repeated, dropped or renamed."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice(VALUES)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * rng.choice((2, 3, 20)) + value[at + 1 :]
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    key = rng.choice(list(value))
    rest = {name: each for name, each in value.items() if name != key}
    match rng.randrange(12):
        case 0:
            return rest
        case 1:
            return value | {rng.choice(("id", "parameters", "outputs", "inputs", "data", "shape", "name")): value[key]}
    return rest | {key: changed(value[key], rng)}


def body_of(value: Any, rng: random.Random) -> bytes:
    """Return a JSON body that is changed: some of it as JSON, some as bytes, some as both."""
    for _ in range(rng.randint(0, 3)):
        value = changed(value, rng)
    data = json.dumps(value).encode()
    return mutated(data, rng) if rng.random() < 0.4 else data


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
    caller = Wire(server)
    caller.say(data, size=size)
    ended = caller.closed or caller.eof
    if not caller.closed:
        caller.protocol.connection_lost(None)
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


class _Requests:
    """Collects what llhttp tells."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, bytes, bytes]] = []
        self.parser = httptools.HttpRequestParser(self)
        self.url = self.body = b""

    def on_message_begin(self) -> None:
        self.url = self.body = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.requests.append((self.parser.get_method(), self.url, self.body))


def llhttp(data: bytes) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """Return the same, as llhttp reads it. It ends at an upgrade, whose body it does not read."""
    reader = _Requests()
    try:
        reader.parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        del reader.requests[-1:]
        return reader.requests, True
    except httptools.HttpParserError:
        return reader.requests, True
    return reader.requests, not reader.parser.should_keep_alive()


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
    size = rng.choice((1, rng.randint(2, 50)))
    again = ours(_core, data, size)
    assert again == (requests, ended), f"read in pieces of {size} it is {again}"
    for name, (others, others_ended) in (("h11", theirs(data)), ("llhttp", llhttp(data))):
        common = min(len(requests), len(others))
        assert requests[:common] == others[:common], f"{name} reads {others}"
        # Who reads fewer has to have refused the next: one who waits for more of it would take what follows for its
        # body.
        assert len(requests) >= len(others) or ended, f"it waits, and {name} reads {others}"
        assert len(others) >= len(requests) or others_ended, f"{name} waits after {others}"


# What requests are answered

_server = HttpServer(_core, limits=Limits(body=1 << 20))
_ANSWERS = (200, 400, 404, 413, 500, 501, 503)


_STUBS = (
    *(("identity", "FP32"), ("bytes", "BYTES"), ("fp16", "FP16"), ("int8", "INT8"), ("uint64", "UINT64")),
    *(("bool", "BOOL"), ("bf16", "BF16"), ("flat", "FP32"), ("pair", "INT64"), ("refused", "FP32"), ("broken", "FP32")),
)


def _element(datatype: str, rng: random.Random) -> bytes:
    """Return the bytes of one element."""
    if datatype == "BYTES":
        return b"\2\0\0\0ab"
    return rng.randbytes({"INT8": 1, "BOOL": 1, "FP16": 2, "BF16": 2, "FP32": 4}.get(datatype, 8))


def http_answers(rng: random.Random) -> None:
    """Any body gets one whole answer, and leaves nothing behind."""
    model, datatype = rng.choice(_STUBS)
    names = ("a", "b") if model == "pair" else ("x",)
    given: list[dict[str, Any]] = []
    tail = b""
    for name in names:
        tensor: dict[str, Any] = {"name": name, "shape": [4] if model == "flat" else [1, 4], "datatype": datatype}
        if rng.random() < 0.5:
            data = _element(datatype, rng) * 4
            tensor["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            tensor["data"] = ["a" if datatype == "BYTES" else rng.choice((0, 1))] * 4
        given.append(tensor)
    kind = rng.choice(("binary_data", "classification"))
    outputs = {"outputs": [{"name": "y", "parameters": {kind: 2 if kind == "classification" else True}}]}
    body = body_of({"inputs": given} | (outputs if rng.random() < 0.5 else {}), rng)
    head = b""
    if tail:
        head = b"Inference-Header-Content-Length: %d\r\n" % len(body)
        body += mutated(tail, rng) if rng.random() < 0.3 else tail
    caller = Wire(_server)
    caller.say(
        b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: a\r\n%sContent-Length: %d\r\n\r\n%s"
        % (model.encode(), head, len(body), body)
    )
    told = answers(caller.got)
    assert len(told) == 1 and told[0].status in _ANSWERS, told
    assert told[0].status != 500 or b"internal" not in told[0].body.lower(), told[0].body
    if not caller.closed:
        caller.protocol.connection_lost(None)
    assert _server._handler.memory.used == 0, "memory is still counted after the caller left"


# What requests mean


def http_json(rng: random.Random) -> None:
    _decode(body_of(_body(rng), rng), None, rng)


def http_binary(rng: random.Random) -> None:
    size = rng.choice((0, 1, 4, 16, 64))
    given = {"name": "x", "shape": [1, size // 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = body_of({"inputs": [given]}, rng)
    tail = mutated(rng.choice((bytes(size), b"\2\0\0\0ab" * 3, rng.randbytes(size))), rng)
    _decode(head + tail, rng.choice((len(head), len(head), 0, 1, len(head) + 1, 1 << 62)), rng)


def _body(rng: random.Random) -> dict[str, Any]:
    info = rng.choice(INFOS).inputs[0]
    shape = [rng.randint(0, 3) if size < 0 else size for size in info.shape]
    element: Any = "a" if info.datatype == "BYTES" else 1
    given = {"name": "x", "shape": shape, "datatype": info.datatype, "data": [element] * rng.randint(0, 9)}
    more = {"outputs": [{"name": "y"}], "id": "é", "parameters": {"timeout": 5, "priority": 1}}
    return {"inputs": [given]} | (more if rng.random() < 0.5 else {})


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

    def setblocking(self, flag: bool) -> None: ...

    def close(self) -> None: ...

    def fileno(self) -> int:
        return -1


class _Process(WorkerProcess):
    """A process that is told to end, and nothing else."""

    def __init__(self, stream: _Stream) -> None:
        self.lines = set()
        self.reason = ""
        self._stream = stream

    def connect(self) -> Any:
        return self._stream

    def kill(self, reason: str) -> None:
        self.reason = self.reason or reason

    def end(self) -> None:
        self.reason = self.reason or "it closed its socket"

    def clear(self, lines: Any, reason: str) -> None:
        self.reason = self.reason or reason


class _Loop:
    """A loop on which nothing runs."""

    def create_future(self) -> Any:
        return asyncio.Future(loop=cast(Any, self))

    def get_debug(self) -> bool:
        return False

    def call_soon(self, *args: Any, **options: Any) -> Any: ...

    def add_reader(self, *args: Any) -> None: ...

    def remove_reader(self, *args: Any) -> bool:
        return True

    def remove_writer(self, *args: Any) -> bool:
        return True

    def create_task(self, work: Any) -> Any:
        work.close()
        return self.create_future()


_loop = cast(Any, _Loop())
LONGEST = 1 << 20  # bytes of a message to or from a worker: longer ones would only take memory
_ROOM = Block(4096, 256, memoryview(bytes(256)))
_FROM_WORKER = (
    WorkerReady({"m": 64}),
    WorkerBroken("no"),
    WorkerClosed(),
    BatchResult(1, [[TensorPart("y", "FP32", (1, 2), memoryview(bytes(8)))], "no"], Timing(0, 0, 0, 0, 0, 0)),
    BatchResult(2**40, [[TensorPart("y", "FP32", (1, 2), None, 4096, 8)]], Timing(1e300, 0, 0, 0, 0, 0)),
)
_ENCODED = [bytes(encode_message(message)) for message in _FROM_WORKER]
_to_server = msgspec.msgpack.Decoder(ToWorker)


def worker_protocol(rng: random.Random) -> None:
    """A connection takes what it can read of a worker's bytes, and ends the worker where it cannot."""
    stream = _Stream(mutated(b"".join(rng.choices(_ENCODED, k=rng.randint(1, 4))), rng), rng)
    process = _Process(stream)

    def answered(line: object, answer: BatchResult, size: int) -> None:
        for parts in answer.requests:
            for part in () if isinstance(parts, str) else parts:
                tensor = tensor_of(part, _ROOM)
                assert len(tensor.data) <= size + 256

    asyncio._set_running_loop(_loop)
    try:
        line = WorkerConnection(process, answered=answered)
        for _ in range(10_000):
            if process.reason:
                break
            line.receive()
    finally:
        asyncio._set_running_loop(None)
    assert process.reason, "its end was never noticed"
    try:
        _to_server.decode(stream.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return


# What the processes that accept HTTP and the server's process send each other

_FROM_HTTP = (
    LookUp(1, "identity", ""),
    Infer(
        2, "identity", "1", [TensorPart("x", "FP32", (1, 4), memoryview(bytes(16)))], 0, 0.0, 0, 1, 0.5, None, 3, "t"
    ),
    Infer(3, "held", "", [TensorPart("x", "FP32", (1, 64), None, 0, 256)], 7, 0.0),
    Infer(6, "identity", "1", [TensorPart("x", "FP32", (1, 1), memoryview(bytes(4)))], 0, 0.0, 5),
    Forward(4, b"GET", b"/v2/models/m/stats", {b"host": b"localhost"}, b"", "127.0.0.1", False, False),
    Forward(5, b"POST", b"/v2/logging", {b"host": b"localhost"}, b'{"log_info":false}', "127.0.0.1", True, True),
    Cancel(3),
    Unread("identity", [0.1, 0.2]),
    Returned([2, 3]),
)
_FROM_SERVER = (
    Model(1, INFOS[0], 0, 0),
    Answer(2, "1", [TensorPart("y", "FP32", (1, 4), memoryview(bytes(16)))]),
    Answer(3, "1", [TensorPart("y", "FP32", (1, 64), None, 0, 256)]),
    Failure(2, "UnavailableError", "full", 1.0),
    Response(4, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
    Event(4, b"data: x\n\n"),
    Returned([2]),
)
_OPEN = InferRequest(model="m", version="1", inputs=(Tensor("x", "FP32", (1, 4), bytes(16)),))
_PART = Block(0, 1024, memoryview(bytes(1024)))
_board = Board(memoryview(bytearray(SIZE)), 1)
_to_http = msgspec.msgpack.Decoder(list[ToHttpProcess])
_to_session = msgspec.msgpack.Decoder(list[ToServer])


def _frames(known: tuple[Any, ...], rng: random.Random) -> bytes:
    """Return frames of messages, some with parts or bytes changed."""
    data = b""
    for _ in range(rng.randint(1, 3)):
        batch = [msgspec.to_builtins(each, builtin_types=(bytes, memoryview)) for each in rng.choices(known, k=3)]
        for _ in range(rng.randint(0, 2)):
            batch = changed(batch, rng)
        frame = _packed(batch)
        data += HEAD.pack(len(frame)) + (mutated(frame, rng) if rng.random() < 0.3 else frame)
    return mutated(data, rng) if rng.random() < 0.2 else data


def _packed(batch: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(batch)
    except (OverflowError, TypeError):  # an integer of more than 64 bits, a key that is none
        return b"\x90"


def _carry(data: bytes, kinds: Any, take: Callable[[Any], None], rng: random.Random) -> None:
    """Let a link take some bytes until it ends. Raises what a message made `take` raise, but for a broken protocol."""
    stream, errors, ends = _Stream(data, rng), list[Exception](), list[str]()

    def taking(message: Any) -> None:
        try:
            take(message)
        except WorkerError:
            raise
        except Exception as error:  # noqa: BLE001  # it is raised below: a link logs it
            errors.append(error)

    link: Link[Any] = Link(cast(Any, stream), kinds, taking, taken=lambda: None, lost=ends.append)
    for _ in range(10_000):
        if ends:
            break
        link.receive()
    for error in errors:
        raise error
    assert ends and (ends[0] == CLOSED or ends[0].startswith("it broke the protocol")), "its end was never noticed"


def _read(decoder: msgspec.msgpack.Decoder[Any], frame: bytearray) -> None:
    """Read a frame as the other process would."""
    decoder.decode(frame[HEAD.size :])


def http_processes(rng: random.Random) -> None:
    """Either process takes what it can read of the other's frames, and ends the link where it cannot."""
    loop, handler = StubLoop(), _server._handler
    asyncio._set_running_loop(_loop)
    try:
        publisher = AdmissionPublisher(_core, _board, loop=loop)
        publisher.slot("identity")
        session = HttpProcessSession(0, _core, handler, _board, publisher, _PART, partial(_read, _to_http), loop)
        _carry(_frames(_FROM_HTTP, rng), ToServer, session.take, rng)
        loop.run_timers()
        session.close()
        assert handler.memory.used == 0, "memory is still counted after the process ended"

        region = Region(_memory, 0, len(_memory), kept=0)
        remote = RemoteCore(0, _board, region, _PART, partial(_read, _to_session), loop, clock=lambda: 0.0)
        told = list[Any]()
        remote._look_up("m", "1", told.append)
        remote.take(Model(1, INFOS[0], _board.models, 0))
        assert told == [None] and remote.infer(_OPEN, told.append) == 2
        _carry(_frames(_FROM_SERVER, rng), ToHttpProcess, remote.take, rng)
    finally:
        asyncio._set_running_loop(None)
        _core.held.clear()
        for kept in (_core.requests, _core.unread, _core.cancelled, _core.lost):
            cast(list[Any], kept).clear()


_memory = mmap.mmap(-1, 4096)

TARGETS: dict[str, Callable[[random.Random], None]] = {
    "framing": framing,
    "http-answers": http_answers,
    "http-json": http_json,
    "http-binary": http_binary,
    "grpc": grpc_messages,
    "worker-protocol": worker_protocol,
    "http-processes": http_processes,
}


def failures(target: str, count: int, seed: int) -> list[str]:
    """Try `count` inputs from a seed on, until one fails; return what failed, with its seed."""
    with mock.patch.object(wire, "MAX_MESSAGE", LONGEST):
        for number in range(seed, seed + count):
            try:
                TARGETS[target](random.Random(number))  # noqa: S311  # to be repeated, not to be secret
            except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
                return [f"{target}, seed {number}: {error!r}"]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="Inputs for each target")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the first input")
    parser.add_argument("--target", choices=TARGETS, action="append", help="Target to fuzz; all by default")
    options = parser.parse_args()
    logging.disable()  # of requests that end in an error
    found = []
    for target in options.target or TARGETS:
        begun = time.process_time()
        failed = failures(target, options.count, options.seed)
        each = (time.process_time() - begun) / options.count * 1e6
        told = failed[0] if failed else f"no failure, {each:.0f} µs each"
        sys.stdout.write(f"{target}: {options.count} inputs from seed {options.seed}: {told}\n")
        found += failed
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
