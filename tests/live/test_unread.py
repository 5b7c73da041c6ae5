"""Requests that are rejected unread: on the wire and by stock clients; heads are read as the parser reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from time import monotonic

import aiohttp
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from cotenant.live.access import Access, Role
from cotenant.live.http import HttpServer
from cotenant.live.http.load_shedding import INTERVAL
from tests.live.stub import Running, StubCore
from tests.live.test_http import INFER, ONE, Wire, ask, infer, request

LAG = 0.05
ONE_MIB = b"x" * (1 << 20)


class LateLoop:
    """A loop whose rounds began LAG seconds before anything in them is read. Rounds end in `end`."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []

    def time(self) -> float:
        return monotonic() - LAG

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self.soon.append(callback)

    def end(self) -> None:
        while self.soon:
            self.soon.pop()()


@pytest.fixture
def core() -> Iterator[StubCore]:
    core = StubCore()
    core.full.add("identity")
    yield core
    core.arena.close()


@pytest.fixture
def loop() -> LateLoop:
    return LateLoop()


@pytest.fixture(params=["known", "new"])
def server(request: pytest.FixtureRequest, core: StubCore, loop: LateLoop) -> HttpServer:
    """A server that has read the head of `infer(ONE)` before, or not."""
    server = HttpServer(core)
    if request.param == "known":
        teach(server, core, infer(ONE))
    server.shedder.attach(loop)
    return server


def teach(server: HttpServer, core: StubCore, data: bytes) -> None:
    """Send a request as often as it takes until its head is known."""
    wire = Wire(server)
    for _ in range(2):
        assert ask(wire, data).status == 200
    core.requests.clear()
    core.lost.clear()


@pytest.fixture
def wire(server: HttpServer) -> Wire:
    return Wire(server)


def rejected(wire: Wire, loop: LateLoop, data: bytes) -> None:
    """Send a request, and see it rejected at the end of the round."""
    before = len(wire.answers)
    wire.say(data)
    loop.end()
    (answer,) = wire.answers[before:]
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {"error": "request for model 'identity' rejected: the server is overloaded"}


def test_overloaded_server_rejects_unread_and_keeps_the_connection(wire: Wire, core: StubCore, loop: LateLoop) -> None:
    for _ in range(3):
        rejected(wire, loop, infer(ONE))
    assert [model for model, _ in core.unread] == ["identity"] * 3
    assert all(waited > LAG / 2 for _, waited in core.unread) and not core.requests
    core.full.clear()
    assert ask(wire, infer(ONE)).status == 200
    assert not wire.closed and core.lost[0] > LAG / 2


def test_rejection_waits_for_the_end_of_the_round(wire: Wire, loop: LateLoop) -> None:
    wire.say(infer(ONE))
    assert not wire.got
    loop.end()
    assert len(wire.answers) == 1


def test_request_in_pieces_is_rejected_and_its_connection_kept(wire: Wire, core: StubCore, loop: LateLoop) -> None:
    data = infer(ONE)
    for cut in (1, 40, len(data) - 1):
        before = len(wire.answers)
        wire.say(data[:cut])
        wire.say(data[cut:])
        loop.end()
        (answer,) = wire.answers[before:]
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
    assert len(core.unread) == 3 and not core.requests and not wire.closed


def test_pipelined_requests_are_answered_in_their_order(wire: Wire, core: StubCore, loop: LateLoop) -> None:
    other = infer(ONE, path="/v2/models/flat/infer")
    wire.say(infer(ONE))
    wire.say(request("GET", "/v2/health/live"))  # before the round ends
    wire.say(infer(ONE) + request("GET", "/v2/health/ready") + other)
    loop.end()
    assert [answer.status for answer in wire.answers] == [503, 200, 503, 200, 400]
    assert len(core.unread) == 2


def test_rejection_waits_for_the_response_before_it(wire: Wire, core: StubCore, loop: LateLoop) -> None:
    wire.say(infer(ONE, path="/v2/models/held/infer"))
    wire.say(infer(ONE))
    loop.end()
    assert not wire.got
    core.release()
    assert [answer.status for answer in wire.answers] == [200, 503]


def test_caller_that_was_not_read_is_read_again_once_the_loop_lags_no_more(
    wire: Wire, server: HttpServer, loop: LateLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.say(infer(ONE, path="/v2/models/held/infer") + request("GET", "/v2"))
    loop.end()
    assert wire.paused  # the caller could leave, and nobody would see it
    later = monotonic() + 2 * INTERVAL
    monkeypatch.setattr(server.shedder, "_clock", lambda: later)
    server.advance(1)
    assert not wire.paused and not wire.got


def test_large_body_is_rejected_before_it_is_received(wire: Wire, core: StubCore, loop: LateLoop) -> None:
    data = request("POST", INFER, ONE_MIB, Inference_Header_Content_Length="100")
    wire.say(data[: 1 << 15])
    loop.end()
    (answer,) = wire.answers
    assert answer.status == 503 and answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
    # Closed in this direction alone: a reset would take the response from a caller that still sends.
    assert wire.eof and not wire.closed and core.blocks == 0 and len(core.unread) == 1
    wire.say(data[1 << 15 :])
    assert len(wire.answers) == 1


def test_caller_that_asks_to_close_is_rejected_and_closed(wire: Wire, loop: LateLoop) -> None:
    rejected(wire, loop, request("POST", INFER, b"{}", Connection="close"))
    assert wire.closed and wire.answers[0].headers["connection"] == "close"


def test_request_with_its_own_timeout_is_read(wire: Wire, core: StubCore) -> None:
    assert ask(wire, infer(ONE, parameters={"timeout": 10_000_000})).status == 200
    assert not core.unread


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (request("GET", "/v2/health/live"), 200),
        (request("GET", "/v2/health/ready"), 200),
        (request("GET", "/v2/models/identity/ready"), 200),
        (request("GET", "/v2/models/identity"), 200),
        (request("POST", "/v2/repository/index"), 200),
        (request("POST", "/v2/logging", b'{"log_info":true}'), 200),
        (request("GET", INFER), 405),
        (infer(ONE, path="/v2/models/nope/infer"), 404),
        (infer(ONE, path="/v2/models/flat/versions/9/infer"), 404),
        (request("POST", "/nowhere", b"{}"), 404),
    ],
)
def test_overloaded_server_answers_all_but_inference(wire: Wire, core: StubCore, asked: bytes, status: int) -> None:
    assert ask(wire, asked).status == status
    assert not core.unread


def test_overloaded_server_asks_for_tokens_first(core: StubCore, loop: LateLoop) -> None:
    server = HttpServer(core, access=Access({Role.INFER: ["secret"]}))
    server.shedder.attach(loop)
    stranger = Wire(server)
    stranger.say(infer(ONE))
    loop.end()
    assert stranger.answers[0].status == 401 and not core.unread
    rejected(Wire(server), loop, request("POST", INFER, b"{}", Authorization="Bearer secret"))
    assert len(core.unread) == 1


def test_caller_that_leaves_before_its_rejection_is_counted_once(wire: Wire, core: StubCore, loop: LateLoop) -> None:
    wire.say(infer(ONE))
    wire.protocol.connection_lost(None)
    loop.end()
    assert not wire.got and len(core.unread) == 1


def test_drain_sends_rejections_and_closes(wire: Wire, server: HttpServer, loop: LateLoop) -> None:
    wire.say(infer(ONE))
    wire.protocol._table.drain()
    loop.end()
    assert wire.closed and [answer.status for answer in wire.answers] == [503]


# Stock clients see an answer, not a broken connection.


@contextmanager
def overloaded(front: Running) -> Iterator[None]:
    """Let the server's loop lag while its model has no time, as far as the shedder can see."""

    class Late(LateLoop):
        def call_soon(self, callback: Callable[[], object], /) -> None:
            front.loop.call_soon(callback)

    front.core.full.add("identity")
    front.call(lambda: front.server.shedder.attach(Late()))
    try:
        yield
    finally:
        front.core.full.clear()
        front.call(lambda: front.server.shedder.attach(front.loop))


def use_triton(address: str) -> None:
    x = np.ones((1, 16), np.float32)
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    with triton.InferenceServerClient(address) as client:
        for _ in range(3):
            with pytest.raises(InferenceServerException, match="the server is overloaded"):
                client.infer("identity", [tensor])
        assert client.is_server_ready()


def use_standard_library(address: str) -> None:
    connection = HTTPConnection(address)
    # The last is still being sent when it is rejected, and closes the connection; the library opens another.
    for body in (json.dumps({"inputs": [ONE]}).encode(), b"{}", ONE_MIB, ONE_MIB, b"{}"):
        connection.request("POST", INFER, body)
        answer = connection.getresponse()
        assert answer.status == 503 and answer.headers["Retry-After"] == "1" and b"overloaded" in answer.read()
    connection.close()


def use_aiohttp(address: str) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            for body in (json.dumps({"inputs": [ONE]}).encode(), b"{}", ONE_MIB, b"{}"):
                async with session.post(f"http://{address}{INFER}", data=body) as answer:
                    assert answer.status == 503 and "overloaded" in (await answer.json())["error"]

    asyncio.run(main())


@pytest.mark.parametrize(("use", "requests"), [(use_triton, 3), (use_standard_library, 5), (use_aiohttp, 4)])
def test_stock_client_is_told_of_overload(front: Running, use: Callable[[str], None], requests: int) -> None:
    before = len(front.core.unread)
    with overloaded(front):
        use(front.http)
    assert len(front.core.unread) - before == requests, "each is counted, once"


def test_request_to_upgrade_is_told_of_overload(wire: Wire, loop: LateLoop) -> None:
    """As Java's client sends its first."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    wire.say(request("POST", INFER, json.dumps({"inputs": [ONE]}).encode(), **headers))
    loop.end()
    assert [answer.status for answer in wire.answers] == [503] and not wire.closed


def test_lagging_loop_reads_a_caller_again_once_it_is_answered(wire: Wire, core: StubCore, loop: LateLoop) -> None:
    held = infer(ONE, path="/v2/models/held/infer")
    wire.say(held)
    assert not wire.paused
    wire.say(held)
    assert wire.paused
    core.release()
    assert not wire.paused
