"""A real scheduler of Kubernetes 1.20 asks our extender, on a real API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from cotenant.k8s.client import ApiClient
from cotenant.k8s.pods.controller import ShareController
from cotenant.k8s.pods.extender import SchedulerExtender
from cotenant.k8s.pods.inventory import DeviceReport
from cotenant.k8s.pods.objects import environment_of
from cotenant.k8s.pods.placer import Placer
from cotenant.k8s.pods.rules import choose_rule
from cotenant.k8s.resource import CONFIG_MAPS, NODES, PODS, ObjectKey
from tests.k8s.cluster import BINARIES, Cluster
from tests.k8s.eventually import eventually
from tests.k8s.pods.cluster import SMALL, catalogue, device, node_object, pod_object
from tests.k8s.pods.test_controller import placement_of

SCHEDULER = "shares"
NAMESPACE = "shares"
PODS_AT_ONCE = 50


async def add_node(client: ApiClient, name: str, *devices: DeviceReport) -> None:
    """Add a node that takes pods, though nothing runs there."""
    body = node_object(name, *devices)
    made = await client.create(NODES, {"metadata": body["metadata"]})
    made["spec"].pop("taints", None)  # it is not ready, until it says so
    await client.replace(NODES, made)
    resources = {"cpu": "64", "memory": "256Gi", "pods": "200"}
    status = {"status": {"conditions": body["status"]["conditions"], "capacity": resources, "allocatable": resources}}
    await client.patch(NODES, ObjectKey("", name), status, "status")


@asynccontextmanager
async def scheduling(cluster: Cluster, client: ApiClient) -> AsyncIterator[ShareController]:
    controller = ShareController(client, Placer(catalogue(), choose_rule("score")))
    working = asyncio.create_task(controller.run())
    runner = web.AppRunner(SchedulerExtender(client, controller).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1beta1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(cluster.kubeconfig()), "qps": 500, "burst": 500},
        "profiles": [{"schedulerName": SCHEDULER}],
        "extenders": [
            {
                "urlPrefix": f"http://127.0.0.1:{runner.addresses[0][1]}",
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "bindVerb": "bind",
                "weight": 10,
                "nodeCacheCapable": True,
            }
        ],
    }
    path = cluster.folder / "scheduler.json"
    path.write_text(json.dumps(config))
    ports = ["--port=0", "--secure-port=0"]
    cluster._run("scheduler-with-extender", BINARIES / "kube-scheduler", f"--config={path}", *ports)
    try:
        await eventually(lambda: controller.leads)
        yield controller
    finally:
        cluster.kill("scheduler-with-extender")
        await runner.cleanup()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


@pytest.mark.cluster
def test_scheduler_binds_pods_with_shares_and_leaves_those_without_room(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(240), cluster.client(NAMESPACE) as client:
            await cluster.namespace(client, NAMESPACE)
            names = [f"share-{n}" for n in range(10)]
            for name in names:
                await add_node(client, name, *(device(f"GPU-{name}-{i}") for i in range(4)))
            await add_node(client, "share-t4", device("GPU-t4", SMALL))

            async def bound() -> dict[str, dict[str, Any]]:
                listing = await client.list(PODS)
                return {each["metadata"]["name"]: each for each in listing.objects if each["spec"].get("nodeName")}

            async def add(name: str, *asked: str) -> None:
                body = pod_object(name, *asked, gated=False, schedulerName=SCHEDULER)
                body["metadata"] = {"name": name, "annotations": body["metadata"]["annotations"]}
                del body["status"]
                await client.create(PODS, body)

            async with scheduling(cluster, client):
                await add("too-large", "large", "100ms", "500")
                await add("first", "tiny", "100ms", "20")

                async def is_bound(count: int) -> bool:
                    return len(await bound()) >= count

                await eventually(lambda: is_bound(1), 60)
                loop = asyncio.get_running_loop()
                began = loop.time()
                await asyncio.gather(*(add(f"p{n}", "tiny", "100ms", "20") for n in range(PODS_AT_ONCE)))
                await eventually(lambda: is_bound(PODS_AT_ONCE + 1), 120)
                print(f"{PODS_AT_ONCE} pods made and bound in {loop.time() - began:.2f} s")  # noqa: T201
            found = await bound()
            assert "too-large" not in found and len(found) == PODS_AT_ONCE + 1
            used: dict[str, int] = {}
            for name, each in found.items():
                placed = placement_of(each)
                assert each["spec"]["nodeName"] == placed.node
                assert (await client.get(CONFIG_MAPS, name))["data"] == environment_of(placed)
                used[placed.device] = used.get(placed.device, 0) + placed.share
            assert max(used.values()) <= 1000

    asyncio.run(scenario())
