from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.live.http2 import Wire
from tests.live.stub import Running, StubCore, running


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    """Both front ends, before a core that answers in process."""
    with running() as served:
        yield served


@pytest.fixture
def core() -> Iterator[StubCore]:
    core = StubCore()
    yield core
    core.arena.close()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def wire(core: StubCore, loop: asyncio.AbstractEventLoop) -> Iterator[Wire]:
    wire = Wire(loop, core)
    yield wire
    wire.protocol.connection_lost(None)
    wire.turn()
    assert wire.server._shared.memory.used == 0  # whatever happened
