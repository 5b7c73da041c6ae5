"""The copy of a collection stays true, whatever becomes of watches and of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cotenant.k8s.client import ApiClient
from cotenant.k8s.informer import Informer
from cotenant.k8s.resource import CONFIG_MAPS, KubeObject
from tests.k8s.api_double import ApiDouble
from tests.k8s.eventually import eventually
from tests.k8s.play import play


def config_map(name: str, labels: dict[str, str] | None = None, **data: str) -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": "default", "labels": labels or {}}, "data": data}


@asynccontextmanager
async def following(
    client: ApiClient, labels: str = "", seconds: int = 240
) -> AsyncIterator[tuple[Informer, list[int]]]:
    changes: list[int] = []
    informer = Informer(client, CONFIG_MAPS, lambda: changes.append(1), labels=labels, seconds=seconds)
    task = asyncio.create_task(informer.run())
    await informer.synced()
    try:
        yield informer, changes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def names(informer: Informer) -> list[str]:
    return sorted(key.name for key in informer.objects)


def values(informer: Informer) -> dict[str, object]:
    return {key.name: each.get("data", {}).get("value") for key, each in informer.objects.items()}


def test_objects_come_change_and_go() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("configmaps", config_map("a", value="1"))
        async with following(client) as (informer, changes):
            assert values(informer) == {"a": "1"}
            api.put("configmaps", config_map("a", value="2"))
            api.put("configmaps", config_map("b", value="3"))
            await eventually(lambda: values(informer) == {"a": "2", "b": "3"})
            api.remove("configmaps", "a", "default")
            await eventually(lambda: names(informer) == ["b"])
            assert len(changes) == 4

    play(scenario)


def test_object_that_no_longer_matches_is_gone() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        async with following(client, labels="role=agent") as (informer, _):
            api.put("configmaps", config_map("a", {"role": "agent"}))
            api.put("configmaps", config_map("other", {"role": "else"}))
            await eventually(lambda: names(informer) == ["a"])
            api.put("configmaps", config_map("a", {"role": "else"}))
            await eventually(lambda: names(informer) == [])

    play(scenario)


def test_watch_that_breaks_or_ends_goes_on_where_it_was() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        async with following(client, seconds=1) as (informer, _):
            for i in range(6):
                api.put("configmaps", config_map("a", value=str(i)))
                if i % 2:
                    api.break_watches()
                await eventually(lambda i=i: values(informer) == {"a": str(i)})
                await asyncio.sleep(0.3)
            asked = [each for each in api.requests if each.startswith("GET /api/v1/namespaces/default/configmaps")]
            assert len(asked) >= 4
            assert informer.error == ""

    play(scenario)


def test_version_that_is_gone_is_listed_anew() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("configmaps", config_map("a"))
        async with following(client) as (informer, _):
            with api.silent():
                api.remove("configmaps", "a", "default")
                api.put("configmaps", config_map("b"))
                api.compact()
            await eventually(lambda: names(informer) == ["b"])

    play(scenario)


def test_what_was_missed_while_the_server_was_away_is_noticed() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("configmaps", config_map("a"))
        async with following(client) as (informer, changes):
            with api.away():
                await eventually(lambda: informer.error)
                assert names(informer) == ["a"]
                api.remove("configmaps", "a", "default")
                api.put("configmaps", config_map("b"))
            await eventually(lambda: names(informer) == ["b"] and not informer.error)
            assert changes

    play(scenario)


def test_server_that_answers_500_is_asked_seldom() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> int:
        informer = Informer(client, CONFIG_MAPS)
        with api.failing(500):
            task = asyncio.create_task(informer.run())
            await eventually(lambda: informer.error)
            await asyncio.sleep(1.5)
            asked = len(api.requests)
            assert not informer.is_synced
        await eventually(lambda: informer.is_synced and not informer.error)
        task.cancel()
        return asked

    assert play(scenario) <= 4


def test_server_that_ends_watches_at_once_is_asked_seldom() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> int:
        async with following(client, seconds=0) as (informer, _):
            await asyncio.sleep(1.5)
            asked = len(api.requests)
            api.put("configmaps", config_map("a"))
            await eventually(lambda: names(informer) == ["a"])
        return asked

    assert play(scenario) <= 6


def test_quiet_collection_is_watched_on_from_a_bookmark() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.bookmark_seconds = 0.1
        async with following(client, seconds=1) as (informer, changes):
            first = informer._version
            for i in range(3):  # of another kind: only bookmarks tell of these versions
                api.put("pods", {"metadata": {"name": f"p{i}", "namespace": "default"}, "spec": {}})
            await eventually(lambda: informer._version not in (first, None))
            assert len(changes) == 1  # the list

    play(scenario)


def test_only_what_is_kept_is_remembered_and_other_objects_wake_nobody() -> None:
    def keep(each: KubeObject) -> KubeObject | None:
        value = (each.get("data") or {}).get("value")
        return None if value is None else {"metadata": each["metadata"], "value": value}

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("configmaps", config_map("a", value="1", large="x" * 1000))
        api.put("configmaps", config_map("other", large="x"))
        changes: list[int] = []
        informer = Informer(client, CONFIG_MAPS, lambda: changes.append(1), keep=keep)
        task = asyncio.create_task(informer.run())
        await informer.synced()
        assert names(informer) == ["a"] and len(changes) == 1
        api.put("configmaps", config_map("other", large="y"))
        api.put("configmaps", config_map("b", value="2"))
        await eventually(lambda: names(informer) == ["a", "b"])
        api.put("configmaps", config_map("b", large="x"))  # which no longer is one to be kept
        await eventually(lambda: names(informer) == ["a"])
        assert len(changes) == 3
        assert all(each.keys() == {"metadata", "value"} for each in informer.objects.values())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scenario)
