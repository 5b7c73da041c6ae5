"""A front end serves what resources say, says in their status what has become of it, and bears what API servers do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cotenant.app.backend import create_backend
from cotenant.app.running_server import RunningServer
from cotenant.config import Settings, read_settings
from cotenant.errors import ConfigError, KubernetesError, NotFoundError
from cotenant.k8s.resource import DEVICE_POOLS, ENDPOINT_SLICES, LEASES, SERVED_MODELS, ObjectKey, key_of
from cotenant.k8s.serving import on_kubernetes
from tests.k8s.cluster import ROLE_BINDINGS, ROLES, USER, Cluster
from tests.k8s.eventually import eventually
from tests.k8s.front_end import agent, becomes, conditions, front_end, process, served, settings_file
from tests.k8s.manifests import BASE, documents
from tests.k8s.rbac import rule_for
from tests.k8s.servers import ApiServer, Connect, double_server, real_server

Scenario = Callable[[ApiServer], Awaitable[Any]]
IDENTITY = {"metadata": {"name": "identity"}, "spec": {"slo": "5s", "rate": 20}}


@pytest.fixture(autouse=True)
def short_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.k8s.controller.PERIOD", 0.3)


@pytest.fixture
def play(connect: Connect) -> Callable[[Scenario], Any]:
    def played(scenario: Scenario) -> Any:
        async def run() -> Any:
            async with asyncio.timeout(180), connect() as api:
                return await scenario(api)

        return asyncio.run(run())

    return played


@pytest.fixture
def play_real(cluster: Cluster) -> Callable[[Scenario], Any]:
    def played(scenario: Scenario) -> Any:
        async def run() -> Any:
            async with asyncio.timeout(180), real_server(cluster) as api:
                return await scenario(api)

        return asyncio.run(run())

    return played


@pytest.fixture
def play_double(tmp_path: Path) -> Callable[[Scenario], Any]:
    def played(scenario: Scenario) -> Any:
        async def run() -> Any:
            async with asyncio.timeout(180), double_server(tmp_path) as api:
                return await scenario(api)

        return asyncio.run(run())

    return played


Play = Callable[[Scenario], Any]


async def is_ready(server: RunningServer) -> bool:
    """Whether a probe is told that the server is ready."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://{server.addresses.http}/v2/health/ready")).status_code == 200


def test_models_come_change_and_go(play: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        made = await api.client.create(SERVED_MODELS, IDENTITY)
        async with front_end(api, tmp_path) as server:
            assert not await is_ready(server)
            await becomes(api, "identity", "True", "Serving")
            await eventually(lambda: is_ready(server))
            assert await served(server)
            status = (await api.client.get(SERVED_MODELS, "identity"))["status"]
            assert (status["model"], status["slo"], status["plannedRate"]) == ("identity", "5000ms", 20.0)
            assert [each["device"] for each in status["placements"]] == ["cpu-0"]

            await api.client.patch(SERVED_MODELS, key_of(made), {"spec": {"slo": "7s"}})
            await eventually(lambda: (server.deployment.offered["identity"].model.slo) == 7.0)
            await api.client.create(SERVED_MODELS, {"metadata": {"name": "second"}, "spec": {"model": "lookup"}})
            await becomes(api, "second", "True", "Serving")
            await api.client.delete(SERVED_MODELS, key_of(made))
            await eventually(lambda: "identity" not in server.deployment.offered)
            with pytest.raises(NotFoundError):
                await served(server)

    play(scenario)


def test_model_that_cannot_be_served_is_told_why_and_keeps_back_no_other(play: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        for name, spec in (
            ("broken", {}),
            ("none", {}),
            ("impossible", {"model": "lookup", "slo": "1us"}),
            ("again", {"model": "identity"}),
        ):
            await api.client.create(SERVED_MODELS, IDENTITY) if name == "again" else None
            await asyncio.sleep(1.1 if name == "again" else 0)  # ages are of whole seconds
            await api.client.create(SERVED_MODELS, {"metadata": {"name": name}, "spec": spec})
        async with front_end(api, tmp_path) as server:
            await becomes(api, "identity", "True", "Serving")
            assert await served(server)
            assert "no model 'none' in" in await becomes(api, "none", "False", "ModelNotFound")
            assert "is that of ServedModel" in await becomes(api, "again", "False", "DuplicateModel")
            assert "model.onnx" in await becomes(api, "broken", "False", "Unavailable")
            assert "add devices, or raise its target" in await becomes(api, "impossible", "False", "Unschedulable")

    play(scenario)


async def later(look: Callable[[], int], seconds: float) -> int:
    """Return what was there some time ago."""
    seen = look()
    await asyncio.sleep(seconds)
    return seen


def test_nothing_is_written_where_nothing_changes(play_double: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        await api.client.create(SERVED_MODELS, IDENTITY)
        await api.client.create(SERVED_MODELS, {"metadata": {"name": "none"}})
        await api.client.create(DEVICE_POOLS, {"metadata": {"name": "cpus"}, "spec": {"kind": "cpu", "limit": 1}})
        assert api.double is not None
        async with front_end(api, tmp_path) as server:
            await becomes(api, "identity", "True", "Serving")
            await becomes(api, "cpus", "True", "DevicesFound", resource=DEVICE_POOLS)

            def asked() -> list[str]:
                return [each for each in api.double.requests if "leases" not in each] if api.double else []

            while (before := await later(lambda: len(asked()), 1.5)) != len(asked()):
                pass  # the first statuses are still on their way
            assert await served(server)  # requests change attainment, which is written seldom
            await asyncio.sleep(2.0)
            assert asked()[before:] == []

    play_double(scenario)


def test_status_that_is_edited_by_hand_is_put_right(play: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        made = await api.client.create(SERVED_MODELS, IDENTITY)
        async with front_end(api, tmp_path):
            await becomes(api, "identity", "True", "Serving")
            await api.client.patch(SERVED_MODELS, key_of(made), {"status": {"conditions": [], "model": "x"}}, "status")
            await becomes(api, "identity", "True", "Serving")
            assert (await api.client.get(SERVED_MODELS, "identity"))["status"]["model"] == "identity"

    play(scenario)


def test_edits_while_a_rollout_runs_lead_to_the_last_of_them(play: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        made = await api.client.create(SERVED_MODELS, IDENTITY)
        async with front_end(api, tmp_path) as server:
            for seconds in (4, 5, 6, 7):
                await api.client.patch(SERVED_MODELS, key_of(made), {"spec": {"slo": f"{seconds}s"}})
                await asyncio.sleep(0.2)
            await eventually(
                lambda: (
                    "identity" in server.deployment.offered and server.deployment.offered["identity"].model.slo == 7.0
                ),
                60.0,
            )
            await becomes(api, "identity", "True", "Serving")

    play(scenario)


def test_pool_limits_what_plans_use(play: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        await api.client.create(SERVED_MODELS, IDENTITY)
        spec = {"kind": "cpu", "cuts": [50], "pricePerHour": 0.5}
        made = await api.client.create(DEVICE_POOLS, {"metadata": {"name": "cpus"}, "spec": spec})
        await api.client.create(DEVICE_POOLS, {"metadata": {"name": "gpus"}, "spec": {"kind": "h100"}})
        async with front_end(api, tmp_path) as server:
            await becomes(api, "identity", "True", "Serving")
            assert [device.partitions[0].share for device in server.deployment.plan.devices] == [500]
            await becomes(api, "cpus", "True", "DevicesFound", resource=DEVICE_POOLS)
            status = (await api.client.get(DEVICE_POOLS, "cpus"))["status"]
            assert (status["devices"], status["used"], status["costPerHour"]) == (1, 1, 0.5)
            message = await becomes(api, "gpus", "False", "NoDevices", resource=DEVICE_POOLS)
            assert message == "no agent has a device of kind 'h100'; available: cpu"
            await api.client.patch(DEVICE_POOLS, key_of(made), {"spec": {"cuts": [33.3]}})
            message = await becomes(api, "cpus", "False", "Rejected", resource=DEVICE_POOLS)
            assert message.startswith("devices of kind 'cpu': none of the cuts is legal for cpu; it has 5 %")
            assert await served(server)

    play(scenario)


def test_server_serves_on_while_the_api_server_is_away_or_answers_500(play_double: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        await api.client.create(SERVED_MODELS, IDENTITY)
        assert api.double is not None
        async with front_end(api, tmp_path) as server:
            await becomes(api, "identity", "True", "Serving")
            with api.double.failing(500):
                await asyncio.sleep(4.0)  # longer than the lease
                assert await served(server)
            with api.double.away():
                api.double.put(
                    "servedmodels",
                    {"metadata": {"name": "second", "namespace": "default"}, "spec": {"model": "lookup"}},
                )
                await asyncio.sleep(4.0)
                assert await served(server)
            await becomes(api, "second", "True", "Serving")
            assert await served(server)

    play_double(scenario)


def test_conflicts_and_slow_answers_only_delay(play_double: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        await api.client.create(SERVED_MODELS, IDENTITY)
        assert api.double is not None
        async with front_end(api, tmp_path):
            with api.double.failing(409, only="status"):
                path = SERVED_MODELS.path("default", "identity", "status")
                await eventually(lambda: f"PUT {path}" in api.double.requests if api.double else False, 60.0)
                assert await conditions(api, "identity") == {}
            with api.double.slow(0.3):
                api.double.put(
                    "servedmodels", {"metadata": {"name": "identity", "namespace": "default", "labels": {"a": "b"}}}
                )
                await becomes(api, "identity", "True", "Serving")

    play_double(scenario)


def test_front_end_whose_lease_another_has_taken_stops(play: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        async with front_end(api, tmp_path):
            await api.client.patch(LEASES, ObjectKey("", "cotenant"), {"spec": {"holderIdentity": "front-b"}})
            await asyncio.sleep(60.0)

    with pytest.raises(KubernetesError, match="front-b has taken the lease; this front end stops"):
        play(scenario)


def test_standby_takes_over_where_the_leader_ends_or_is_killed(play: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        await api.client.create(SERVED_MODELS, IDENTITY)

        async def holder() -> Any:
            return (await api.client.get(LEASES, "cotenant"))["spec"]["holderIdentity"]

        async with process(api, tmp_path, "front-a") as first:
            await becomes(api, "identity", "True", "Serving")
            async with process(api, tmp_path, "front-b") as second:
                await eventually(lambda: "standing by: front-a leads" in second.log, 60.0)
                await asyncio.sleep(3.5)  # longer than the lease
                assert await holder() == "front-a"
                assert await first.end() == 0, first.log
                await eventually(lambda: is_held_by(holder, "front-b"))
                async with process(api, tmp_path, "front-c") as third:
                    await eventually(lambda: "standing by: front-b leads" in third.log, 60.0)
                    await second.end(9)
                    await eventually(lambda: is_held_by(holder, "front-c"), 60.0)
                    await becomes(api, "identity", "True", "Serving")
                    assert await third.end() == 0, third.log
        assert await holder() == ""

    play(scenario)


async def is_held_by(holder: Callable[[], Awaitable[Any]], name: str) -> bool:
    return bool(await holder() == name)


@pytest.mark.cluster
def test_api_server_and_its_store_are_killed_and_come_back(play_real: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        assert api.cluster is not None
        await api.client.create(SERVED_MODELS, IDENTITY)
        async with front_end(api, tmp_path) as server:
            await becomes(api, "identity", "True", "Serving")
            for parts in (("kube-apiserver",), ("kube-apiserver", "etcd")):
                api.cluster.kill(*parts)
                await asyncio.sleep(4.0)
                assert await served(server)
                await asyncio.to_thread(api.cluster.start)
                name = f"after-{parts[-1]}"
                await api.client.create(SERVED_MODELS, {"metadata": {"name": name}, "spec": {"model": "lookup"}})
                await becomes(api, name, "True", "Serving")
                await api.client.delete(SERVED_MODELS, ObjectKey("", name))
                await eventually(lambda: "lookup" not in server.deployment.offered, 60.0)
                assert await served(server)

    play_real(scenario)


def agent_pod(node: str, address: str) -> dict[str, Any]:
    """The pod of an agent that listens on loopback."""
    host, _, port = address.rpartition(":")
    return {
        "metadata": {
            "name": f"agent-{node}",
            "namespace": "default",
            "labels": {"app.kubernetes.io/name": "cotenant", "app.kubernetes.io/component": "agent"},
        },
        "spec": {"nodeName": node, "containers": [{"ports": [{"name": "agent", "containerPort": int(port)}]}]},
        "status": {"podIP": host, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def test_agents_whose_pods_are_ready_give_the_devices(play_double: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        assert api.double is not None
        await api.client.create(SERVED_MODELS, IDENTITY)
        pool = {"metadata": {"name": "cpus"}, "spec": {"kind": "cpu", "limit": 1}}
        await api.client.create(DEVICE_POOLS, pool)
        async with (
            agent(tmp_path, "a") as first,
            agent(tmp_path, "b") as second,
            front_end(api, tmp_path, extra='backend = "none"\n') as server,
        ):
            await becomes(api, "identity", "False", "NoDevices")
            api.double.put("pods", agent_pod("node-a", first))
            await becomes(api, "identity", "True", "Serving")
            assert await served(server)
            status = (await api.client.get(SERVED_MODELS, "identity"))["status"]
            assert {each["device"] for each in status["placements"]} == {"node-a/cpu-0"}

            api.double.put("pods", agent_pod("node-b", second))
            await eventually(lambda: {"node-b/cpu"} <= {kind.name for kind in server.deployment.problem.fleet})
            found = (await api.client.get(DEVICE_POOLS, "cpus"))["status"]
            assert found["used"] == 1
            api.double.remove("pods", "agent-node-a", "default")
            await eventually(
                lambda: {str(device.id) for device in server.deployment.plan.devices} == {"node-b/cpu-0"}, 60.0
            )
            await becomes(api, "identity", "True", "Serving")
            assert await served(server)

    play_double(scenario)


def test_service_leads_to_the_front_end_that_leads(play_double: Play, tmp_path: Path) -> None:
    async def scenario(api: ApiServer) -> None:
        await api.client.create(SERVED_MODELS, IDENTITY)
        here = 'service = "models"\naddress = "{}"\n'
        for identity, address in (("front-a", "10.0.0.7"), ("front-b", "10.0.0.8"), ("front-c", "fd00::9")):
            async with front_end(api, tmp_path, identity, kubernetes=here.format(address)) as server:
                await eventually(lambda address=address: leads_to(api, address))
                found = await api.client.get(ENDPOINT_SLICES, "models")
                ports = {each["name"]: each["port"] for each in found["ports"]}
                assert ports["http"] == int(server.addresses.http.rpartition(":")[2])

    play_double(scenario)


def test_role_allows_what_a_front_end_asks_for_and_no_more(play_double: Play, tmp_path: Path) -> None:
    (role,) = [each for each in documents(BASE / "access.yaml") if each["kind"] == "Role"]

    async def scenario(api: ApiServer) -> list[str]:
        assert api.double is not None
        await api.client.create(SERVED_MODELS, IDENTITY)
        await api.client.create(DEVICE_POOLS, {"metadata": {"name": "cpus"}, "spec": {"kind": "cpu"}})
        before = len(api.double.requests)
        requests: list[str] = []
        for identity, address in (("front-a", "10.0.0.7"), ("front-b", "10.0.0.8"), ("front-c", "fd00::9")):
            service = f'service = "cotenant"\naddress = "{address}"\n'
            async with front_end(api, tmp_path, identity, kubernetes=service):
                await eventually(lambda address=address: leads_to(api, address))
                requests = api.double.requests[before:]
        own = f"GET {SERVED_MODELS.path('default', 'identity')}"  # of this test
        return [request for request in requests if request != own]

    used = {request: rule_for(role, request) for request in play_double(scenario)}
    assert [request for request, rule in used.items() if rule is None] == []
    assert set(used.values()) == set(range(len(role["rules"])))


def leads_to(api: ApiServer, address: str) -> bool:
    assert api.double is not None
    slices = api.double.objects("endpointslices")
    return bool(slices) and slices[0]["endpoints"][0]["addresses"] == [address]


@pytest.mark.cluster
def test_front_end_with_the_rights_of_its_role_alone(play_real: Play, tmp_path: Path) -> None:
    (role,) = [each for each in documents(BASE / "access.yaml") if each["kind"] == "Role"]

    async def scenario(api: ApiServer) -> None:
        assert api.cluster is not None
        await api.client.create(ROLES, role)
        binding = {
            "metadata": {"name": "front-end"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]},
            "subjects": [{"kind": "User", "name": "user", "apiGroup": "rbac.authorization.k8s.io"}],
        }
        await api.client.create(ROLE_BINDINGS, binding)
        limited = ApiServer(api.client, api.cluster.kubeconfig(USER, api.client.namespace), cluster=api.cluster)
        await api.client.create(SERVED_MODELS, IDENTITY)
        await api.client.create(DEVICE_POOLS, {"metadata": {"name": "cpus"}, "spec": {"kind": "cpu"}})
        async with front_end(limited, tmp_path) as server:
            await becomes(api, "identity", "True", "Serving")
            await becomes(api, "cpus", "True", "DevicesFound", resource=DEVICE_POOLS)
            assert await served(server)
            table = api.cluster.kubectl("get", "servedmodels", f"--namespace={api.client.namespace}").splitlines()
            assert table[0].split() == ["NAME", "MODEL", "SLO", "READY", "REASON", "ATTAINMENT", "AGE"]
            assert table[1].split()[:5] == ["identity", "identity", "5s", "True", "Serving"]

    play_real(scenario)


def test_settings_that_are_read_again_keep_the_models_and_bad_ones_do_no_harm(
    play_double: Play, tmp_path: Path
) -> None:
    async def scenario(api: ApiServer) -> None:
        made = await api.client.create(SERVED_MODELS, IDENTITY)
        path = settings_file(tmp_path, "front-a")

        def read() -> Settings:
            return read_settings(path)

        settings = read()
        async with on_kubernetes(settings, create_backend(settings), read=read, kubeconfig=api.kubeconfig) as server:
            await becomes(api, "identity", "True", "Serving")
            good = path.read_text()
            for bad, error in (
                ('planner = "none"\n' + good, "planner: 'none' is unknown"),
                (
                    "http_port = 1\n" + good.replace("http_port = 0", ""),
                    "cannot change while the server runs",
                ),
                (good + '\n[[models]]\nname = "lookup"\n', "models are ServedModel resources"),
            ):
                path.write_text(bad)
                with pytest.raises(ConfigError, match=error):
                    await server.reload()
                assert await served(server)
            path.write_text('planner = "elastic"\n' + good)
            await server.reload()
            assert server.deployment.plan.planner == "elastic"
            assert await served(server)
            await api.client.patch(SERVED_MODELS, key_of(made), {"spec": {"slo": "9s"}})
            await eventually(lambda: server.deployment.offered["identity"].model.slo == 9.0)
            assert server.deployment.plan.planner == "elastic"

    play_double(scenario)
