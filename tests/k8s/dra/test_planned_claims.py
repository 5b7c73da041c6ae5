"""Claims that stand for the placements of pods: what is written, and what comes of it up to the container."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cotenant.errors import ConfigError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.dra.allocation import read_allocation
from cotenant.k8s.dra.claim_controller import ClaimController
from cotenant.k8s.dra.container_edits import ContainerOptions
from cotenant.k8s.dra.node_plugin import NodeOptions, node_plugin
from cotenant.k8s.dra.planned_claims import claim_body, claim_status, is_foreign, is_stale, read_planned
from cotenant.k8s.dra.preparation import prepare
from cotenant.k8s.informer import Informer
from cotenant.k8s.resource import ObjectKey, Resource
from tests.k8s.api_double import ApiDouble
from tests.k8s.dra.kubelet import Kubelet
from tests.k8s.dra.published import check
from tests.k8s.dra.samples import GIB, NODE, claim, gpu, mig_gpu, named
from tests.k8s.dra.scheduler import allocate
from tests.k8s.eventually import eventually
from tests.k8s.play import play


def placement(**changes: Any) -> dict[str, Any]:
    """As the controller of shares writes it."""
    return {
        "node": NODE,
        "device": gpu(0).uuid,
        "visible": gpu(0).uuid,
        "slot": 1,
        "share": 400,
        "memory": 8 * GIB,
        "model": "bert",
        "slo": 0.05,
        "rate": 20.0,
    } | changes


def pod(name: str = "a", by: str = "", claims: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A pod with a placement. by: the claim by which it gets its share."""
    entries = [{"name": "cotenant", "resourceClaimName": by}] if by else claims or []
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "annotations": {"cotenant.dev/placement": json.dumps(placement(**changes))},
        },
        "spec": {"containers": [], "resourceClaims": entries},
    }


def test_claim_asks_for_the_device_that_was_planned() -> None:
    planned = read_planned(pod(by="share-a"))
    assert planned is not None and not planned.accounts
    body = claim_body(planned)
    check({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **body})
    assert (body["metadata"]["name"], body["metadata"]["namespace"]) == ("share-a", "default")
    assert [each["uid"] for each in body["metadata"]["ownerReferences"]] == ["uid-a"]
    (request,) = body["spec"]["devices"]["requests"]
    assert request["exactly"]["selectors"] == [
        {"cel": {"expression": f'device.attributes["cotenant.dev"].uuid == "{gpu(0).uuid}"'}}
    ]
    assert request["exactly"]["capacity"] == {"requests": {"share": "400", "memory": str(8 * GIB)}}
    (config,) = body["spec"]["devices"]["config"]
    assert config["opaque"]["parameters"] == {
        "apiVersion": "cotenant.dev/v1alpha1",
        "kind": "PlacementConfig",
        "sharing": "mps",
        "device": gpu(0).uuid,
        "share": 400,
        "memory": 8 * GIB,
        "slot": 1,
        "model": "bert",
        "slo": 0.05,
        "rate": 20.0,
    }
    assert claim_status(planned, body) is None


@pytest.mark.parametrize(
    ("changes", "device", "sharing"),
    [
        ({}, gpu(0), "mps"),
        ({"share": 1000, "memory": 80 * GIB}, gpu(0), "whole"),
        ({"memory": 0}, gpu(0), "mps"),
        (
            {"device": mig_gpu(1).uuid, "visible": "MIG-00000001-2", "share": 285, "memory": 0},
            mig_gpu(1),
            "mig",
        ),
    ],
)
def test_claim_that_only_accounts_is_allocated_as_the_driver_reads_it(
    changes: dict[str, Any], device: Any, sharing: str
) -> None:
    planned = read_planned(pod(**changes))
    assert planned is not None and planned.accounts
    body = claim_body(planned)
    body["metadata"]["uid"] = "uid-claim"
    status = claim_status(planned, body)
    assert status is not None
    whole = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **body, "status": status}
    check(whole)
    assert status["reservedFor"] == [{"resource": "pods", "name": "a", "uid": "uid-a"}]
    (found,) = prepare(read_allocation(whole, "uid-claim"), NODE, named(device), ()).devices
    assert (found.uuid, found.sharing, found.share) == (device.uuid, sharing, changes.get("share", 400))
    assert claim_status(planned, whole) is None and not is_stale(planned, whole)


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"name": "a", "namespace": "default", "uid": "u"}},
        {**pod(), "status": {"phase": "Succeeded"}},
        pod(claims=[{"name": "cotenant", "resourceClaimTemplateName": "t"}]),
    ],
    ids=["no placement", "ended", "of a template"],
)
def test_pod_without_a_claim_of_ours_has_none(body: dict[str, Any]) -> None:
    assert read_planned(body) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        json.dumps(placement(share=0)),
        json.dumps(placement(share=1001)),
        json.dumps(placement(memory=-1)),
        json.dumps(placement(device='" || true || "')),
        json.dumps(placement(visible="a b")),
        json.dumps(placement(device="-")),
    ],
)
def test_placement_that_cannot_be_read_is_refused(text: str) -> None:
    body = pod()
    body["metadata"]["annotations"]["cotenant.dev/placement"] = text
    with pytest.raises(ConfigError, match=r"pod default/a: cotenant.dev/placement: .*leave this annotation"):
        read_planned(body)


def test_claim_of_another_pod_or_placement_is_stale() -> None:
    planned = read_planned(pod())
    assert planned is not None
    body = claim_body(planned)
    assert not is_stale(planned, body) and not is_foreign(body)
    again, other = read_planned(pod(share=500)), read_planned({**pod(), "metadata": {**pod()["metadata"], "uid": "x"}})
    assert again is not None and is_stale(again, body)
    assert other is not None and is_stale(other, body)
    assert is_foreign(claim("a"))


@asynccontextmanager
async def controlling(client: ApiClient) -> AsyncIterator[None]:
    task = asyncio.create_task(ClaimController(client).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def claims_of(api: ApiDouble) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in api.objects("resourceclaims")}


def test_placement_reaches_the_container_by_its_claim(folder: Path) -> None:
    """From the annotation of a pod over claim, slice and scheduler to the environment of its container, with a pod
    that only accounts beside it: the scheduler gives no share away that the controller has given."""

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", {"metadata": {"name": NODE}})
        kubelet = Kubelet(folder)
        options = NodeOptions(node=NODE, kubelet=kubelet.folder, cdi=kubelet.cdi, container=ContainerOptions())
        async with controlling(client), node_plugin(client, options, lambda: (gpu(0),)):
            await kubelet.register()
            await eventually(lambda: api.objects("resourceslices"))
            api.put("pods", pod("counted", share=500))
            one = api.put("pods", pod("one", by="share-one"))
            other = api.put("pods", pod("other", by="share-other"))
            await eventually(
                lambda: (
                    claims_of(api).keys() >= {"share-one", "share-other"}
                    and claims_of(api).get("counted-cotenant", {}).get("status")
                )
            )
            for each in claims_of(api).values():
                check(each)
            allocated = allocate(api, "share-one", one)
            assert allocated is not None
            answers = await kubelet.prepare(allocated)
            environment = kubelet.container(answers["share-one"])[0]
            assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
            assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={8 << 10}M"
            assert allocate(api, "share-other", other) is None  # 50 % and 40 % are gone
            api.remove("pods", "counted", "default")
            api.remove("resourceclaims", "counted-cotenant", "default")  # as the garbage collector does
            allocated = allocate(api, "share-other", other)
            assert allocated is not None
            assert isinstance((await kubelet.prepare(allocated))["share-other"], list)

    play(scenario)


def test_nothing_is_written_twice() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        for number in range(3):
            api.put("pods", pod(f"p{number}", share=200))
            api.put("pods", pod(f"q{number}", by=f"q{number}", share=100))
        async with controlling(client), controlling(client):
            await eventually(
                lambda: (
                    len(claims_of(api)) == 6
                    and all(each.get("status") for name, each in claims_of(api).items() if name.startswith("p"))
                )
            )
        done = claims_of(api)
        writes = len(api.writes)
        controller = ClaimController(client)
        task = asyncio.create_task(controller.run())
        followed = "GET /apis/resource.k8s.io/v1/resourceclaims"
        await eventually(lambda: sum(each.partition("?")[0] == followed for each in api.requests) >= 6)
        assert await controller.reconcile()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (claims_of(api), len(api.writes)) == (done, writes)

    play(scenario)


def test_claim_is_made_anew_where_the_placement_is_decided_again() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        async with controlling(client):
            api.put("pods", pod("a"))
            await eventually(lambda: claims_of(api).get("a-cotenant", {}).get("status"))
            first = claims_of(api)["a-cotenant"]["metadata"]["uid"]
            api.put("pods", pod("a", share=700))

            def consumed() -> str:
                status = claims_of(api).get("a-cotenant", {}).get("status", {})
                results = status.get("allocation", {}).get("devices", {}).get("results", [])
                return str(results[0]["consumedCapacity"]["share"]) if results else ""

            await eventually(lambda: consumed() == "700")
            (anew,) = claims_of(api).values()
            assert (anew["metadata"]["name"], anew["metadata"]["uid"] == first) == ("a-cotenant", False)

    play(scenario)


def test_claim_of_somebody_else_is_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("resourceclaims", claim("theirs"))
        before = claims_of(api)["theirs"]
        broken = pod("broken")
        broken["metadata"]["annotations"]["cotenant.dev/placement"] = "?"
        async with controlling(client):
            api.put("pods", pod("a", by="theirs"))
            api.put("pods", broken)
            api.put("pods", pod("b"))
            await eventually(lambda: claims_of(api).get("b-cotenant", {}).get("status"))
            await eventually(lambda: "claim default/theirs is somebody else's; name another in the pod" in caplog.text)
            await eventually(lambda: "pod default/broken: cotenant.dev/placement" in caplog.text)
            assert claims_of(api)["theirs"] == before

    play(scenario)


def test_claim_of_somebody_else_is_asked_for_again_only_after_some_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("resourceclaims", claim("theirs"))
        api.put("pods", pod("a", by="theirs"))
        controller = ClaimController(client)
        task = asyncio.create_task(controller.run())
        await eventually(lambda: "claim default/theirs is somebody else's" in caplog.text)  # it has had its answers
        assert "GET /apis/resource.k8s.io/v1/namespaces/default/resourceclaims/theirs" in api.requests
        assert len(api.writes) == 1
        for _ in range(3):
            assert await controller.reconcile()
        assert len(api.writes) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        monkeypatch.setattr("cotenant.k8s.dra.claim_controller.AGAIN", 0.05)
        async with controlling(client):
            await eventually(lambda: len(api.writes) > 3)
            api.remove("resourceclaims", "theirs", "default")  # which no watch of ours tells
            await eventually(lambda: not is_foreign(claims_of(api).get("theirs", claim("theirs"))))

    play(scenario)


def test_claim_that_somebody_else_has_made_meanwhile_is_not_deleted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        delete = client.delete

        async def later(resource: Resource, key: ObjectKey, uid: str = "") -> None:
            monkeypatch.setattr(client, "delete", delete)
            api.remove("resourceclaims", key.name, key.namespace)
            api.put("resourceclaims", claim(key.name))
            await delete(resource, key, uid)

        async with controlling(client):
            api.put("pods", pod("a"))
            await eventually(lambda: claims_of(api).get("a-cotenant", {}).get("status"))
            monkeypatch.setattr(client, "delete", later)
            api.put("pods", pod("a", share=700))
            await eventually(lambda: "claim default/a-cotenant is somebody else's" in caplog.text)
            assert is_foreign(claims_of(api)["a-cotenant"])

    play(scenario)


def test_controller_whose_watch_of_pods_breaks_down_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(informer: Informer) -> None:
        raise KeyError("resourceVersion")

    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        monkeypatch.setattr(Informer, "_follow", broken)
        with pytest.raises((KeyError, ExceptionGroup)):
            await ClaimController(client).run()

    play(scenario)


def test_server_that_fails_gets_the_claims_later() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        async with controlling(client):
            with api.failing(500, "POST"):
                api.put("pods", pod("a"))
                await eventually(lambda: any(each.startswith("POST") for each in api.writes))
            with api.failing(409, "PUT"):
                await eventually(lambda: "a-cotenant" in claims_of(api))
                await eventually(lambda: any(each.startswith("PUT") for each in api.writes))
            await eventually(lambda: claims_of(api)["a-cotenant"].get("status"))

    play(scenario)
