"""Links over real connections on loopback: what both ends send is received, however much that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvloop

from cotenant.live.nodes import link as link_module
from cotenant.live.nodes import messages
from cotenant.live.nodes.link import WRITE_LIMIT, Body, Link, Receiver
from cotenant.worker.arena import Block
from tests.live.nodes.test_sessions import frame
from tests.live.workers import PATIENCE

SIZE = WRITE_LIMIT + (1 << 25)  # so that what waits to be sent is above the limit, whatever the system buffers


class Counter(Receiver):
    """Counts the bytes of bodies. over: why the connection is."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.changed = asyncio.Event()
        self.over = ""

    def received(self, link: Link, message: messages.Message, body: Body, block: Block | None) -> None:
        self.sizes.append(0 if body is None else len(body))
        self.changed.set()

    def link_lost(self, link: Link, reason: str) -> None:
        self.over = reason
        self.changed.set()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[tuple[Counter, Link], tuple[Counter, Link]]]:
    """Yields a front end's and a node's end of a session."""
    loop = asyncio.get_running_loop()
    front_end, node = Counter(), Counter()
    here, there = Link(front_end, at_node=False), Link(node, at_node=True)
    server = await loop.create_server(lambda: there, "127.0.0.1", 0)
    await loop.create_connection(lambda: here, *server.sockets[0].getsockname()[:2])
    async with asyncio.timeout(PATIENCE):
        while there.peer == "?":
            await asyncio.sleep(0.01)
    here.begun = there.begun = True
    try:
        yield (front_end, here), (node, there)
    finally:
        here.abort("the test is over")
        server.close()
        await server.wait_closed()


def test_ends_that_both_send_more_than_the_limit_at_once_go_on() -> None:
    async def scenario() -> None:
        async with linked() as ((front_end, here), (node, there)):
            here.send(messages.SendFile(b"", 0, 0), [bytes(SIZE)])
            there.send(messages.ModelState(b"", wanted=False), [bytes(SIZE)])
            async with asyncio.timeout(PATIENCE):
                for end in (front_end, node):
                    while not end.sizes and not end.over:
                        end.changed.clear()
                        await end.changed.wait()
            assert [(end.over, end.sizes) for end in (front_end, node)] == [("", [SIZE]), ("", [SIZE])]

    asyncio.run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_round_trip_is_known_to_microseconds(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        async with linked() as ((_, here), (_, there)), asyncio.timeout(PATIENCE):
            while not (here.round_trip > 0 and there.round_trip > 0):
                await asyncio.sleep(0.01)
            for link in (here, there):
                assert link.round_trip * 1e3 != round(link.round_trip * 1e3)

    run(scenario())


def test_round_trip_is_not_that_of_pings_that_this_process_was_late_to_hear_of() -> None:
    async def scenario() -> None:
        link = Link(Counter(), at_node=False)
        for seconds in (2e-4, 6e-3, 4e-3):  # the handshake's, and two while the server starts
            link.answered_after(seconds)
        assert link.round_trip == 2e-4
        for seconds in [2e-2, 3e-2, 3e-2, 4e-2] * 8:  # the network is another now
            link.answered_after(seconds)
        assert link.round_trip == 3e-2

    asyncio.run(scenario())


def test_front_end_keeps_nothing_for_a_node_that_pings_and_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "WRITE_LIMIT", 1 << 12)

    async def scenario() -> None:
        link = Link(Counter(), at_node=False)
        transport = Unread()
        link.connection_made(transport)
        link.begun = True
        ping = frame(msgspec.msgpack.encode(messages.Ping(1)))
        for _ in range(1 << 12):
            link.get_buffer(-1)[: len(ping)] = ping
            link.buffer_updated(len(ping))
        assert 1 << 12 < transport.get_write_buffer_size() < 1 << 13
        assert not link.is_over
        link.abort("the test is over")

    asyncio.run(scenario())


class Unread(asyncio.Transport):
    """Keeps what is written, as nobody reads it."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._size += len(data)

    def get_write_buffer_size(self) -> int:
        return self._size

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass
