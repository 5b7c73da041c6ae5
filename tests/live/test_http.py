"""The HTTP front end: what it answers, next to what Triton 2.51.0 did, and that nothing a caller sends upsets it."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import ConfigError
from cotenant.live import codec
from cotenant.live.http import HttpServer, Limits
from cotenant.live.limits import MAX_AT_ONCE
from tests.live.remote import Remote
from tests.live.stub import Running, StubCore

ONE = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
INFER = "/v2/models/identity/infer"
DEEP = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 100_000


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def infer(*inputs: dict[str, Any], path: str = INFER, **more: Any) -> bytes:
    return request("POST", path, json.dumps({"inputs": inputs, **more}).encode())


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def answers(data: bytes, *, bare: bool = False) -> list[Answer]:
    """Everything that was answered; fails where it is not whole answers. bare: they were to HEAD."""
    found = []
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end, "an answer without its end"
        first, *lines = head.decode("ascii").split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if status == "100":
            continue
        size = 0 if bare else int(headers["content-length"])
        assert len(data) >= size
        found.append(Answer(int(status), headers, data[:size]))
        data = data[size:]
    return found


class Wire(asyncio.Transport):
    """A caller in the test's hands: what it says goes in through `say`, what it gets is in `got`."""

    def __init__(self, server: HttpServer, peer: str = "127.0.0.1") -> None:
        super().__init__({"peername": (peer, 50000)})
        self.got = b""
        self.closed = self.eof = self.paused = self.aborted = False
        self.unsent = 0
        self.protocol: Any = server.connect()
        self.protocol.connection_made(self)

    def say(self, data: bytes, size: int = 1 << 16) -> None:
        while data and not self.closed:
            room = self.protocol.get_buffer(-1)
            count = min(len(room), len(data), size)
            assert count > 0
            room[:count] = data[:count]
            data = data[count:]
            self.protocol.buffer_updated(count)

    def write(self, data: Any) -> None:
        assert not self.closed and not self.eof
        self.got += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def write_eof(self) -> None:
        self.eof = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    @property
    def answers(self) -> list[Answer]:
        return answers(self.got)


@pytest.fixture
def core() -> Iterator[StubCore]:
    core = StubCore()
    yield core
    core.arena.close()


async def status() -> dict[str, bool]:
    return {"ready": True}


@pytest.fixture(params=["one process", "several"])
def server(core: StubCore, request: pytest.FixtureRequest) -> HttpServer:
    """The front end in the server's process, and as one of several, which has to answer the same."""
    return HttpServer(core, status=status) if request.param == "one process" else Remote(core, status=status).server


@pytest.fixture
def wire(server: HttpServer) -> Wire:
    return Wire(server)


@pytest.fixture
def own(core: StubCore) -> Wire:
    """A caller of the server's own process."""
    return Wire(HttpServer(core))


def ask(wire: Wire, data: bytes) -> Answer:
    before = len(wire.answers)
    wire.say(data)
    (answer,) = wire.answers[before:]
    return answer


# What Triton answered, too.

OBSERVED: list[tuple[bytes, int]] = [
    (request("GET", "/v2"), 200),
    (request("GET", "/v2/"), 404),
    (request("GET", "/v2/health/live"), 200),
    (request("GET", "/v2/health/ready"), 200),
    (request("POST", "/v2/health/live"), 405),
    (request("GET", "/v2/models/identity"), 200),
    (request("GET", "/v2/models/identity/versions/1"), 200),
    (request("GET", "/v2/models/identity/versions/9"), 404),
    (request("GET", "/v2/models/nope"), 404),
    (request("GET", "/v2/models/identity/ready"), 200),
    (request("GET", "/v2/models/nope/ready"), 400),
    (request("GET", "/v2/models/identity/config"), 200),
    (request("GET", "/v2/models/identity/stats"), 200),
    (request("GET", "/v2/models/stats"), 200),
    (request("POST", "/v2/repository/index"), 200),
    (request("POST", "/v2/repository/index", b'{"ready":true}'), 200),
    (infer(ONE, id="42"), 200),
    (infer(ONE | {"data": [[1, 2, 3]]}, path="/v2/models/identity/versions/1/infer"), 200),
    (infer(ONE | {"data": [1, 2]}), 500),
    (infer(ONE | {"datatype": "FP64"}), 400),
    (infer(ONE | {"name": "zz"}), 400),
    (infer(ONE | {"shape": [50, 3], "data": [1]}), 500),
    (infer(), 400),
    (request("POST", INFER, b"{}"), 500),
    (request("POST", INFER, b"{bad"), 500),
    (infer(ONE, outputs=[{"name": "nope"}]), 400),
    (infer(ONE, path="/v2/models/nope/infer"), 404),
    (infer(ONE, path="/v2/models/identity/versions/9/infer"), 404),
    (infer(ONE, path="/v2/models/identity/versions/abc/infer"), 404),
    (request("GET", INFER), 405),
    (request("GET", "/v2/trace/setting"), 200),
    (request("POST", "/v2/trace/setting", b'{"trace_rate":"10"}'), 200),
    (request("GET", "/v2/logging"), 200),
    (request("GET", "/v2/systemsharedmemory/status"), 200),
    (request("GET", "/v2/cudasharedmemory/region/r/status"), 200),
    (request("GET", "/v2/unknown"), 404),
]


@pytest.mark.parametrize(("asked", "status"), OBSERVED)
def test_request_of_each_kind_gets_the_status_of_triton(wire: Wire, asked: bytes, status: int) -> None:
    answer = ask(wire, asked)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert status == 200 or list(answer.json) == ["error"]
    assert not wire.closed


def test_responses_have_the_keys_of_triton(wire: Wire) -> None:
    assert list(ask(wire, request("GET", "/v2")).json) == ["name", "version", "extensions"]
    assert ask(wire, request("GET", "/v2/models/identity")).json == {
        "name": "identity",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}],
    }
    assert ask(wire, infer(ONE, id="42")).body == (
        b'{"id":"42","model_name":"identity","model_version":"1",'
        b'"outputs":[{"name":"y","datatype":"FP32","shape":[1,3],"data":[1.0,2.0,3.0]}]}'
    )
    answer = ask(wire, infer(ONE, parameters={"binary_data_output": True}))
    length = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert json.loads(answer.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert len(answer.body) == length + 12
    assert {"name": "flat", "version": "1", "state": "READY"} in ask(wire, request("POST", "/v2/repository/index")).json
    assert "flat" in ask(wire, request("GET", "/v2/models")).json["models"]


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        (request("POST", "/v2/repository/other/models/identity/load"), 501, "one model repository"),
        (request("POST", "/v2/systemsharedmemory/region/r/register", b"{}"), 501, "no shared memory"),
        (request("POST", "/v2/repository/index", b"[1]"), 500, "not a JSON object"),
        (request("POST", "/v2/repository/index", b'{"a":' + b"[" * 100_000), 500, "nested too deeply"),
        (request("POST", INFER, b'{"a":' + b"[" * 100_000), 500, "nested too deeply"),
        (request("POST", INFER, DEEP), 500, "nested too deeply"),
        (infer(ONE | {"data": []}), 500, "'data' has 0 elements, but shape"),
        (infer(ONE | {"data": [1, 2, None]}), 500, "not a list of FP32"),
        (infer(ONE | {"data": [1, 2, 1e39]}), 500, "not a list of FP32"),
        (infer(ONE | {"data": [[1], [2, 3]]}), 500, "its rows differ in length"),
        (infer(ONE | {"data": {"a": 1}}), 500, "not a list"),
        (infer({"name": "x", "shape": [1, 1], "datatype": "FP32"}), 500, "neither 'data' nor"),
        (infer(ONE | {"shape": [-1, 3]}), 500, "shape"),
        (infer(ONE | {"datatype": "FP31"}), 400, "is FP31, but model 'identity' takes FP32"),
        (infer(ONE | {"shape": [3]}), 400, "shape [3]"),
        (infer(ONE | {"shape": [65, 1], "data": [1] * 65}), 400, "takes 1 to 64"),
        (infer(ONE | {"shape": [0, 3], "data": []}), 400, "takes 1 to 64"),
        (infer(ONE, ONE), 400, "takes each of 'x' once"),
        (infer(ONE | {"parameters": {"shared_memory_region": "r"}}), 501, "no shared memory"),
        (infer(ONE | {"parameters": {"binary_data_size": 12}}), 400, "0 bytes are left"),
        (infer(ONE, parameters={"timeout": -1}), 400, "'timeout': -1"),
        (infer(ONE, parameters={"timeout": "soon"}), 400, "'timeout': 'soon'"),
        (infer(ONE, parameters={"priority": True}), 400, "'priority': True"),
        (infer(ONE, parameters={"triton_x": 1}), 400, "reserved"),
        (infer(ONE | {"datatype": "FP16"}, path="/v2/models/fp16/infer"), 400, "JSON cannot carry; send it in binary"),
        (
            infer(ONE | {"datatype": "INT8", "data": [1, 2, 200]}, path="/v2/models/int8/infer"),
            500,
            "not a list of INT8",
        ),
        (infer(ONE, path="/v2/models/broken/infer"), 500, "the model failed"),
        (infer(ONE, path="/v2/models/%2E%2E/infer"), 404, "'..'"),
        (request("POST", INFER, b"{}", Inference_Header_Content_Length="9"), 400, "the body has 2 bytes"),
        (request("POST", INFER, b"{}", Inference_Header_Content_Length="-1"), 400, "it is a number of bytes"),
        (request("POST", INFER, b"{}", Content_Encoding="br"), 415, "use gzip or deflate"),
    ],
)
def test_bad_request_gets_a_status_and_a_reason(wire: Wire, asked: bytes, status: int, words: str) -> None:
    answer = ask(wire, asked)
    assert (answer.status, list(answer.json)) == (status, ["error"])
    assert words in answer.json["error"]
    assert ask(wire, infer(ONE)).status == 200


def test_rejected_request_says_when_to_retry(wire: Wire) -> None:
    answer = ask(wire, infer(ONE, path="/v2/models/refused/infer"))
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")


def test_absolute_url_is_served_and_readiness_follows_the_core(wire: Wire, core: StubCore) -> None:
    assert ask(wire, request("GET", "http://host/v2/models/identity")).status == 200
    core.is_ready = False
    assert ask(wire, request("GET", "/v2/health/ready")).status == 400


def test_head_request_gets_headers_without_a_body(wire: Wire) -> None:
    wire.say(request("HEAD", "/v2"))
    (answer,) = answers(wire.got, bare=True)
    assert answer.status == 200 and int(answer.headers["content-length"]) > 0


# The binary tensor extension


def test_raw_binary_request_is_one_row_of_the_only_input(wire: Wire, core: StubCore) -> None:
    answer = ask(wire, request("POST", INFER, bytes(12), Inference_Header_Content_Length="0"))
    assert core.requests[-1].inputs[0].shape == (1, 3)
    assert answer.body.endswith(b"}" + bytes(12))
    assert ask(wire, request("POST", INFER, bytes(10), Inference_Header_Content_Length="0")).status == 400
    ask(wire, request("POST", "/v2/models/bytes/infer", b"word", Inference_Header_Content_Length="0"))
    assert core.requests[-1].inputs[0].data == b"\4\0\0\0word"
    assert (
        ask(wire, request("POST", "/v2/models/pair/infer", b"word", Inference_Header_Content_Length="0")).status == 400
    )


def test_inputs_in_json_and_in_binary_mix_in_one_request(wire: Wire, core: StubCore) -> None:
    a = {"name": "a", "shape": [1, 2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}
    b = {"name": "b", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
    outputs = [{"name": "d", "parameters": {"binary_data": True}}, {"name": "c"}]
    head = json.dumps({"inputs": [a, b], "outputs": outputs}).encode()
    tail = (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    length = {"Inference_Header_Content_Length": str(len(head))}
    answer = ask(wire, request("POST", "/v2/models/pair/infer", head + tail, **length))
    got = json.loads(answer.body[: int(answer.headers["inference-header-content-length"])])
    assert got["outputs"] == [
        {"name": "d", "datatype": "FP64", "shape": [1, 3], "parameters": {"binary_data_size": 24}},
        {"name": "c", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]},
    ]
    for wrong in (tail[:-1], tail + b"\0"):
        assert ask(wire, request("POST", "/v2/models/pair/infer", head + wrong, **length)).status == 400


@pytest.mark.parametrize("chunk", [1 << 16, 1000, 40_001])
def test_large_tensor_is_received_into_shared_memory(own: Wire, core: StubCore, chunk: int) -> None:
    data = bytes(range(256)) * 1000
    tensor = {"name": "x", "shape": [1, 64_000], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    asked = request("POST", INFER, head + data, Inference_Header_Content_Length=str(len(head)))
    for _ in range(2):
        own.say(asked, chunk)
        taken = core.requests.pop().inputs[0]
        assert taken.block is not None
        assert (taken.start - taken.block.offset) % 64 == 0  # type: ignore[attr-defined]
        assert taken.data == data
    assert [answer.body[-len(data) :] == data for answer in own.answers] == [True, True]
    assert ask(own, infer(ONE)).status == 200
    free = core.arena.free
    del taken
    assert core.arena.free > free


def test_large_tensor_without_room_in_shared_memory_is_received_elsewhere(own: Wire, core: StubCore) -> None:
    full = core.arena.allocate(core.arena.free)
    head = json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 9000], "datatype": "FP32", "parameters": {"binary_data_size": 36_000}}]}
    ).encode()
    asked = request("POST", INFER, head + bytes(36_000), Inference_Header_Content_Length=str(len(head)))
    assert ask(own, asked).status == 200
    assert core.requests[-1].inputs[0].block is None
    assert full is not None


# Connections


def test_pipelined_requests_get_responses_in_order(wire: Wire, core: StubCore) -> None:
    held = "/v2/models/held/infer"
    wire.say(b"".join(infer(ONE, id=str(n), path=held if n in (1, 3) else INFER) for n in range(5)))
    assert [answer.json["id"] for answer in wire.answers] == ["0"]
    core.release(order=lambda handles: sorted(handles, reverse=True))
    assert [answer.json["id"] for answer in wire.answers] == ["0", "1", "2", "3", "4"]


def test_caller_with_too_many_pipelined_requests_is_not_read(wire: Wire, core: StubCore) -> None:
    wire.say(infer(ONE, path="/v2/models/held/infer") * 32)
    assert wire.paused
    core.release()
    assert not wire.paused and len(wire.answers) == 32


def test_caller_that_does_not_read_is_not_read(wire: Wire) -> None:
    wire.protocol.pause_writing()
    assert wire.paused
    wire.protocol.resume_writing()
    assert not wire.paused


def test_request_sent_byte_by_byte_gets_its_response(wire: Wire) -> None:
    wire.say(infer(ONE) + request("GET", "/v2/models/identity"), size=1)
    assert [answer.status for answer in wire.answers] == [200, 200]


def test_caller_that_leaves_cancels_its_requests(wire: Wire, core: StubCore) -> None:
    wire.say(infer(ONE, path="/v2/models/held/infer") * 3 + infer(ONE))
    assert wire.protocol.eof_received() is False
    wire.protocol.connection_lost(None)
    assert core.cancelled == [1, 2, 3]
    assert not core.held and wire.got == b""


def test_chunked_body_is_put_together(wire: Wire) -> None:
    body = infer(ONE).partition(b"\r\n\r\n")[2]
    parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:20], body[20:]))
    asked = request("POST", INFER, Transfer_Encoding="chunked") + parts + b"0\r\nTrailer: x\r\n\r\n"
    for size in (1 << 16, 1):
        wire.say(asked, size)
    assert [answer.status for answer in wire.answers] == [200, 200]


def test_expect_continue_is_answered_before_the_body(wire: Wire) -> None:
    head, _, body = infer(ONE).partition(b"\r\n\r\n")
    wire.say(head + b"\r\nExpect: 100-continue\r\n\r\n")
    assert wire.got == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.say(body)
    assert wire.answers[0].status == 200


def test_connection_closes_or_stays_as_its_version_and_header_say(server: HttpServer) -> None:
    for asked, stays, header in (
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", True, None),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", False, "close"),
        (b"GET /v2 HTTP/1.0\r\n\r\n", False, "close"),
        (b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True, "keep-alive"),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", True, None),
    ):
        wire = Wire(server)
        answer = ask(wire, asked)
        assert (answer.status, answer.headers.get("connection"), not wire.closed) == (200, header, stays)
    wire = Wire(server)
    wire.say(request("GET", "/v2", Connection="close") + request("GET", "/v2"))
    assert len(wire.answers) == 1


def test_bytes_that_are_not_http_get_400_and_time_to_read_it(wire: Wire, server: HttpServer, core: StubCore) -> None:
    wire.say(infer(ONE, path="/v2/models/held/infer") + b"\x16\x03\x01 hello")
    assert wire.got == b""
    core.release()
    assert [answer.status for answer in wire.answers] == [200, 400]
    assert wire.eof and not wire.closed
    wire.say(b"more" * 100_000)
    server.advance(6)
    assert wire.aborted


def test_body_or_head_above_its_limit_is_rejected(core: StubCore) -> None:
    server = HttpServer(core, limits=Limits(body=1000, head=500))
    chunk = b"400\r\n" + bytes(1024) + b"\r\n"
    for asked, status in (
        (request("POST", INFER, bytes(1001)), 413),
        (request("POST", INFER, Transfer_Encoding="chunked") + chunk * 3, 413),
        (request("GET", "/v2", Padding="x" * 1000), 431),
        (b"GET /" + b"x" * 1000, 431),
    ):
        wire = Wire(server)
        wire.say(asked, size=100)
        assert [answer.status for answer in wire.answers] == [status]
        assert wire.answers[0].headers["connection"] == "close" and wire.eof


@pytest.mark.parametrize("size", [1000, 1 << 16])
@pytest.mark.parametrize(
    "asked",
    [
        request("GET", "/" + "x" * 70_000),
        request("GET", "/v2", Padding="x" * 70_000),
        request("GET", "/v2")[:-2] + b"".join(b"X%d: y\r\n" % number for number in range(15_000)) + b"\r\n",
        request("GET", "/v2/health/live") + request("POST", INFER, b"{}", Padding="x" * 70_000),
    ],
)
def test_head_above_its_limit_is_rejected_in_however_few_pieces_it_comes(
    server: HttpServer, asked: bytes, size: int
) -> None:
    wire = Wire(server)
    wire.say(asked, size=size)
    assert wire.answers[-1].status == 431 and wire.eof


def test_connection_above_the_limit_gets_503_and_is_closed(core: StubCore) -> None:
    server = HttpServer(core, limits=Limits(connections=2))
    first, second, third = (Wire(server) for _ in range(3))
    assert [answer.status for answer in third.answers] == [503]
    assert third.answers[0].headers["retry-after"] == "1" and third.closed
    for wire in (first, third):
        wire.protocol.connection_lost(None)
    fourth = Wire(server)
    for wire in (second, fourth):
        wire.say(request("GET", "/v2"))
        assert [answer.status for answer in wire.answers] == [200]


def test_heads_of_pipelined_requests_do_not_add_up(core: StubCore) -> None:
    wire = Wire(HttpServer(core, limits=Limits(head=500)))
    wire.say(request("GET", "/v2") * 40, size=450)
    assert [answer.status for answer in wire.answers] == [200] * 40


def test_timeouts_of_heads_bodies_responses_and_idle_connections_are_kept(server: HttpServer, core: StubCore) -> None:
    idle, head, body, working, unread = (Wire(server) for _ in range(5))
    head.say(b"GET /v2 HTTP/1.1\r\n")
    body.say(infer(ONE)[:-3])
    working.say(infer(ONE, path="/v2/models/held/infer"))
    unread.say(infer(ONE))
    unread.unsent = 1
    for second in range(80):
        server.advance(1)
        if second < 9:
            head.say(b"x")
        if second == 20:
            body.say(infer(ONE)[-3:-2])
        if second == 25:
            unread.unsent = 2
        closed = [wire.closed or wire.eof for wire in (idle, head, body, working, unread)]
        if second == 5:
            assert closed == [False] * 5
        if second == 40:
            assert closed == [False, True, False, False, False]
        if second == 60:
            assert closed == [False, True, True, False, True]
    assert [answer.status for answer in head.answers + body.answers] == [408, 408]
    assert idle.closed and not working.closed
    core.release()
    assert working.answers[0].status == 200


def test_body_below_the_least_rate_is_cut_off(core: StubCore) -> None:
    server = HttpServer(core, limits=Limits(body_rate=100))
    paces = {pace: Wire(server) for pace in (1, 90, 110, 50_000)}
    for wire in paces.values():
        wire.say(request("POST", INFER, Content_Length="100000"))
    for _ in range(800):
        server.advance(1)
        for pace, wire in paces.items():
            if not wire.got:
                wire.say(b"x" * pace)
    assert [wire.answers[0].status if wire.got else 0 for wire in paces.values()] == [408, 408, 0, 500]
    assert [wire.eof for wire in paces.values()] == [True, True, False, False]


def test_drain_closes_idle_connections_and_answers_the_others(server: HttpServer, core: StubCore) -> None:
    async def run() -> None:
        idle, busy = Wire(server), Wire(server)
        busy.say(infer(ONE, path="/v2/models/held/infer") * 2)
        stopping = asyncio.create_task(server.stop(5.0))
        await asyncio.sleep(0)
        assert idle.closed and not busy.closed
        idle.protocol.connection_lost(None)
        core.release()
        assert [answer.headers.get("connection") for answer in busy.answers] == [None, "close"]
        assert busy.closed
        busy.protocol.connection_lost(None)
        await stopping

    asyncio.run(run())


def ask_later(server: HttpServer, data: bytes) -> Answer:
    """The answer of a handler that takes some turns of the event loop."""

    async def run() -> Answer:
        wire = Wire(server)
        wire.say(data)
        while not wire.got:
            await asyncio.sleep(0)
        return wire.answers[0]

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_metrics_accept_header_chooses_the_content_type(server: HttpServer, kind: str) -> None:
    answer = ask_later(server, request("GET", "/metrics?x=1", Accept=kind))
    assert answer.status == 200 and answer.headers["content-type"].startswith(f"{kind}; version=")
    assert b"cotenant_backend_info{" in answer.body


def test_page_and_status_without_a_source_are_not_found(server: HttpServer, core: StubCore) -> None:
    assert ask_later(server, request("GET", "/cotenant/status")).json == {"ready": True}
    for path in ("/", "/cotenant/page/page.js", "/cotenant/events", "/cotenant/status"):
        assert ask_later(HttpServer(core), request("GET", path)).status == 404


def test_drain_after_its_grace_aborts_connections(server: HttpServer) -> None:
    async def run() -> None:
        busy = Wire(server)
        busy.say(infer(ONE, path="/v2/models/held/infer"))
        await server.stop(0.0)
        assert busy.aborted

    asyncio.run(run())


def test_http_server_port_in_use_raises(front: Running) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match=rf"^cannot serve HTTP on 127.0.0.1:{front.port}: .*choose another"):
            await HttpServer(StubCore()).listen("127.0.0.1", front.port)
        with pytest.raises(ConfigError, match=r"^cannot serve HTTP on 127.0.0.1:99999: "):
            await HttpServer(StubCore()).listen("127.0.0.1", 99999)
        with pytest.raises(ConfigError, match=rf"^cannot serve metrics on 127.0.0.1:{front.port}: "):
            await HttpServer(StubCore(), only_metrics=True).listen("127.0.0.1", front.port)

    asyncio.run(run())


# Over a real socket


@contextmanager
def connected(front: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", front.port), timeout=5) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    return data


def test_compressed_body_is_unpacked_or_rejected(front: Running) -> None:
    body = json.dumps({"inputs": [ONE]}).encode()
    large = zlib.compress(bytes(1 << 20))
    bomb = zlib.compress(bytes(3 << 20))
    for data, encoding, status in (
        (gzip.compress(body), "gzip", 200),
        (zlib.compress(body), "deflate", 200),
        (body, "identity", 200),
        (gzip.compress(body)[:-9], "gzip", 400),
        (b"no gzip", "gzip", 400),
        (gzip.compress(body) + b"more", "gzip", 400),
        (large, "deflate", 500),
        (bomb, "deflate", 413),
    ):
        with connected(front) as sock:
            sock.sendall(request("POST", INFER, data, Content_Encoding=encoding, Connection="close"))
            assert [answer.status for answer in answers(read_all(sock))] == [status], encoding


def test_long_json_is_read_in_a_thread_while_others_are_served(front: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes; what it says is answered as if it were short."""
    go, decode, threads = threading.Event(), codec.decode, []

    def slowly(body: Any, info: Any, **more: Any) -> Any:
        if len(body) > MAX_AT_ONCE:
            threads.append(threading.current_thread().name)
            assert threads[-1] == "cotenant-json_0"
            assert go.wait(60)
        return decode(body, info, **more)

    def asked(tensor: dict[str, Any]) -> bytes:
        return request("POST", INFER, json.dumps({"inputs": [tensor]}).encode(), Connection="close")

    monkeypatch.setattr(codec, "decode", slowly)
    row, before = [0.5] * 2000, len(front.core.requests)
    long = {"name": "x", "shape": [50, 2000], "datatype": "FP32", "data": [row] * 50}
    bad, other = long | {"data": [[*row, 1], *[row] * 49]}, long | {"shape": [50, 1999]}
    with connected(front) as first, connected(front) as second, connected(front) as third, connected(front) as gone:
        for sock, tensor in ((first, long), (second, bad), (third, other), (gone, long)):
            sock.settimeout(60)
            sock.sendall(asked(tensor))
        while not threads:
            time.sleep(0.001)
        with connected(front) as quick:
            quick.settimeout(60)
            quick.sendall(asked(ONE))
            assert [answer.status for answer in answers(read_all(quick))] == [200]
        gone.close()
        go.set()
        (answer,) = answers(read_all(first))
        assert answer.status == 200 and json.loads(answer.body)["outputs"][0]["data"] == row * 50
        assert "its rows differ in length" in answers(read_all(second))[0].body.decode()
        assert "has 100000 elements, but shape [50, 1999] has 99950" in answers(read_all(third))[0].body.decode()
    assert set(threads) == {"cotenant-json_0"}
    assert len(front.core.requests) - before in (2, 3), "whose caller left may have been read before that was seen"


def test_large_response_is_written_in_a_thread_while_others_are_served(
    front: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON, or sorted; what is only sent is not."""
    begun, go, encode, threads = threading.Event(), threading.Event(), codec.encode, []

    def slowly(asked: Any, response: Any, *more: Any) -> Any:
        threads.append(threading.current_thread().name)
        begun.set()
        if response.outputs[0].shape[1] > 2 and asked.id != "quick":
            assert go.wait(60)
        return encode(asked, response, *more)

    def asked(id_: str, *outputs: dict[str, Any]) -> bytes:
        x = {"name": "x", "shape": [1, 100_000], "datatype": "FP32", "parameters": {"binary_data_size": 400_000}}
        head = json.dumps({"id": id_, "inputs": [x], "outputs": outputs}).encode()
        data = head + np.full(100_000, 0.5, np.float32).tobytes()
        return request("POST", INFER, data, Inference_Header_Content_Length=str(len(head)), Connection="close")

    monkeypatch.setattr(codec, "encode", slowly)
    best = {"name": "y", "parameters": {"classification": 2, "binary_data": True}}
    with connected(front) as listed, connected(front) as sorted_, connected(front) as quick:
        for sock, data in (
            (listed, asked("listed")),
            (sorted_, asked("sorted", best)),
            (quick, asked("quick", {"name": "y", "parameters": {"binary_data": True}})),
        ):
            sock.settimeout(60)
            sock.sendall(data)
            if sock is listed:
                assert begun.wait(60)
                assert front.server._handler.memory.used > 600_000, "its body, and its outputs"
        assert [answer.status for answer in answers(read_all(quick))] == [200]
        go.set()
        assert json.loads(answers(read_all(listed))[0].body)["outputs"][0]["data"] == [0.5] * 100_000
        assert b"0.500000:0" in answers(read_all(sorted_))[0].body
    assert threads.count("cotenant-json_0") == 2 and len(threads) == 3


def test_compressed_body_that_unpacks_above_the_limit_is_rejected(core: StubCore) -> None:
    async def run() -> None:
        wire = Wire(HttpServer(core, limits=Limits(body=100_000)))
        wire.say(request("POST", INFER, zlib.compress(bytes(200_000)), Content_Encoding="deflate"))
        while not wire.got:
            await asyncio.sleep(0.001)
        assert wire.answers[0].status == 413

    asyncio.run(run())


def test_large_response_is_compressed_where_the_caller_accepts_it(front: Running) -> None:
    large = {"name": "x", "shape": [1, 20_000], "datatype": "FP32", "data": [1.5] * 20_000}
    body = json.dumps({"inputs": [large]}).encode()
    for accept, encoding in (("gzip;q=0, deflate", "deflate"), ("gzip", "gzip"), ("br", None), ("identity", None)):
        with connected(front) as sock:
            sock.sendall(request("POST", INFER, body, Accept_Encoding=accept, Connection="close"))
            (answer,) = answers(read_all(sock))
        assert answer.headers.get("content-encoding") == encoding
        unpacked = zlib.decompress(answer.body, 47) if encoding else answer.body
        assert json.loads(unpacked)["outputs"][0]["data"] == large["data"]


def test_caller_that_closes_its_socket_cancels_its_request(front: Running) -> None:
    before = len(front.core.cancelled)
    for leave in (socket.SHUT_WR, None):
        with connected(front) as sock:
            sock.sendall(infer(ONE, path="/v2/models/held/infer") + request("GET", "/v2"))
            while not front.call(lambda: front.core.held):
                pass
            if leave is not None:
                sock.shutdown(leave)
                assert read_all(sock) == b""
        while front.call(lambda: front.core.held):
            pass
    assert len(front.core.cancelled) == before + 2


def test_rejection_reaches_a_caller_that_is_still_sending(front: Running) -> None:
    with connected(front) as sock:
        sock.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (INFER.encode(), 1 << 40))
        sock.sendall(bytes(1 << 20))
        assert [answer.status for answer in answers(read_all(sock))] == [413]


# Anything

CORE = StubCore()

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "a", ""]) | JSON_VALUES,
        "shape": st.lists(st.integers(-2, 9), max_size=3) | JSON_VALUES,
        "datatype": st.sampled_from(["FP32", "BYTES", "INT8", "BOOL", "FP16"]) | JSON_VALUES,
        "data": JSON_VALUES,
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "binary_data", "classification", "shared_memory_region"]), JSON_VALUES
        ),
    },
)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON_VALUES,
        "inputs": st.lists(TENSORS, max_size=3) | JSON_VALUES,
        "outputs": st.lists(TENSORS, max_size=2) | JSON_VALUES,
        "parameters": st.dictionaries(
            st.sampled_from(["timeout", "priority", "binary_data_output", "triton_x"]), JSON_VALUES
        ),
    },
)
MODELS = st.sampled_from(["identity", "bytes", "int8", "fp16", "bool", "pair", "flat"])


@settings(max_examples=300, deadline=None)
@given(MODELS, REQUESTS, st.binary(max_size=40), st.none() | st.integers(-1, 400))
def test_infer_with_any_body_gets_a_response(model: str, content: Any, tail: bytes, header: int | None) -> None:
    wire = Wire(HttpServer(CORE))
    body = json.dumps(content).encode()
    length = len(body) if header == 400 else header
    more = {} if length is None else {"Inference_Header_Content_Length": str(length)}
    answer = ask(wire, request("POST", f"/v2/models/{model}/infer", body + tail, **more))
    assert answer.status in (200, 400, 500, 501)
    assert answer.status == 200 or list(answer.json) == ["error"]
    assert ask(wire, infer(ONE)).status == 200


PIECES = [
    b"POST ",
    INFER.encode(),
    b" HTTP/1.1\r\n",
    b"Content-Length: 9\r\n",
    b"Content-Length: 40000\r\n",
    b"Inference-Header-Content-Length: 7\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"ffff\r\n",
    b"GET /v2 HTTP/1.1\r\n\r\n",
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.binary(max_size=30) | st.sampled_from([infer(ONE), *PIECES]),
        max_size=12,
    ),
    st.integers(1, 100),
)
def test_connection_fed_any_bytes_raises_nothing(parts: list[bytes], size: int) -> None:
    wire = Wire(HttpServer(CORE))
    wire.say(b"".join(parts), size)
    assert all(answer.status in (200, 400, 404, 405, 431, 500) for answer in wire.answers)
    wire.protocol.connection_lost(None)


def test_access_log_has_a_line_for_each_request_where_asked_for(
    core: StubCore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cotenant.access")
    ask(Wire(HttpServer(core)), infer(ONE))
    assert caplog.records == []
    wire = Wire(HttpServer(core, log_access=True))
    ask(wire, infer(ONE))
    ask(wire, request("GET", "/no%0awhere"))
    told = [record.__dict__["fields"] for record in caplog.records]
    assert [(fields["method"], fields["url"], fields["status"]) for fields in told] == [
        ("POST", INFER, 200),
        ("GET", "/no%0awhere", 404),
    ]
    assert told[0]["peer"] == "127.0.0.1" and told[0]["seconds"] >= 0
    assert told[0]["bytes"] == len(wire.answers[0].body)
    assert caplog.messages[0].startswith(f"127.0.0.1 POST {INFER} 200 ")
