"""The manifests of Dynamic Resource Allocation: of the published schemas, and what the program needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from cotenant.cli.commands import COMMANDS, load_command
from cotenant.k8s.client import ApiClient
from cotenant.k8s.dra.claim_controller import ClaimController
from cotenant.k8s.dra.devices import DRIVER
from cotenant.k8s.dra.node_plugin import NodeOptions, node_plugin
from cotenant.k8s.dra.planned_claims import CLASS
from cotenant.k8s.dra.resource_slice import slice_name
from tests.k8s.api_double import ApiDouble
from tests.k8s.dra.kubelet import Kubelet
from tests.k8s.dra.published import VERSIONS
from tests.k8s.dra.samples import NODE, gpu
from tests.k8s.dra.scheduler import allocate
from tests.k8s.dra.test_planned_claims import claims_of, pod
from tests.k8s.eventually import eventually
from tests.k8s.manifests import DEPLOY, documents
from tests.k8s.play import play

FOLDER = DEPLOY / "kustomize" / "dra"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
OBJECTS = [each for path in FILES for each in documents(path)]


def found(kind: str, name: str) -> dict[str, Any]:
    (each,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return each


@pytest.mark.parametrize("body", OBJECTS, ids=lambda body: f"{body['kind']}-{body['metadata']['name']}")
@pytest.mark.parametrize("version", VERSIONS)
def test_manifest_is_of_the_published_schema(body: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(body, version, strict=True)


def test_kustomization_has_every_file() -> None:
    (kustomization,) = documents(FOLDER / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == [path.name for path in FILES]
    spaces = {each["metadata"]["namespace"] for each in OBJECTS if "namespace" in each["metadata"]}
    assert spaces == {kustomization["namespace"]}


def test_class_is_that_of_claims_and_selects_the_driver() -> None:
    (selector,) = found("DeviceClass", CLASS)["spec"]["selectors"]
    assert selector["cel"]["expression"] == f'device.driver == "{DRIVER}"'


@pytest.mark.parametrize(
    ("kind", "name"), [("DaemonSet", "cotenant-dra-driver"), ("Deployment", "cotenant-dra-claims")]
)
def test_containers_run_commands_that_there_are(kind: str, name: str) -> None:
    spec = found(kind, name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    program, group, command = container["command"]
    assert program == "cotenant"
    commands: Any = load_command(group, COMMANDS[group][1])
    known = {variable for each in commands.commands[command].params for variable in [each.envvar] if variable}
    own = {each["name"] for each in container["env"] if not each["name"].startswith("NVIDIA_")}
    assert own <= known
    assert spec["serviceAccountName"] == name


def test_driver_has_the_folders_that_it_writes() -> None:
    spec = found("DaemonSet", "cotenant-dra-driver")["spec"]["template"]["spec"]
    paths = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in spec["containers"][0]["volumeMounts"]}
    options = NodeOptions(node="a")
    for folder in (options.directory, options.registry, options.cdi):
        # The kubelet and the runtime are told the paths that the container has.
        assert paths[mounts[str(folder)]] == str(folder)


def verbs(method: str, path: str) -> tuple[str, str, set[str]]:
    """Return the group and resource of a request, and the verbs that it needs."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    if rest[0] == "namespaces":
        rest = rest[2:]
    resource = "/".join([rest[0], *rest[2:]])
    if method == "GET":
        return group, resource, {"get"} if len(rest) > 1 else {"list", "watch"}
    return group, resource, {{"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]}


def needed(requests: list[str]) -> dict[tuple[str, str], set[str]]:
    every: dict[tuple[str, str], set[str]] = {}
    for request in requests:
        group, resource, wanted = verbs(*request.split())
        every.setdefault((group, resource), set()).update(wanted)
    return every


def allowed(role: str) -> dict[tuple[str, str], set[str]]:
    return {
        (group, resource): set(rule["verbs"])
        for rule in found("ClusterRole", role)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def slices(api: ApiDouble) -> list[str]:
    return [each["metadata"]["name"] for each in api.objects("resourceslices")]


def test_roles_allow_what_is_done_and_no_more(folder: Path) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> tuple[list[str], list[str]]:
        api.put("nodes", {"metadata": {"name": NODE}})
        former = {"driver": DRIVER, "nodeName": NODE, "pool": {"name": NODE, "generation": 1}}
        api.put("resourceslices", {"metadata": {"name": "former"}, "spec": former})
        kubelet, devices = Kubelet(folder), [gpu(0)]
        api.put("pods", pod("counted", share=100))
        one = api.put("pods", pod("one", by="share-one"))
        controller = asyncio.create_task(ClaimController(client).run())
        await eventually(lambda: "share-one" in claims_of(api))
        await eventually(lambda: claims_of(api).get("counted-cotenant", {}).get("status"))
        api.put("pods", pod("counted", share=200))
        await eventually(lambda: any(each.startswith("DELETE") for each in api.writes))
        await eventually(lambda: claims_of(api).get("counted-cotenant", {}).get("status"))
        controller.cancel()
        await asyncio.gather(controller, return_exceptions=True)
        by_claims = list(api.requests)
        api.requests.clear()
        options = NodeOptions(node=NODE, kubelet=kubelet.folder, cdi=kubelet.cdi, period=0.02)
        async with node_plugin(client, options, lambda: tuple(devices)):
            await kubelet.register()
            await eventually(lambda: slices(api) == [slice_name(NODE)])
            devices.append(gpu(1))
            await eventually(lambda: len(api.objects("resourceslices")[0]["spec"]["devices"]) == 2)
            made = allocate(api, "share-one", one)
            assert made is not None
            await kubelet.prepare(made)
        return by_claims, api.requests

    by_claims, by_driver = play(scenario)
    assert needed(by_driver) == allowed("cotenant-dra-driver")
    may = allowed("cotenant-dra-claims")
    for resource, wanted in needed(by_claims).items():
        assert wanted <= may[resource], resource
    assert ("resource.k8s.io", "resourceclaims/binding") in may
