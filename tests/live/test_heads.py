"""Heads that are remembered: they are read as the parser reads them, and requests with them are served as any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.live.access import Access, Role
from cotenant.live.http import HttpServer
from cotenant.live.http.heads import HeadCache
from cotenant.live.http.routes import find_route
from cotenant.live.limits import Limits
from tests.live.stub import StubCore
from tests.live.test_http import INFER, ONE, Wire, ask, infer, request
from tests.live.test_unread import LateLoop, rejected, teach


@pytest.fixture
def core() -> Iterator[StubCore]:
    core = StubCore()
    yield core
    core.arena.close()


class Messages:
    def __init__(self) -> None:
        self.complete = 0

    def on_message_complete(self) -> None:
        self.complete += 1


def count_requests(data: bytes) -> int:
    """Return how many requests these bytes are, and one after them; 0 where the parser takes them for anything else."""
    seen = Messages()
    try:
        httptools.HttpRequestParser(seen).feed_data(data + request("GET", "/v2"))
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return 0
    return seen.complete


LINES = st.sampled_from(
    [
        "Host: localhost",
        "host:x",
        "Content-Length: 2",
        "Content-Length: 02",
        "content-length:2",
        "Content-Length : 2",
        "Content-Length: 2, 2",
        "Content-Length: +2",
        "Content-Length: 20000000000000000000",
        "Content-Length: 7",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: identity",
        "Expect: 100-continue",
        "Connection: close",
        "Connection: keep-alive",
        "Connection: upgrade",
        "Upgrade: h2c",
        " folded: 1",
        "X: \x80",
        "X",
        "",
    ]
)
STARTS = st.sampled_from(
    [f"POST {INFER} HTTP/1.1"] * 4
    + [
        f"POST {INFER} HTTP/1.0",
        f"GET {INFER} HTTP/1.1",
        f"POST {INFER}?a=1 HTTP/1.1",
        "POST / HTTP/1.1",
        "PRI * HTTP/2.0",
    ]
)
ENDS = st.sampled_from(["\r\n"] * 6 + ["\n", "\r"])


@given(
    STARTS,
    st.lists(st.tuples(LINES, ENDS), max_size=5),
    st.sampled_from([b"{}", b"{", b"", b"{}\r\n\r\n", b"0\r\n\r\n"]),
)
def test_head_is_taken_for_a_whole_request_only_where_the_parser_says_so(
    start: str, lines: list[tuple[str, str]], body: bytes
) -> None:
    head = "".join([start, "\r\n", *(line + end for line, end in lines), "\r\n"]).encode("latin-1")
    heads = HeadCache(find_route, lambda headers: True)
    data = head + body
    assert heads.find(data) is None, "it was not there before"
    found = heads.find(data)
    assert heads.find(data) == found  # remembered
    if found is not None:
        assert count_requests(data) == 2 and found.route.model == "identity"


def test_ordinary_heads_are_recognized() -> None:
    for data in (infer(ONE), request("POST", INFER, b"{}"), request("POST", INFER + "?x=1", b"{}", Connection="close")):
        heads = taught(data)
        found = heads.find(data)
        assert found is not None and data[found.length :].startswith(b"{") and len(data) == found.length + found.size
        assert heads.find(data[:-1]) is None and heads.find(data + b"x") is None
    assert found is not None and found.closes and found.url == INFER.encode() + b"?x=1"
    long = request("POST", INFER, b"{}", X="y" * 3000)
    assert taught(long).find(long) is None


def taught(data: bytes) -> HeadCache:
    """Return a cache that has seen these bytes."""
    heads = HeadCache(find_route, lambda headers: True)
    heads.find(data)
    return heads


def test_head_with_two_hosts_or_none_is_left_to_be_refused() -> None:
    two = request("POST", INFER, b"{}", Host="b")
    none = request("POST", INFER, b"{}").replace(b"Host: localhost\r\n", b"")
    assert taught(two).find(two) is None and taught(none).find(none) is None


def test_head_cache_stays_bounded() -> None:
    heads = HeadCache(find_route, lambda headers: True)
    for number in range(5000):
        for _ in range(2 if number % 2 else 1):
            heads.find(request("POST", INFER, b"{}", X=str(number)))
    known: dict[bytes, Any] = heads._known
    assert 0 < len(known) <= 512 and len(heads._once) <= 512


# Requests that are read, whose heads are known


@pytest.fixture
def fast(core: StubCore) -> Wire:
    """A connection to a server that does not lag, and has read the head of `infer(ONE)` before."""
    server = HttpServer(core)
    teach(server, core, infer(ONE))
    return Wire(server)


def test_request_with_a_known_head_is_answered_as_any_other(fast: Wire, core: StubCore) -> None:
    slow = Wire(HttpServer(core))
    for data in (
        infer(ONE),
        infer(ONE).replace(b"1.0", b"[]]"),
        infer(ONE) + infer(ONE),
        infer(ONE) + b"\r\n" + infer(ONE),
        b"\r\n" + infer(ONE),
    ):
        fast.say(data)
        slow.say(data)
        assert fast.got == slow.got
    assert len(core.requests) > 0 and not fast.closed


def test_request_with_a_known_head_in_pieces_is_one_request(fast: Wire, core: StubCore) -> None:
    data = infer(ONE)
    for cut in range(1, len(data)):
        core.requests.clear()
        fast.say(data[:cut])
        assert not core.requests
        fast.say(data[cut:])
        assert len(core.requests) == 1
    assert {answer.status for answer in fast.answers} == {200}


def test_known_head_inside_a_body_is_no_request(fast: Wire, core: StubCore) -> None:
    data = infer(ONE)
    fast.say(request("POST", INFER, data)[: -len(data)])
    fast.say(data)
    assert [answer.status for answer in fast.answers] == [500] and not core.requests


def test_many_requests_with_known_heads_stop_reading_until_some_are_answered(fast: Wire, core: StubCore) -> None:
    held = infer(ONE, path="/v2/models/held/infer")
    for _ in range(40):
        fast.say(held)
    assert fast.paused
    core.release()
    assert not fast.paused


def test_memory_that_is_used_up_rejects_a_request_with_a_known_head(core: StubCore) -> None:
    server = HttpServer(core, limits=Limits(memory=1000))
    teach(server, core, infer(ONE))
    server._handler.memory.used += 1001
    assert ask(Wire(server), infer(ONE)).status == 503 and not core.requests


@pytest.mark.parametrize("limits", [Limits(body=20), Limits(json=20)])
def test_limits_hold_for_known_heads(core: StubCore, limits: Limits) -> None:
    server = HttpServer(core, limits=limits)
    for _ in range(4):
        assert ask(Wire(server), infer(ONE)).status == 413


def test_access_log_has_a_line_for_each_request_with_a_known_head(
    core: StubCore, caplog: pytest.LogCaptureFixture
) -> None:
    server = HttpServer(core, log_access=True)
    teach(server, core, infer(ONE))
    with caplog.at_level("INFO", "cotenant.access"):
        ask(Wire(server), infer(ONE))
        core.full.add("identity")
        loop = LateLoop()
        server.shedder.attach(loop)
        rejected(Wire(server), loop, infer(ONE))
    assert [record.getMessage().split()[3] for record in caplog.records] == ["200", "503"]


TOKENS = {Role.INFER: ["secret"], Role.OBSERVE: ["watch"]}


def bearing(words: str) -> bytes:
    return request("POST", INFER, json.dumps({"inputs": [ONE]}).encode(), Authorization=words)


@pytest.mark.parametrize(("words", "status"), [("", 401), ("Bearer wrong", 401), ("Bearer watch", 403)])
def test_head_without_a_token_that_may_infer_is_never_known(core: StubCore, words: str, status: int) -> None:
    server = HttpServer(core, access=Access(TOKENS))
    data = bearing(words) if words else infer(ONE)
    for _ in range(4):
        assert ask(Wire(server), data).status == status
        assert server._handler.heads.find(data) is None
    assert not core.requests


def test_head_with_a_token_is_known_and_its_likes_are_not(core: StubCore) -> None:
    server = HttpServer(core, access=Access(TOKENS))
    data = bearing("Bearer secret")
    teach(server, core, data)
    assert server._handler.heads.find(data) is not None
    assert ask(Wire(server), data).status == 200
    for other in (data.replace(b"secret", b"secreT"), data.replace(b"Bearer ", b"Basic "), infer(ONE)):
        assert ask(Wire(server), other).status == 401


def test_compressed_request_and_one_that_closes_are_served_as_before_though_their_heads_are_known(
    core: StubCore,
) -> None:
    server = HttpServer(core)
    closes = request("POST", INFER, json.dumps({"inputs": [ONE]}).encode(), Connection="close")
    for _ in range(4):
        wire = Wire(server)
        assert ask(wire, closes).headers["connection"] == "close" and wire.closed
    unknown = request("POST", INFER, b"{}", Content_Encoding="br")
    for _ in range(4):
        assert ask(Wire(server), unknown).status == 415


def test_caller_that_sends_many_requests_at_once_is_read_a_little_at_a_time(fast: Wire) -> None:
    """Others wait for a round of the loop at most, not for all that one caller sends."""
    fast.say(infer(ONE))
    assert len(fast.protocol.get_buffer(-1)) == 1 << 13
    fast.say(infer(ONE) * 10)
    assert len(fast.protocol.get_buffer(-1)) == 1 << 10
    fast.say(infer(ONE) * 2)
    assert len(fast.protocol.get_buffer(-1)) == 1 << 13
    fast.say(request("POST", INFER, bytes(20_000))[:9000])
    assert len(fast.protocol.get_buffer(-1)) == 1 << 16, "of a body"
