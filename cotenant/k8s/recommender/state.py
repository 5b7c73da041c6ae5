"""Keep a few texts where they outlive a process: in a ConfigMap of the cluster, or in Redis.

All texts are read and written at once, with the version that they were read at: who writes over what he has not read
gets a StateConflictError, and reads again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cotenant.core.units import show_memory
from cotenant.errors import ConfigError, KubernetesError, StateConflictError, StateError
from cotenant.k8s.client import CONFLICT, NOT_FOUND, ApiClient
from cotenant.k8s.resource import CONFIG_MAPS

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_BYTES = 1 << 20  # of a ConfigMap
_VERSION = "version"  # field of the hash in Redis; texts have names with a dot
REDIS_SECONDS = 10.0  # for an answer


class State(msgspec.Struct, frozen=True):
    """Texts by name, and their version: opaque, "" where nothing was written yet."""

    texts: dict[str, str]
    version: str


class StateStore(Protocol):
    """Keep one state. Both raise StateError where it cannot be reached."""

    async def read(self) -> State: ...

    async def write(self, texts: Mapping[str, str], version: str) -> str:
        """Replace all texts; return their version. Raises StateConflictError where `version` is not that of what is
        there."""
        ...


class ConfigMapStore:
    """Keep a state in a ConfigMap. name: its own, in the client's namespace."""

    def __init__(self, client: ApiClient, name: str) -> None:
        self._client = client
        self._name = name

    async def read(self) -> State:
        try:
            found = await self._client.get(CONFIG_MAPS, self._name)
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return State({}, "")
            raise StateError(str(error)) from None
        return State(dict(found.get("data") or {}), found["metadata"]["resourceVersion"])

    async def write(self, texts: Mapping[str, str], version: str) -> str:
        size = sum(len(text.encode()) for text in texts.values())
        if size > MAX_BYTES:
            raise StateError(
                f"{show_memory(size)} are too much for ConfigMap {self._name!r}, which takes {show_memory(MAX_BYTES)};"
                " keep the state in Redis"
            )
        metadata = {"name": self._name, "namespace": self._client.namespace}
        body = {"metadata": metadata, "data": dict(texts)}
        try:
            if version:
                body["metadata"] = {**metadata, "resourceVersion": version}
                written = await self._client.replace(CONFIG_MAPS, body)
            else:
                written = await self._client.create(CONFIG_MAPS, body)
        except KubernetesError as error:
            if error.status in (CONFLICT, NOT_FOUND):
                raise StateConflictError(f"ConfigMap {self._name!r} has changed since it was read") from None
            raise StateError(str(error)) from None
        return str(written["metadata"]["resourceVersion"])


class RedisStore:
    """Keep a state in a hash of Redis. name: its key."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis: Any = redis  # whose annotations leave open what is awaited
        self._name = name

    async def read(self) -> State:
        from redis.exceptions import RedisError

        try:
            found = await self._redis.hgetall(self._name)
        except (RedisError, OSError) as error:
            raise StateError(f"Redis does not answer: {error}") from None
        texts = {name.decode(): text.decode() for name, text in found.items()}
        return State(texts, texts.pop(_VERSION, ""))

    async def write(self, texts: Mapping[str, str], version: str) -> str:
        from redis.exceptions import RedisError, WatchError

        fresh = str(int(version or "0") + 1)
        try:
            async with self._redis.pipeline() as pipe:
                await pipe.watch(self._name)
                there = await pipe.hget(self._name, _VERSION)
                if ("" if there is None else there.decode()) != version:
                    raise StateConflictError(f"key {self._name!r} of Redis has changed since it was read")
                pipe.multi()
                pipe.delete(self._name)
                pipe.hset(self._name, mapping={**texts, _VERSION: fresh})
                await pipe.execute()
        except WatchError:
            raise StateConflictError(f"key {self._name!r} of Redis has changed since it was read") from None
        except (RedisError, OSError) as error:
            raise StateError(f"Redis does not answer: {error}") from None
        return fresh


@asynccontextmanager
async def redis_store(url: str, name: str) -> AsyncIterator[RedisStore]:
    """Keep a state, within the block, in the Redis of a URL: ``redis://host:port/0``. Raises ConfigError."""
    try:
        from redis.asyncio import Redis
    except ModuleNotFoundError:
        raise ConfigError(
            "state in Redis needs the package redis, which is not installed; run `pip install 'cotenant[redis]'`"
        ) from None
    try:
        redis = Redis.from_url(url, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS)
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}; write redis://HOST:PORT/0") from None
    try:
        yield RedisStore(redis, name)
    finally:
        await redis.aclose()
