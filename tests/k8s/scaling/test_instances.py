"""The instance controller: pods of instances in an API server, over gRPC's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cotenant.control.scaling.hetsev import GreedyScaling
from cotenant.control.scaling.provisioning import Instance, InstanceScaler, Provision
from cotenant.core.model import Kind, Model
from cotenant.errors import ConfigError, InstanceError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.pods.placer import Placed, Placer
from cotenant.k8s.pods.request import GATE, KIND, MODEL, RATE, SLO, SharePod, read_pod
from cotenant.k8s.pods.rules import choose_rule
from cotenant.k8s.resource import POD_TEMPLATES, PODS, ObjectKey
from cotenant.k8s.scaling.client import InstanceClient
from cotenant.k8s.scaling.instance_pods import LABEL, InstancePods, check_name, choose_template, pod_for, read_instance
from cotenant.k8s.scaling.service import InstanceService
from cotenant.live.access import Access, Role
from cotenant.planners import Problem
from cotenant.protocol.instances import SERVICE, instances
from tests.k8s.api_double import ApiDouble
from tests.k8s.play import play
from tests.k8s.pods.cluster import BIG, SMALL, catalogue, profiles
from tests.k8s.pods.test_placer import CLUSTER
from tests.k8s.servers import WithClient

Object = dict[str, Any]
Scenario = Callable[[ApiDouble, InstanceClient], Awaitable[None]]


def template(name: str = "resnet", model: str = "resnet50", kind: str = "", **spec: Any) -> Object:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": {MODEL: model} | ({KIND: kind} if kind else {}),
        },
        "template": {
            "metadata": {"labels": {"app": name}, "annotations": {"team": "vision"}},
            "spec": {"containers": [{"name": "main", "image": f"registry.example/{name}"}], **spec},
        },
    }


def order(name: str = "resnet50-v100-0", model: str = "resnet50", kind: str = "v100") -> Provision:
    return Provision(name=name, model=model, kind=kind, slo=0.1, rate=123.456)


def instance(state: Any = "pending", name: str = "resnet50-v100-0", reason: str = "") -> Instance:
    return Instance(name=name, model="resnet50", kind="v100", state=state, reason=reason)


@asynccontextmanager
async def serving(client: ApiClient, access: Access | None = None) -> AsyncIterator[str]:
    listener = InstanceService(InstancePods(client)).listener(access)
    port = await listener.listen("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await listener.stop(1.0)


def run(scenario: Scenario, *templates: Object) -> None:
    """Run a scenario with an instance controller and its API server, which has templates."""

    async def main(api: ApiDouble, client: ApiClient) -> None:
        for each in templates or (template(),):
            api.put("podtemplates", each)
        async with serving(client) as address:
            asking = InstanceClient(address)
            try:
                await scenario(api, asking)
            finally:
                await asking.close()

    play(main)


def test_instance_is_a_pod_of_its_name_from_the_template_of_its_model() -> None:
    async def scenario(api: ApiDouble, client: InstanceClient) -> None:
        assert await client.provision(order())
        (pod,) = api.objects("pods")
        assert pod["metadata"]["name"] == "resnet50-v100-0" and pod["metadata"]["namespace"] == "default"
        assert pod["metadata"]["labels"] == {"app": "resnet", LABEL: "true"}
        assert pod["metadata"]["annotations"] == {
            "team": "vision",
            MODEL: "resnet50",
            KIND: "v100",
            SLO: "100ms",
            RATE: "123.456",
        }
        assert pod["spec"] == {"containers": [{"name": "main", "image": "registry.example/resnet"}]}
        assert await client.list() == [instance()]

    run(scenario, template(), template("bert", "bert"))


def test_instances_are_kept_by_an_api_server(with_client: WithClient) -> None:
    """The double and a real one, which checks what it is given, and keeps a pod with a node until a kubelet has ended
    it."""

    async def scenario(client: ApiClient) -> None:
        kept = InstancePods(client)
        body = template()
        body["metadata"].pop("namespace")
        await client.create(POD_TEMPLATES, body)
        first, second = order(), order("resnet50-v100-1")
        assert await kept.provision(first) == (instance(), True)
        assert await kept.provision(first) == (instance(), False)
        assert (await kept.provision(second))[1]
        assert [each.name for each in await kept.list()] == [first.name, second.name]
        binding = {"metadata": {"name": first.name}, "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"}}
        await client.create_subresource(PODS, ObjectKey(client.namespace, first.name), "binding", binding)
        for name in (first.name, second.name):
            assert await kept.release(name)
        assert {each.state for each in await kept.list()} <= {"leaving"}
        assert not await kept.release(second.name)  # which had no node

    with_client(scenario)


def test_gated_instance_asks_for_its_share_and_mounts_it() -> None:
    async def scenario(api: ApiDouble, client: InstanceClient) -> None:
        await client.provision(order())
        (pod,) = api.objects("pods")
        assert pod["spec"]["containers"][0]["envFrom"] == [{"configMapRef": {"name": "resnet50-v100-0"}}]
        asked = read_pod(pod)
        assert isinstance(asked, SharePod) and asked.gated
        assert (asked.model, asked.kind, asked.slo, asked.rate) == ("resnet50", "v100", 0.1, 123.456)
        assert asked.config_map == "resnet50-v100-0" and not asked.shared

    run(scenario, template(schedulingGates=[{"name": GATE}]))


@pytest.mark.parametrize("kind", [BIG, SMALL])
def test_share_controller_gives_an_instance_its_share_by_hetsev(kind: Kind) -> None:
    """What the scaler asks of an instance is what its share sustains, by the same profiles."""
    asked = Problem(models=(Model(name="mid", slo=0.1),), rates={"mid": 30.0}, fleet=(kind,), profiles=profiles())
    wanted = InstanceScaler(asked, GreedyScaling(share=500)).step(0.0, 15.0, {}, [])[0]
    assert isinstance(wanted, Provision)
    body = pod_for(wanted, template(schedulingGates=[{"name": GATE}]))
    body["metadata"] |= {"uid": "u", "resourceVersion": "1", "namespace": "default"}
    pod = read_pod(body)
    assert isinstance(pod, SharePod)
    (decision,) = Placer(catalogue(), choose_rule("hetsev")).decide(CLUSTER, [pod], {})
    assert isinstance(decision, Placed), decision
    assert decision.placement.share == 500 and decision.placement.rate == pytest.approx(wanted.rate)
    assert {each.uuid: each.kind for node in CLUSTER for each in node.devices}[decision.placement.device] == kind.name


def test_template_for_the_kind_goes_before_that_for_any() -> None:
    any_kind, own = template(), template("resnet-v100", kind="v100")
    assert choose_template([any_kind, own], "resnet50", "v100", "x") is own
    assert choose_template([any_kind, own], "resnet50", "t4", "x") is any_kind
    with pytest.raises(ConfigError, match="'resnet50' has no PodTemplate for 't4': create one in namespace x with"):
        choose_template([own], "resnet50", "t4", "x")
    with pytest.raises(ConfigError, match="several PodTemplates: other and resnet; leave one, or tell them by"):
        choose_template([any_kind, template("other")], "resnet50", "t4", "x")


def test_asking_twice_at_once_and_again_makes_one() -> None:
    async def scenario(api: ApiDouble, client: InstanceClient) -> None:
        made = await asyncio.gather(*(client.provision(order()) for _ in range(5)))
        assert sorted(made) == [False] * 4 + [True]
        assert not await client.provision(order())
        assert len(api.objects("pods")) == 1

    run(scenario)


def test_release_deletes_the_pod_once() -> None:
    async def scenario(api: ApiDouble, client: InstanceClient) -> None:
        await client.provision(order())
        assert await client.release("resnet50-v100-0")
        assert not await client.release("resnet50-v100-0")
        assert api.objects("pods") == [] == await client.list()
        assert await client.provision(order())  # its name is free again

    run(scenario)


def test_instance_that_leaves_is_neither_deleted_again_nor_provided() -> None:
    async def scenario(api: ApiDouble, client: InstanceClient) -> None:
        await client.provision(order())
        (pod,) = api.objects("pods")
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        api.put("pods", pod)
        assert [each.state for each in await client.list()] == ["leaving"]
        written = len(api.writes)
        assert await client.release("resnet50-v100-0")
        assert len(api.writes) == written
        with pytest.raises(InstanceError, match=r"cannot do it now: .*was released and is not gone yet; try again"):
            await client.provision(order())

    run(scenario)


def test_pods_of_others_are_neither_listed_nor_touched() -> None:
    async def scenario(api: ApiDouble, client: InstanceClient) -> None:
        foreign = {"metadata": {"name": "resnet50-v100-0", "namespace": "default", "annotations": {MODEL: "resnet50"}}}
        api.put("pods", foreign | {"spec": {}})
        assert await client.list() == []
        for call in (client.provision(order()), client.release("resnet50-v100-0")):
            with pytest.raises(InstanceError, match="'resnet50-v100-0' is not an instance: it has no label"):
                await call
        assert len(api.objects("pods")) == 1
        assert await client.provision(order("other"))
        with pytest.raises(InstanceError, match="'other' is one of 'resnet50' on 'v100'; use another name"):
            await client.provision(order("other", kind="t4"))

    run(scenario, template(), template("resnet-t4", kind="t4"))


@pytest.mark.parametrize("name", ["", "A", "a/b", "../nodes/x", "a.b", "-a", "a-", "a" * 64, "a\n"])
def test_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name of an instance"):
        check_name(name)


def test_wrong_questions_are_invalid_and_an_api_server_in_trouble_is_not_the_callers_fault() -> None:
    async def scenario(api: ApiDouble, client: InstanceClient) -> None:
        for wrong, said in (
            (order("x/y"), "^'x/y' is not a name of an instance"),
            (order(model=""), "^model: missing"),
            (order(kind=""), "^kind: missing"),
            (Provision(name="n", model="resnet50", kind="v100", slo=0.1, rate=float("nan")), "^qps: nan must be"),
            (Provision(name="n", model="resnet50", kind="v100", slo=-1, rate=1.0), "^slo_ms: -1000 must be"),
            (order(model="unet"), "^model 'unet' has no PodTemplate"),
        ):
            with pytest.raises(InstanceError, match=said):
                await client.provision(wrong)
        with api.failing(422, "POST"), pytest.raises(InstanceError, match=r"^POST .* is refused \(422\)"):
            await client.provision(order())
        with api.failing(500), pytest.raises(InstanceError, match=r"cannot do it now: GET .* is refused \(500\)"):
            await client.list()
        with api.failing(403, "POST"), pytest.raises(InstanceError, match=r"cannot do it now: .*\(403\)"):
            await client.provision(order())
        with api.away(), pytest.raises(InstanceError, match="cannot do it now: the API server does not answer"):
            await client.list()
        assert api.objects("pods") == []

    run(scenario)


def test_tokens_are_asked_for_where_there_are_any(tmp_path: Path) -> None:
    async def main(api: ApiDouble, client: ApiClient) -> None:
        api.put("podtemplates", template())
        token, file = "0123456789abcdef", tmp_path / "token"
        async with serving(client, Access({Role.CONTROL: [token]})) as address:
            stranger, known = InstanceClient(address), InstanceClient(address, token_file=file)
            for call in (stranger.list(), stranger.provision(order()), stranger.release("x")):
                with pytest.raises(InstanceError, match="this server asks for a token"):
                    await call
            with pytest.raises(InstanceError, match=r"^cannot authenticate: [^ ]*token: No such file or directory;"):
                await known.list()
            file.write_text("another-token-of-16\n")
            with pytest.raises(InstanceError, match="does not know the token"):
                await known.list()
            file.write_text("# none\n\n")
            with pytest.raises(InstanceError, match="no token; write one"):
                await known.list()
            file.write_text(f"# new, then old\n\n{token}\nanother-token-of-16\n")  # as the server may have it
            assert await known.provision(order())
            await stranger.close()
            await known.close()

    play(main)


def test_nobody_there_and_another_version_are_said() -> None:
    async def main(api: ApiDouble, client: ApiClient) -> None:
        nobody = InstanceClient("127.0.0.1:1")
        with pytest.raises(InstanceError, match=r"the instance controller at 127\.0\.0\.1:1 cannot do it now: "):
            await nobody.list()
        await nobody.close()

        async def newer(request: Any, context: Any) -> Any:
            return instances.ListResponse(instances=[instances.Instance(name="x", state=99)])

        server = grpc.aio.server()
        handler: Any = grpc.unary_unary_rpc_method_handler(
            newer, response_serializer=lambda each: each.SerializeToString()
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"List": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        other = InstanceClient(f"127.0.0.1:{port}")
        with pytest.raises(InstanceError, match="is of another version: Invalid enum value ''"):
            await other.list()
        await other.close()
        await server.stop(None)

    play(main)


def waiting(reason: str) -> Object:
    container = {"name": "main", "state": {"waiting": {"reason": reason, "message": "why"}}}
    return {"phase": "Running", "containerStatuses": [container], "conditions": [{"type": "Ready", "status": "False"}]}


def conditions(*given: tuple[str, str, str]) -> Object:
    return {
        "phase": "Pending",
        "conditions": [
            {"type": name, "status": status, "reason": reason, "message": "why"} for name, status, reason in given
        ],
    }


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        ({}, "pending", ""),
        (conditions(("PodScheduled", "False", "SchedulingGated")), "pending", ""),
        (conditions(("PodScheduled", "False", "Unschedulable")), "stuck", "why"),
        (conditions(("cotenant.dev/Share", "False", "NoRoom")), "stuck", "why"),
        (conditions(("cotenant.dev/Share", "True", "Placed"), ("PodScheduled", "True", "")), "pending", ""),
        (conditions(("Ready", "True", "")), "ready", ""),
        (waiting("ContainerCreating"), "pending", ""),
        (waiting("CrashLoopBackOff"), "stuck", "container main: CrashLoopBackOff: why"),
        (waiting("ImagePullBackOff"), "stuck", "container main: ImagePullBackOff: why"),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "ended", "Evicted: disk"),
        ({"phase": "Succeeded"}, "ended", "Succeeded"),
    ],
)
def test_state_is_what_the_status_of_the_pod_says(status: Object, state: str, reason: str) -> None:
    annotations = {MODEL: "resnet50", KIND: "v100"}
    pod = {"metadata": {"name": "resnet50-v100-0", "annotations": annotations}, "status": status}
    assert read_instance(pod) == instance(state, reason=reason)
