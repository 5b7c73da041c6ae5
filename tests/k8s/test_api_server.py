"""The double and a real API server are held to the same, and our resources to both."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from cotenant.errors import KubernetesError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.resource import CONFIG_MAPS, DEVICE_POOLS, PODS, SERVED_MODELS, ObjectKey, key_of
from tests.k8s.servers import WithClient


async def refusal(call: Awaitable[Any]) -> KubernetesError:
    try:
        await call
    except KubernetesError as error:
        return error
    raise AssertionError("it was not refused")


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": data}


def test_objects_are_created_read_replaced_and_deleted(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        made = await client.create(CONFIG_MAPS, config_map("a", value="1"))
        assert (await refusal(client.create(CONFIG_MAPS, config_map("a")))).status == 409
        assert (await client.get(CONFIG_MAPS, "a"))["metadata"]["uid"] == made["metadata"]["uid"]
        changed = await client.replace(CONFIG_MAPS, {**made, "data": {"value": "2"}})
        assert changed["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]
        await client.delete(CONFIG_MAPS, key_of(made))
        assert (await refusal(client.get(CONFIG_MAPS, "a"))).status == 404
        assert (await refusal(client.replace(CONFIG_MAPS, changed))).status == 409  # its uid is nobody's
        await client.delete(CONFIG_MAPS, key_of(made))

    with_client(scenario)


def test_delete_of_one_whose_name_is_anothers_now_is_a_conflict(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        first = await client.create(CONFIG_MAPS, config_map("a"))
        await client.delete(CONFIG_MAPS, key_of(first))
        second = await client.create(CONFIG_MAPS, config_map("a"))
        assert (await refusal(client.delete(CONFIG_MAPS, key_of(first), first["metadata"]["uid"]))).status == 409
        assert (await client.get(CONFIG_MAPS, "a"))["metadata"]["uid"] == second["metadata"]["uid"]
        await client.delete(CONFIG_MAPS, key_of(second), second["metadata"]["uid"])
        assert (await refusal(client.get(CONFIG_MAPS, "a"))).status == 404

    with_client(scenario)


def test_write_over_a_version_that_is_old_is_a_conflict(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        made = await client.create(CONFIG_MAPS, config_map("a", value="1"))
        await client.replace(CONFIG_MAPS, {**made, "data": {"value": "2"}})
        error = await refusal(client.replace(CONFIG_MAPS, {**made, "data": {"value": "3"}}))
        assert error.status == 409
        patch = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "data": {"value": "3"}}
        assert (await refusal(client.patch(CONFIG_MAPS, key_of(made), patch))).status == 409
        patched = await client.patch(CONFIG_MAPS, key_of(made), {"data": {"value": None, "other": "4"}})
        assert patched["data"] == {"other": "4"}

    with_client(scenario)


def test_write_that_changes_nothing_makes_no_version(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        made = await client.create(CONFIG_MAPS, config_map("a", value="1"))
        again = await client.replace(CONFIG_MAPS, made)
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]

    with_client(scenario)


def test_watch_goes_on_from_a_list(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        await client.create(CONFIG_MAPS, config_map("before"))
        listing = await client.list(CONFIG_MAPS)
        made = await client.create(CONFIG_MAPS, {"metadata": {"name": "a", "labels": {"role": "x"}}})
        await client.patch(CONFIG_MAPS, key_of(made), {"data": {"value": "1"}})
        await client.patch(CONFIG_MAPS, key_of(made), {"metadata": {"labels": {"role": None}}})
        await client.delete(CONFIG_MAPS, key_of(made))
        seen = [event async for event in client.watch(CONFIG_MAPS, listing.version, seconds=1)]
        chosen = [event.type async for event in client.watch(CONFIG_MAPS, listing.version, labels="role=x", seconds=1)]
        ours = [(event.type, event.object["metadata"]["name"]) for event in seen if event.type != "BOOKMARK"]
        assert [each for each in ours if each[1] in ("a", "before")] == [
            ("ADDED", "a"),
            ("MODIFIED", "a"),
            ("MODIFIED", "a"),
            ("DELETED", "a"),
        ]
        assert [each for each in chosen if each != "BOOKMARK"] == ["ADDED", "MODIFIED", "DELETED"]

    with_client(scenario)


def test_watch_of_a_version_that_is_nonsense_is_refused(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        error = await refusal(anext(client.watch(CONFIG_MAPS, "nonsense", seconds=1)))
        assert error.status in (400, 500)

    with_client(scenario)


def test_status_is_written_apart_from_the_rest(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        made = await client.create(SERVED_MODELS, {"metadata": {"name": "a"}, "spec": {"slo": "50ms"}, "status": {}})
        assert made["metadata"]["generation"] == 1
        body = {**made, "spec": {"slo": "70ms"}, "status": {"observedGeneration": 1, "model": "a"}}
        told = await client.replace(SERVED_MODELS, body, "status")
        assert told["spec"]["slo"] == "50ms"
        assert told["status"] == {"observedGeneration": 1, "model": "a"}
        assert told["metadata"]["generation"] == 1
        changed = await client.replace(SERVED_MODELS, {**told, "spec": {"slo": "70ms"}, "status": {"model": "b"}})
        assert changed["metadata"]["generation"] == 2
        assert changed["status"]["model"] == "a"
        assert (await refusal(client.replace(SERVED_MODELS, body, "status"))).status == 409

    with_client(scenario)


def test_defaults_are_filled_in_and_unknown_fields_dropped(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        made = await client.create(SERVED_MODELS, {"metadata": {"name": "a"}, "spec": {"slo": "50ms", "sol": "1s"}})
        assert made["spec"] == {"slo": "50ms", "attainment": "99%", "priority": 1}

    with_client(scenario)


@pytest.mark.parametrize(
    "spec",
    [
        {"slo": "50"},
        {"slo": "0ms"},
        {"attainment": "101%"},
        {"attainment": "0%"},
        {"rate": -1},
        {"rate": "many"},
        {"maxBatch": 0},
        {"priority": 0},
        {"model": "a/b"},
    ],
    ids=str,
)
def test_model_that_is_bad_is_refused(with_client: WithClient, spec: dict[str, Any]) -> None:
    async def scenario(client: ApiClient) -> None:
        error = await refusal(client.create(SERVED_MODELS, {"metadata": {"name": "a"}, "spec": spec}))
        assert error.status == 422
        assert f"spec.{next(iter(spec))}" in str(error)

    with_client(scenario)


@pytest.mark.parametrize(
    "spec",
    [{}, {"kind": "cpu", "limit": -1}, {"kind": "cpu", "cuts": [0]}, {"kind": "cpu", "sharing": ["threads"]}],
    ids=str,
)
def test_pool_that_is_bad_is_refused(with_client: WithClient, spec: dict[str, Any]) -> None:
    async def scenario(client: ApiClient) -> None:
        error = await refusal(client.create(DEVICE_POOLS, {"metadata": {"name": "a"}, "spec": spec}))
        assert error.status == 422

    with_client(scenario)


def test_status_that_the_schema_does_not_have_is_refused(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        made = await client.create(SERVED_MODELS, {"metadata": {"name": "a"}, "spec": {}})
        condition = {"type": "Ready", "status": "Perhaps", "reason": "No", "message": "", "lastTransitionTime": "now"}
        body = {**made, "status": {"conditions": [condition]}}
        assert (await refusal(client.replace(SERVED_MODELS, body, "status"))).status == 422

    with_client(scenario)


def test_pod_is_bound_once(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        pod = {
            "metadata": {"name": "a"},
            "spec": {"containers": [{"name": "a", "image": "none"}], "schedulerName": "us"},
        }
        key = key_of(await client.create(PODS, pod))
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": "a"},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "node-a"},
        }
        await client.create_subresource(PODS, key, "binding", binding)
        assert (await client.get(PODS, "a"))["spec"]["nodeName"] == "node-a"
        assert (await refusal(client.create_subresource(PODS, key, "binding", binding))).status == 409

    with_client(scenario)


def test_objects_of_other_namespaces_are_listed_where_asked_for(with_client: WithClient) -> None:
    async def scenario(client: ApiClient) -> None:
        await client.create(CONFIG_MAPS, config_map("mine"))
        found = await client.list(CONFIG_MAPS, everywhere=True)
        assert ObjectKey(client.namespace, "mine") in {key_of(each) for each in found.objects}
        assert (await client.list(CONFIG_MAPS, namespace="elsewhere")).objects == []

    with_client(scenario)
