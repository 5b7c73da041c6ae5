"""Connections are accepted as they come, and again after the descriptors for them had run out."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from typing import Any

import pytest
import trustme

from cotenant.live.grpc.listener import GrpcListener
from cotenant.live.http import HttpServer, listener
from cotenant.live.http.listener import Listener
from cotenant.live.limits import Limits
from tests.live.stub import StubCore
from tests.live.test_http import request

PATIENCE = 60.0  # seconds until a test that waits for something fails


class Counting(asyncio.BufferedProtocol):
    """Count connections into a list, and close those that their caller closes."""

    def __init__(self, made: list[Any]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray(16)


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0)


def test_connections_are_accepted_several_in_a_round() -> None:
    async def main() -> None:
        made: list[Any] = []
        accepting = Listener(lambda: Counting(made), None)
        port = await accepting.open("127.0.0.1", 0)
        callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        rounds = 0
        while len(made) < len(callers):
            await asyncio.sleep(0)
            rounds += 1
        assert rounds < len(callers)
        accepting.close()
        for caller in callers:
            caller.close()
        for transport in made:
            transport.abort()

    asyncio.run(main())


def test_listener_without_descriptors_pauses_and_resumes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [errno.EMFILE, errno.ECONNABORTED]

    class Scarce(socket.socket):
        def accept(self) -> Any:
            if failures:
                raise OSError(failures.pop(0), "none left")
            return super().accept()

    monkeypatch.setattr(listener, "_PAUSE", 0.001)
    monkeypatch.setattr(socket, "socket", Scarce)

    async def main() -> None:
        made: list[Any] = []
        accepting = Listener(lambda: Counting(made), None)
        port = await accepting.open("127.0.0.1", 0)
        caller = socket.create_connection(("127.0.0.1", port))
        await until(lambda: made)
        assert not failures
        accepting.close()
        caller.close()
        made[0].abort()

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["no connection is accepted for 0.001 s: none left"]


def test_server_listens_on_every_address_of_its_host_and_stops() -> None:
    async def main() -> None:
        server = HttpServer(StubCore())
        port = await server.listen("localhost", 0)
        reader, writer = await asyncio.open_connection("localhost", port)
        writer.write(request("GET", "/v2/health/live", Connection="close"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        await server.stop(1.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    asyncio.run(main())


@pytest.mark.parametrize("rpc", [False, True])
def test_caller_that_sets_up_no_tls_is_cut_off_when_a_head_would_be_due(core: StubCore, rpc: bool) -> None:
    tls, limits = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), Limits(head_timeout=1)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)

    async def main() -> None:
        server = GrpcListener({}, limits=limits, tls=tls) if rpc else HttpServer(core, limits=limits, tls=tls)
        port = await server.listen("127.0.0.1", 0)
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
        writer.close()
        await server.stop(1.0)

    asyncio.run(main())
