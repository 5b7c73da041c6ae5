"""Where a request ends: what could be read in two ways is refused, and nothing hides behind a request."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cotenant.live.http import HttpServer
from tests.live.stub import StubCore
from tests.live.test_http import INFER, ONE, Wire, request
from tests.security.fuzz import ours
from tests.security.server import ORDINARY, Served, post, read_response

BODY = json.dumps({"inputs": [ONE]}).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.fixture
def wire() -> Iterator[Wire]:
    core = StubCore()
    yield Wire(HttpServer(core))
    core.arena.close()


def head(*lines: str, start: str = f"POST {INFER} HTTP/1.1", host: str = "Host: test") -> bytes:
    return "\r\n".join([start, *([host] if host else []), *lines, "", ""]).encode("latin-1")


LENGTH = f"Content-Length: {len(BODY)}"
REFUSED: dict[str, tuple[bytes, int]] = {
    "two hosts": (head("Host: other", LENGTH) + BODY, 400),
    "two hosts in other case": (head("hOST: test", LENGTH) + BODY, 400),
    "two lengths": (head(LENGTH, LENGTH) + BODY, 400),
    "two lengths that differ": (head(LENGTH, "Content-Length: 0") + BODY, 400),
    "a list of lengths": (head(f"{LENGTH}, {len(BODY)}") + BODY, 400),
    "a signed length": (head(f"Content-Length: +{len(BODY)}") + BODY, 400),
    "a negative length": (head("Content-Length: -1") + BODY, 400),
    "a length in hexadecimal": (head(f"Content-Length: {len(BODY):#x}") + BODY, 400),
    "a length above 64 bits": (head(f"Content-Length: {2**64}") + BODY, 400),
    "a length with a space before its colon": (head(f"Content-Length : {len(BODY)}") + BODY, 400),
    "length and chunks": (head(LENGTH, "Transfer-Encoding: chunked") + CHUNKED, 400),
    "chunks and length": (head("Transfer-Encoding: chunked", LENGTH) + CHUNKED, 400),
    "gzip, chunked": (head("Transfer-Encoding: gzip, chunked") + CHUNKED, 501),
    "gzip and chunked on two lines": (head("Transfer-Encoding: gzip", "Transfer-Encoding: chunked") + CHUNKED, 400),
    "chunked twice": (head("Transfer-Encoding: chunked, chunked") + CHUNKED, 400),
    "chunked before gzip": (head("Transfer-Encoding: chunked, gzip") + CHUNKED, 400),
    "identity": (head("Transfer-Encoding: identity", LENGTH) + BODY, 400),
    "xchunked": (head("Transfer-Encoding: xchunked") + CHUNKED, 501),
    "a chunk of no size": (head("Transfer-Encoding: chunked") + b"\r\n" + CHUNKED, 400),
    "a chunk of giant size": (head("Transfer-Encoding: chunked") + b"f" * 17 + b"\r\n", 400),
    "a chunk of negative size": (head("Transfer-Encoding: chunked") + b"-1\r\n", 400),
    "a chunk that is longer": (head("Transfer-Encoding: chunked") + b"1\r\nxyz\r\n0\r\n\r\n", 400),
    "a folded header": (head("X: y", " z: a", LENGTH) + BODY, 400),
    "a header without a colon": (head("nothing", LENGTH) + BODY, 400),
    "a header of zeros": (head("X: \0", LENGTH) + BODY, 400),
    "a bare carriage return": (head("X: a\rContent-Length: 0", LENGTH) + BODY, 400),
    "two Inference-Header-Content-Length": (head(*["Inference-Header-Content-Length: 2"] * 2, LENGTH) + BODY, 400),
    "two expectations": (head(*["Expect: 100-continue"] * 2, LENGTH) + BODY, 400),
    "another expectation": (head("Expect: 200-ok", LENGTH) + BODY, 417),
    "HTTP/0.9": (b"GET /v2\r\n\r\n", 505),
    "HTTP/0.9 by name": (head(start="GET /v2 HTTP/0.9"), 505),
    "HTTP/2.0": (head(start="GET /v2 HTTP/2.0"), 505),
    "HTTP/2.0 that would stay": (head("Connection: keep-alive", start="GET /v2 HTTP/2.0"), 505),
    "HTTP/1.2": (head(start="GET /v2 HTTP/1.2"), 400),
    "HTTP/2 by prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "a method of another protocol": (head(start="SMTP /v2 HTTP/1.1"), 400),
    "no host": (head(host="", start="GET /v2 HTTP/1.1"), 400),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_request_that_can_be_read_in_two_ways_is_refused(wire: Wire, data: bytes, status: int, size: int) -> None:
    wire.say(data + request("GET", "/v2/health/live"), size=size)
    assert [answer.status for answer in wire.answers] == [status]
    assert wire.answers[0].headers["connection"] == "close" and (wire.eof or wire.closed)


@pytest.mark.parametrize("byte", [*range(0x80, 0x100), 0x7F, 0x01, 0x1B])
def test_byte_above_ascii_in_a_head_ends_no_server(wire: Wire, byte: int) -> None:
    for data in (
        head(f"X: {chr(byte)}", LENGTH) + BODY,
        head(LENGTH, start=f"POST /v2/models/{chr(byte)}/infer HTTP/1.1") + BODY,
        head(f"Accept-Encoding: {chr(byte)}", LENGTH) + BODY,
        head(f"Content-Encoding: {chr(byte)}", LENGTH) + BODY,
        head(LENGTH, host=f"Host: {chr(byte)}") + BODY,
    ):
        other = Wire(HttpServer(wire.protocol._handler.core))
        other.say(data)
        assert len(other.answers) == 1 and other.answers[0].status in (200, 400, 404, 415)


UPGRADE = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_upgrade_is_ignored_and_its_body_read(wire: Wire, size: int) -> None:
    live = request("GET", "/v2/health/live")
    data = b"".join(
        (
            head(*UPGRADE, LENGTH) + BODY,
            head(*UPGRADE, "Transfer-Encoding: chunked") + CHUNKED,
            head(*UPGRADE, start="GET /v2 HTTP/1.1"),
            head(*UPGRADE, "Expect: 100-continue", LENGTH) + BODY,
            live,
        )
    )
    wire.say(data * 2, size=size)
    assert [answer.status for answer in wire.answers] == [200] * 10
    assert wire.got.count(b"100 Continue") <= 2
    assert not wire.closed


def test_upgrade_with_a_large_body_is_read_where_it_stays(wire: Wire) -> None:
    values = {"name": "x", "shape": [1, 40_000], "datatype": "FP32", "data": [1] * 40_000}
    body = json.dumps({"inputs": [values]}).encode()
    wire.say(head(*UPGRADE, f"Content-Length: {len(body)}") + body + request("GET", "/v2"))
    assert [answer.status for answer in wire.answers] == [200, 200]


def test_upgrade_of_a_real_connection_is_ignored(server: Served) -> None:
    body = json.dumps({"inputs": [ORDINARY["identity"]]}).encode()
    with server.connect() as sock:
        for _ in range(2):
            sock.sendall(post("/v2/models/identity/infer", body, *UPGRADE))
            assert read_response(sock)[0] == 200


def test_connect_is_refused_and_closes(wire: Wire) -> None:
    wire.say(head(start="CONNECT example.org:443 HTTP/1.1") + b"anything")
    assert [answer.status for answer in wire.answers] == [404] and wire.closed


def test_lists_on_several_lines_are_one(wire: Wire) -> None:
    wire.say(head("Connection: keep-alive", "Connection: close", "Accept: a", "Accept: b", LENGTH) + BODY)
    assert wire.answers[0].status == 200 and wire.closed


def test_body_in_very_many_chunks_is_one_body() -> None:
    """Neither its chunks nor its trailer lines are kept, on a stack or elsewhere."""
    count = 200_000
    body = b"1\r\n \r\n" * count + b"0\r\n\r\n"
    data = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    requests, ended = ours(StubCore(), data, 1 << 16)
    assert [len(each) for _, _, each in requests] == [count] and not ended


@pytest.mark.parametrize(("size", "few"), [(1, True), (100, True), (1000, False)])
def test_body_in_small_chunks_is_read_in_small_parts(wire: Wire, size: int, few: bool) -> None:
    """uvloop reads on while a buffer is filled: 32 buffers of chunks of one byte stopped all others for 0.2 s."""
    wire.say(head("Transfer-Encoding: chunked"))
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    for count in (1 << 16, 1 << 10):  # and so it stays
        wire.say(chunk * (count // len(chunk)))
        assert (len(wire.protocol.get_buffer(-1)) <= 1 << 10) is few
    wire.say(CHUNKED)
    assert wire.answers[0].status == 200
