"""The scheduler extender, as kube-scheduler asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest
from aiohttp import web

from cotenant.k8s.client import ApiClient
from cotenant.k8s.pods.controller import ShareController
from cotenant.k8s.pods.extender import OFFER_SECONDS, SchedulerExtender
from cotenant.k8s.pods.objects import config_map_for, environment_of
from cotenant.k8s.pods.placer import Placer
from cotenant.k8s.pods.request import SharePod, read_pod
from cotenant.k8s.pods.rules import choose_rule
from tests.k8s.api_double import ApiDouble
from tests.k8s.eventually import eventually
from tests.k8s.play import play
from tests.k8s.pods.cluster import catalogue, device, node_object, pod_object
from tests.k8s.pods.test_controller import cluster, message, placement_of, pods
from tests.k8s.pods.test_request import PLACED

NAMES = ["n1", "n2", "n3"]


class Scheduler:
    """Asks as kube-scheduler does: filter, prioritise, then bind to the best."""

    def __init__(self, url: str) -> None:
        self.http = httpx2.AsyncClient(base_url=url)

    async def ask(self, verb: str, body: Any) -> Any:
        response = await self.http.post(f"/{verb}", content=msgspec.json.encode(body))
        assert response.status_code == 200, response.text
        return response.json()

    async def bind(self, pod: dict[str, Any], node: str) -> str:
        metadata = pod["metadata"]
        body = {"PodName": metadata["name"], "PodNamespace": "default", "PodUID": metadata["uid"], "Node": node}
        answer: str = (await self.ask("bind", body))["Error"]
        return answer

    async def schedule(self, pod: dict[str, Any]) -> str:
        """Return the node that a pod was bound to, "" where none takes it."""
        able = (await self.ask("filter", {"Pod": pod, "NodeNames": NAMES}))["NodeNames"]
        if not able:
            return ""
        scores = await self.ask("prioritize", {"Pod": pod, "NodeNames": able})
        best: str = max(scores, key=lambda each: each["Score"])["Host"]
        assert await self.bind(pod, best) == ""
        return best


@asynccontextmanager
async def extending(client: ApiClient, rule: str = "score") -> AsyncIterator[tuple[Scheduler, ShareController]]:
    controller = ShareController(client, Placer(catalogue(), choose_rule(rule)))
    task = asyncio.create_task(controller.run())
    runner = web.AppRunner(SchedulerExtender(client, controller).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    scheduler = Scheduler(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await eventually(lambda: controller.leads and len(controller.nodes()) >= 2)
    try:
        yield scheduler, controller
    finally:
        await scheduler.http.aclose()
        await runner.cleanup()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_pods_are_scheduled_bound_and_have_shares() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        async with extending(client) as (scheduler, _):
            for name in "abc":
                pod = api.put("pods", pod_object(name, "tiny", "100ms", "20", gated=False))
                node = await scheduler.schedule(pod)
                bound = pods(api)[name]
                assert bound["spec"]["nodeName"] == node == placement_of(bound).node
            held = {each["metadata"]["name"]: each["data"] for each in api.objects("configmaps")}
            assert held == {name: environment_of(placement_of(pods(api)[name])) for name in "abc"}
            used: dict[str, int] = {}
            for each in pods(api).values():
                placed = placement_of(each)
                used[placed.device] = used.get(placed.device, 0) + placed.share
            assert max(used.values()) <= 1000

    play(scenario)


def test_filter_says_what_is_short_on_each_node() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        api.put("pods", pod_object("p", "large", "100ms", "500", gated=False))
        async with extending(client) as (scheduler, _):
            answer = await scheduler.ask("filter", {"Pod": pods(api)["p"], "NodeNames": NAMES})
            assert answer["NodeNames"] == [] and set(answer["FailedNodes"]) == set(NAMES)
            assert all("large at 500 requests/s within 100 ms" in text for text in answer["FailedNodes"].values())

    play(scenario)


def test_filter_answers_with_the_nodes_that_it_was_sent() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        pod = api.put("pods", pod_object("p", "tiny", "300ms", "5", gated=False))
        items = [*api.objects("nodes"), {"metadata": {"name": "n3"}}]
        async with extending(client) as (scheduler, _):
            answer = await scheduler.ask("filter", {"pod": pod, "nodes": {"items": items}})
            [chosen] = [each["metadata"]["name"] for each in answer["Nodes"]["items"]]
            assert chosen in ("n1", "n2") and answer["NodeNames"] == [chosen]
            others = {"n1", "n2", "n3"} - {chosen}
            assert answer["FailedNodes"] == dict.fromkeys(others, f"its share is on {chosen}")

    play(scenario)


def test_share_is_the_pods_from_the_filter_on_until_the_offer_ends() -> None:
    """Schedulers filter for the next pods before they have bound the last."""

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node_object("n1", device("GPU-0")))
        one, other = (api.put("pods", pod_object(name, gated=False)) for name in "ab")
        now = 0.0
        controller = ShareController(client, Placer(catalogue(), choose_rule("max")))
        extender = SchedulerExtender(client, controller, lambda: now)
        task = asyncio.create_task(controller.run())
        await eventually(lambda: controller.leads and controller.nodes())
        for _ in range(2):
            assert extender.filter({"Pod": one, "NodeNames": ["n1"]})["NodeNames"] == ["n1"]
            assert extender.filter({"Pod": other, "NodeNames": ["n1"]})["NodeNames"] == []
        now = OFFER_SECONDS + 1
        assert extender.filter({"Pod": other, "NodeNames": ["n1"]})["NodeNames"] == ["n1"]
        assert extender.filter({"Pod": one, "NodeNames": ["n1"]})["NodeNames"] == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scenario)


def test_pods_that_ask_for_nothing_pass() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        body = pod_object("p", gated=False)
        body["metadata"]["annotations"] = {}
        pod = api.put("pods", body)
        async with extending(client) as (scheduler, _):
            answer = await scheduler.ask("filter", {"Pod": pod, "NodeNames": NAMES})
            assert (answer["NodeNames"], answer["FailedNodes"]) == (NAMES, {})
            assert {each["Score"] for each in await scheduler.ask("prioritize", {"Pod": pod, "NodeNames": NAMES})} == {
                0
            }
            assert await scheduler.bind(pod, "n3") == ""
            assert pods(api)["p"]["spec"]["nodeName"] == "n3" and api.objects("configmaps") == []

    play(scenario)


def test_broken_pods_fit_nowhere() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        pod = api.put("pods", pod_object("p", "mid", "soon", gated=False))
        async with extending(client) as (scheduler, _):
            answer = await scheduler.ask("filter", {"Pod": pod, "NodeNames": NAMES})
            assert answer["NodeNames"] == [] and "cotenant.dev/slo: 'soon'" in answer["FailedNodes"]["n1"]
            assert "cotenant.dev/slo: 'soon'" in await scheduler.bind(pod, "n1")

    play(scenario)


def test_bind_that_was_cut_short_is_taken_up_again() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        pod = api.put("pods", pod_object("p", gated=False))
        read = read_pod(pod)
        assert isinstance(read, SharePod)
        was = msgspec.structs.replace(PLACED, node="n2", device="GPU-2", visible="GPU-2", share=950)
        body = config_map_for(read, was, None)
        assert body is not None
        api.put("configmaps", body)
        async with extending(client) as (scheduler, controller):
            await eventually(lambda: controller.holding(controller.pods()))
            answer = await scheduler.ask("filter", {"Pod": pod, "NodeNames": NAMES})
            assert answer["NodeNames"] == ["n2"] and answer["FailedNodes"]["n1"] == "its share is on n2"
            assert await scheduler.schedule(pod) == "n2"
            assert placement_of(pods(api)["p"]) == was

    play(scenario)


def test_bind_of_another_pod_of_that_name_is_refused() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        pod = api.put("pods", pod_object("p", gated=False))
        pod["metadata"]["uid"] = "other"
        async with extending(client) as (scheduler, _):
            assert await scheduler.bind(pod, "n1") == "pod default/p is another one by now"
            with api.failing(500, "GET /api/v1/namespaces/default/pods/p"):
                assert "refused (500)" in await scheduler.bind(pod, "n1")

    play(scenario)


def test_bind_to_a_node_without_room_says_so() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        api.put("nodes", node_object("n3", device("GPU-3"), unschedulable=True))
        pod = api.put("pods", pod_object("p", gated=False))
        async with extending(client) as (scheduler, _):
            assert "mid at 50 requests/s" in await scheduler.bind(pod, "n3")
            assert "nodeName" not in pods(api)["p"]["spec"]

    play(scenario)


def test_what_is_no_question_is_refused() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        async with extending(client) as (scheduler, _):
            for content in (b"{", b"[]"):
                assert (await scheduler.http.post("/filter", content=content)).status_code == 400
            assert (await scheduler.http.get("/healthz")).status_code == 200

    play(scenario)


def test_gated_pods_get_no_share_that_is_offered_and_get_it_once_the_offer_ends() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node_object("n1", device("GPU-0")))
        one = api.put("pods", pod_object("a", gated=False))
        now = 0.0
        controller = ShareController(client, Placer(catalogue(), choose_rule("max")))
        extender = SchedulerExtender(client, controller, lambda: now)
        task = asyncio.create_task(controller.run())
        await eventually(lambda: controller.leads and controller.nodes())
        assert extender.filter({"Pod": one, "NodeNames": ["n1"]})["NodeNames"] == ["n1"]
        api.put("pods", pod_object("g"))
        await eventually(lambda: "NoRoom" in message(pods(api)["g"]))
        now = OFFER_SECONDS + 1
        await eventually(lambda: placement_of(pods(api)["g"]) is not None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scenario)


def test_filter_counts_shares_that_the_controller_is_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", node_object("n1", device("GPU-0")))
        controller = ShareController(client, Placer(catalogue(), choose_rule("max")))
        extender = SchedulerExtender(client, controller)
        answers: list[Any] = []
        write = client.create

        async def create(*arguments: Any) -> Any:
            answers.append(extender.filter({"Pod": other, "NodeNames": ["n1"]})["NodeNames"])
            return await write(*arguments)

        monkeypatch.setattr(client, "create", create)
        task = asyncio.create_task(controller.run())
        await eventually(lambda: controller.leads and controller.nodes())
        other = api.put("pods", pod_object("b", gated=False))
        api.put("pods", pod_object("a"))
        await eventually(lambda: placement_of(pods(api)["a"]) is not None)
        assert answers == [[]]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scenario)
