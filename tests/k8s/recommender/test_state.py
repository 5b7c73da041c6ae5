"""State in a ConfigMap and in Redis: one contract. Redis is a real one, Debian's `redis-server`."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from cotenant.errors import ConfigError, StateConflictError, StateError
from cotenant.k8s.recommender.state import ConfigMapStore, StateStore, redis_store
from tests.k8s.api_double import api_double, client_of

Stores = Callable[[], Awaitable[StateStore]]  # another client of the same state


@contextmanager
def redis_server() -> Iterator[str]:
    """A Redis on a socket of its own; its URL."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs Debian's redis-server")
    with TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            while not socket.exists():
                assert process.poll() is None
                subprocess.run([sys.executable, "-c", "import time; time.sleep(0.01)"], check=True)
            yield f"unix://{socket}"
        finally:
            process.terminate()
            process.wait(10)


@asynccontextmanager
async def config_maps() -> AsyncIterator[Stores]:
    async with api_double() as api, client_of(api.url) as client:

        async def another() -> StateStore:
            return ConfigMapStore(client, "state")

        yield another


@asynccontextmanager
async def redises() -> AsyncIterator[Stores]:
    from contextlib import AsyncExitStack

    with redis_server() as url:
        async with AsyncExitStack() as stack:

            async def another() -> StateStore:
                return await stack.enter_async_context(redis_store(url, "state"))

            yield another


@pytest.fixture(params=[config_maps, redises], ids=["configmap", "redis"])
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Stores], Awaitable[None]]], None]:
    """Run a scenario with what makes clients of one state."""

    def run(scenario: Callable[[Stores], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), request.param() as stores:
                await scenario(stores)

        asyncio.run(main())

    return run


Play = Callable[[Callable[[Stores], Awaitable[None]]], None]


def test_state_that_was_never_written_is_empty(play: Play) -> None:
    async def scenario(stores: Stores) -> None:
        found = await (await stores()).read()
        assert (found.texts, found.version) == ({}, "")

    play(scenario)


def test_state_is_read_as_it_was_written_by_others(play: Play) -> None:
    async def scenario(stores: Stores) -> None:
        one, other = await stores(), await stores()
        version = await one.write({"a.csv": "1,2\n", "b.csv": "ä€\n"}, "")
        found = await other.read()
        assert (found.texts, found.version) == ({"a.csv": "1,2\n", "b.csv": "ä€\n"}, version)

    play(scenario)


def test_write_replaces_all(play: Play) -> None:
    async def scenario(stores: Stores) -> None:
        store = await stores()
        version = await store.write({"a.csv": "1", "b.csv": "2"}, "")
        version = await store.write({"b.csv": "3"}, version)
        found = await store.read()
        assert (found.texts, found.version) == ({"b.csv": "3"}, version)

    play(scenario)


def test_write_over_what_was_not_read_is_a_conflict(play: Play) -> None:
    async def scenario(stores: Stores) -> None:
        one, other = await stores(), await stores()
        first = await one.write({"a.csv": "1"}, "")
        with pytest.raises(StateConflictError, match=r"state' .*has changed since it was read$"):
            await other.write({"a.csv": "2"}, "")
        second = await other.write({"a.csv": "2"}, first)
        with pytest.raises(StateConflictError):
            await one.write({"a.csv": "3"}, first)
        assert (await one.read()).texts == {"a.csv": "2"} and second != first

    play(scenario)


def test_of_many_writers_at_once_one_wins_each_time(play: Play) -> None:
    async def scenario(stores: Stores) -> None:
        every = [await stores() for _ in range(5)]
        version = await every[0].write({"n.csv": "0"}, "")

        async def add(store: StateStore) -> None:
            while True:
                found = await store.read()
                try:
                    await store.write({"n.csv": str(int(found.texts["n.csv"]) + 1)}, found.version)
                except StateConflictError:
                    continue
                return

        await asyncio.gather(*map(add, every))
        found = await every[0].read()
        assert found.texts == {"n.csv": "5"} and found.version != version

    play(scenario)


def test_config_map_that_is_too_large_is_refused() -> None:
    async def main() -> None:
        async with config_maps() as stores:
            with pytest.raises(StateError, match=r"^2 MiB are too much for ConfigMap 'state', which takes 1 MiB; keep"):
                await (await stores()).write({"a.csv": "x" * (2 << 20)}, "")

    asyncio.run(main())


def test_store_that_cannot_be_reached_says_so() -> None:
    async def main() -> None:
        async with api_double() as api, client_of(api.url) as client:
            store = ConfigMapStore(client, "state")
            with api.failing(500):
                for work in (store.read(), store.write({}, ""), store.write({}, "7")):
                    with pytest.raises(StateError, match=r"refused \(500\)"):
                        await work
        async with redis_store("unix:///no/such/socket", "state") as redis:
            works: list[Any] = [redis.read(), redis.write({}, "")]
            for work in works:
                with pytest.raises(StateError, match=r"^Redis does not answer: "):
                    await work
        with pytest.raises(ConfigError, match=r"^'http://x': .*; write redis://HOST:PORT/0$"):
            async with redis_store("http://x", "state"):
                pass

    asyncio.run(main())
