"""Memory has a bound and comes back: bodies, trailers, compressed bodies, URLs, and what workers share."""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cotenant.live.http import HttpServer, Limits
from cotenant.live.http.encoding import inflate, inflated_limit
from cotenant.live.limits import MAX_RATIO, MIN_INFLATED
from cotenant.worker.arena import KEPT, Arena
from tests.live.stub import StubCore
from tests.live.test_http import INFER, Wire, infer, request
from tests.security.server import ORDINARY, PATIENCE, Served, post, read_response

MIB = 1 << 20


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does; no longer than callers wait."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"


@pytest.fixture
def core() -> Iterator[StubCore]:
    core = StubCore()
    yield core
    core.arena.close()


def small(core: StubCore) -> HttpServer:
    return HttpServer(core, limits=Limits(body=MIB, memory=3 * MIB, head=1000, json=MIB // 2))


def used(server: HttpServer) -> int:
    return server._handler.memory.used


def test_bodies_together_have_a_bound_and_are_forgotten_with_their_callers(core: StubCore) -> None:
    server = small(core)
    wires = [Wire(server) for _ in range(4)]
    for wire in wires:
        wire.say(request("POST", INFER, Content_Length=str(MIB)) + bytes(MIB - 1))
    assert [wire.answers[0].status if wire.got else 0 for wire in wires] == [0, 0, 0, 503]
    assert used(server) <= 3 * MIB
    asked = infer(ORDINARY["identity"] | {"shape": [1, 3], "data": [1, 2, 3]})
    ordinary = Wire(server)
    ordinary.say(asked)
    assert ordinary.answers[0].status == 200
    for wire in wires:
        wire.protocol.connection_lost(None)
    assert used(server) == 0


def test_chunked_bodies_have_the_same_bound(core: StubCore) -> None:
    server = small(core)
    wires = [Wire(server) for _ in range(4)]
    chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
    for wire in wires:
        wire.say(request("POST", INFER, Transfer_Encoding="chunked") + chunk * 15)
    assert [wire.answers[0].status if wire.got else 0 for wire in wires] == [0, 0, 0, 503]
    for wire in wires:
        wire.protocol.connection_lost(None)
    assert used(server) == 0


def test_responses_that_nobody_takes_count_until_they_are_gone(core: StubCore) -> None:
    server = small(core)
    width = 40_000
    asked = infer(ORDINARY["identity"] | {"shape": [1, width], "data": [1] * width}, path="/v2/models/held/infer")
    wire = Wire(server)
    wire.say(asked)
    assert 0 < used(server) < 200_000
    wire.protocol.pause_writing()
    core.release()
    assert used(server) > len(wire.got) // 2
    wire.protocol.resume_writing()
    assert used(server) == 0


@pytest.mark.parametrize("leave", ["answered", "lost", "refused"])
def test_every_end_of_a_large_request_frees_its_memory(core: StubCore, leave: str) -> None:
    server = small(core)
    wire = Wire(server)
    asked = infer(ORDINARY["identity"] | {"shape": [1, 40_000], "data": [1] * 40_000}, path="/v2/models/held/infer")
    wire.say(asked.replace(b"held", b"none") if leave == "refused" else asked)
    if leave == "lost":
        wire.protocol.connection_lost(None)
    core.release()
    assert used(server) == 0


def test_large_json_is_refused_and_large_binary_is_not(core: StubCore) -> None:
    server = small(core)
    size = MIB - 4096
    given = {"name": "x", "shape": [1, size // 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    for lines, status in (({}, 413), ({"Inference_Header_Content_Length": str(len(head))}, 200)):
        wire = Wire(server)
        wire.say(request("POST", INFER, head + bytes(size), **lines))
        assert wire.answers[0].status == status


@pytest.mark.parametrize("part", [b"X: " + b"y" * 60 + b"\r\n", b"y" * 64])
def test_trailer_above_the_limit_of_a_head_is_cut_off(core: StubCore, part: bytes) -> None:
    wire = Wire(small(core))
    wire.say(request("POST", INFER, Transfer_Encoding="chunked") + b"1\r\nx\r\n0\r\n")
    sent = 0
    while not wire.got and sent < 10_000:
        wire.say(part)
        sent += len(part)
    assert wire.answers[0].status == 431 and sent < 1200


def test_chunk_extension_above_the_limit_of_a_head_is_cut_off(core: StubCore) -> None:
    wire = Wire(small(core))
    wire.say(request("POST", INFER, Transfer_Encoding="chunked") + b"1;")
    sent = 0
    while not wire.got and sent < 10_000:
        wire.say(b"e" * 64)
        sent += 64
    assert wire.answers[0].status == 431 and sent < 1200


def test_trailer_within_the_limit_is_ignored(core: StubCore) -> None:
    body = infer(ORDINARY["identity"] | {"shape": [1, 3], "data": [1, 2, 3]}).partition(b"\r\n\r\n")[2]
    wire = Wire(small(core))
    data = request("POST", INFER, Transfer_Encoding="chunked") + b"%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(body), body)
    wire.say(data * 3, size=7)
    assert [answer.status for answer in wire.answers] == [200] * 3


def test_unpacked_body_has_a_bound_on_its_ratio() -> None:
    for size in (10 * MIN_INFLATED, 100 * MIN_INFLATED):
        packed = zlib.compress(bytes(size), 9)
        most = inflated_limit(len(packed), 1 << 30)
        assert most == max(MIN_INFLATED, MAX_RATIO * len(packed)) < size
        assert inflate(packed, most) is None
    ordinary = zlib.compress(os.urandom(MIB))
    assert inflate(ordinary, inflated_limit(len(ordinary), 1 << 30)) is not None


def test_compressed_body_for_an_unknown_path_is_never_unpacked(core: StubCore) -> None:
    for path, status in (("/nothing", 404), ("/v2/health/live", 405)):
        wire = Wire(small(core))
        # No event loop runs here: whoever wanted to unpack it would fail.
        wire.say(request("POST", path, gzip.compress(bytes(100)), Content_Encoding="gzip"))
        assert wire.answers[0].status == status


def test_remembered_routes_have_a_bound_in_bytes(core: StubCore) -> None:
    server = small(core)
    for number in range(3000):
        for path in (f"/nothing/{number}", f"/v2?{number:0800}", f"/v2?{number}"):
            server._handler.route(path.encode())
    routes = server._handler._routes
    assert len(routes) <= 1024 and max(map(len, routes)) <= 512


# Memory that workers share


def test_free_pages_of_the_arena_go_back_to_the_system() -> None:
    arena = Arena(KEPT + 64 * MIB)
    blocks = os.fstat(arena.fd).st_blocks
    low, high = arena.allocate(KEPT - 8 * MIB), arena.allocate(32 * MIB)
    assert low is not None and high is not None
    high.view[:] = bytes(32 * MIB)
    held = os.fstat(arena.fd).st_blocks - blocks
    assert held * 512 >= 32 * MIB
    del high
    arena.reclaim()
    assert (os.fstat(arena.fd).st_blocks - blocks) * 512 <= 8 * MIB
    again = arena.allocate(32 * MIB)
    assert again is not None and bytes(again.view[8 * MIB :]) == bytes(24 * MIB)
    arena.close()


def test_memory_of_a_refused_large_request_comes_back(server: Served) -> None:
    assert server.serves()
    before = server.resident()
    size = 60 * MIB
    line = f"Inference-Header-Content-Length: {10 * MIB}"
    for _ in range(3):  # at once, above what stays
        socks: list[socket.socket] = []
        for _ in range(4):
            sock = server.connect()
            sock.sendall(post(INFER, b"", line).replace(b"Length: 0", b"Length: %d" % size))
            sock.sendall(bytes(size - 1))
            socks.append(sock)
        for sock in socks:
            sock.sendall(b"x")
            assert read_response(sock)[0] in (400, 413, 500)
            sock.close()
    until(lambda: server.resident() - before < KEPT + 32 * MIB)
    assert server.serves()


def test_body_above_its_limit_is_refused_before_it_is_sent(server: Served) -> None:
    with server.connect() as sock:
        sock.sendall(post(INFER, b"").replace(b"Length: 0", b"Length: %d" % (65 * MIB)))
        assert read_response(sock)[0] == 413


def test_settings_bound_bodies(tmp_path: Path) -> None:
    from cotenant.config.settings import read_settings
    from cotenant.errors import ConfigError

    path = tmp_path / "settings.toml"
    assert (read_settings().max_body, read_settings().max_memory) == (64 * MIB, 1024 * MIB)
    path.write_text('max_body = "2MiB"\nmax_memory = "3MiB"\n')
    assert (read_settings(path).max_body, read_settings(path).max_memory) == (2 * MIB, 3 * MIB)
    for wrong in ('"2GiB"', '"0KiB"', '"many"'):
        path.write_text(f"max_body = {wrong}\n")
        with pytest.raises(ConfigError, match="max_body"):
            read_settings(path)
