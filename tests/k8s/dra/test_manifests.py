"""The manifests of Dynamic Resource Allocation: of the published schemas, and what the program needs."""

from __future__ import annotations

import asyncio
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cotenant.cli.commands import COMMANDS, load_command
from cotenant.k8s.client import ApiClient
from cotenant.k8s.dra.claim_controller import ClaimController
from cotenant.k8s.dra.devices import DRIVER
from cotenant.k8s.dra.node_plugin import NodeOptions, node_plugin
from cotenant.k8s.dra.placement_config import PlacementConfig, read_parameters
from cotenant.k8s.dra.planned_claims import CLASS
from cotenant.k8s.dra.resource_slice import slice_name
from tests.k8s.api_double import ApiDouble
from tests.k8s.dra.kubelet import Kubelet
from tests.k8s.dra.published import VERSIONS
from tests.k8s.dra.samples import NODE, gpu
from tests.k8s.dra.scheduler import allocate
from tests.k8s.dra.test_planned_claims import claims_of, pod
from tests.k8s.eventually import eventually
from tests.k8s.manifests import BASE, DEPLOY, documents
from tests.k8s.play import play
from tests.k8s.rbac import rule_for
from tests.k8s.test_manifests import kustomized, plain, rendered

FOLDER = DEPLOY / "kustomize" / "components" / "dra"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
OBJECTS = [each for path in FILES for each in documents(path)]


def found(kind: str, name: str) -> dict[str, Any]:
    (each,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return each


@pytest.mark.parametrize("body", OBJECTS, ids=lambda body: f"{body['kind']}-{body['metadata']['name']}")
@pytest.mark.parametrize("version", VERSIONS)
def test_manifest_is_of_the_published_schema(body: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(body, version, strict=True)


def test_component_names_each_file() -> None:
    (component,) = documents(FOLDER / "kustomization.yaml")
    assert sorted(component["resources"]) == [path.name for path in FILES]


def test_class_is_that_of_claims_and_selects_the_driver() -> None:
    (selector,) = found("DeviceClass", CLASS)["spec"]["selectors"]
    assert selector["cel"]["expression"] == f'device.driver == "{DRIVER}"'


@pytest.mark.parametrize(
    ("kind", "name"), [("DaemonSet", "cotenant-dra-driver"), ("Deployment", "cotenant-dra-claims")]
)
def test_containers_run_commands_that_there_are(kind: str, name: str) -> None:
    spec = found(kind, name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    group, command = container["args"]
    commands: Any = load_command(group, COMMANDS[group][1])
    known = {variable for each in commands.commands[command].params for variable in [each.envvar] if variable}
    own = {each["name"] for each in container["env"] if not each["name"].startswith("NVIDIA_")}
    assert own <= known
    assert spec["serviceAccountName"] == name and spec["automountServiceAccountToken"]
    assert found("ServiceAccount", name)["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_driver_has_the_folders_that_it_writes() -> None:
    spec = found("DaemonSet", "cotenant-dra-driver")["spec"]["template"]["spec"]
    paths = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in spec["containers"][0]["volumeMounts"]}
    options = NodeOptions(node="a")
    for folder in (options.directory, options.registry, options.cdi):
        # The kubelet and the runtime are told the paths that the container has.
        assert paths[mounts[str(folder)]] == str(folder)


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
    for name, requests in (("cotenant-dra-claims", by_claims), ("cotenant-dra-driver", by_driver)):
        role = found("ClusterRole", name)
        used = {request: rule_for(role, request) for request in requests}
        assert [request for request, rule in used.items() if rule is None] == []
        assert set(used.values()) == set(range(len(role["rules"])))


def test_policy_is_for_the_account_of_the_driver() -> None:
    spec = found("ValidatingAdmissionPolicy", "cotenant-dra-driver")["spec"]
    (condition,) = spec["matchConditions"]
    (subject,) = found("ClusterRoleBinding", "cotenant-dra-driver")["subjects"]
    account = f'"system:serviceaccount:{subject["namespace"]}:{subject["name"]}"'
    assert condition["expression"] == f"request.userInfo.username == {account}"
    binding = found("ValidatingAdmissionPolicyBinding", "cotenant-dra-driver")["spec"]
    assert (binding["policyName"], binding["validationActions"]) == ("cotenant-dra-driver", ["Deny"])


# With the programs that users have: marked `cluster`, which `make kube` brings along.


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A kustomization of a user's own: the base, with this component."""
    lines = [f"resources: [{os.path.relpath(BASE, tmp_path)}]", f"components: [{os.path.relpath(FOLDER, tmp_path)}]"]
    (tmp_path / "kustomization.yaml").write_text("namespace: cotenant\n" + "\n".join(lines))
    return tmp_path


@pytest.mark.cluster
def test_chart_renders_what_the_component_does(overlay: Path) -> None:
    def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        names = {each["metadata"]["name"] for each in OBJECTS}
        return {
            (each["kind"], each["metadata"]["name"]): plain(each)
            for each in objects
            if each["metadata"]["name"] in names
        }

    wanted, made = by_name(kustomized(overlay)), by_name(rendered("--set", "dra.enabled=true"))
    assert made.keys() == wanted.keys() and len(made) == len(OBJECTS)
    for key, each in wanted.items():
        assert made[key] == each, key


@pytest.mark.cluster
def test_chart_takes_options_and_leaves_the_driver_out_by_default() -> None:
    options = ("dra.enabled=true", "dra.options={--mps-pipe-directory=/run/mps}", "dra.runtimeClass=")
    every = rendered("--namespace", "models", *(word for each in options for word in ("--set", each)))
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in every}
    spec = by_name["DaemonSet", "cotenant-dra-driver"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["args"] == ["dra", "driver", "--mps-pipe-directory=/run/mps"]
    assert "runtimeClassName" not in spec
    policy = by_name["ValidatingAdmissionPolicy", "cotenant-dra-driver"]["spec"]
    assert ":models:cotenant-dra-driver" in policy["matchConditions"][0]["expression"]
    for each in every:
        if "dra" in each["metadata"]["name"]:
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)
    assert not [each for each in rendered() if "dra" in each["metadata"]["name"]]


def examples() -> list[dict[str, Any]]:
    """The objects of the page about all this."""
    text = (DEPLOY.parent / "docs" / "dra.md").read_text()
    blocks = re.findall(r"^( *)```yaml\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [each for indent, block in blocks for each in yaml.safe_load_all(textwrap.dedent(block))]


@pytest.mark.parametrize("body", examples(), ids=lambda body: f"{body['kind']}-{body['metadata']['name']}")
def test_example_of_the_page_is_of_the_published_schema_and_read(body: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(body, version, strict=True)
    for config in body["spec"].get("devices", {}).get("config", ()):
        assert config["opaque"]["driver"] == DRIVER
        assert read_parameters(config["opaque"]["parameters"], "page") != PlacementConfig()
    for entry in body["spec"].get("resourceClaims", ()):
        assert body["kind"] == "Pod" and set(entry) - {"name"} <= {"resourceClaimName", "resourceClaimTemplateName"}
