"""Manifests of the shares and of the endpoint picker keep to the published schemas, to the commands, and to the rights
that their programs use."""

from __future__ import annotations

import asyncio
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cotenant.cli.commands import COMMANDS, load_command
from cotenant.k8s.client import ApiClient
from cotenant.k8s.exporter.agent import DeviceAgent
from cotenant.k8s.exporter.readings import read_devices
from cotenant.k8s.scaling.instance_pods import InstancePods
from tests.driver.build import loaded
from tests.k8s.api_double import ApiDouble
from tests.k8s.eventually import eventually
from tests.k8s.manifests import DEPLOY, documents
from tests.k8s.play import play
from tests.k8s.pods.cluster import MIG, device, instances, node_object, pod_object
from tests.k8s.pods.test_controller import cluster, controlling, message, pods, whole
from tests.k8s.pods.test_extender import extending
from tests.k8s.rbac import rule_for
from tests.k8s.scaling.test_instances import order, template
from tests.k8s.test_manifests import RELEASES

FOLDERS = [DEPLOY / "kustomize" / name for name in ("shares", "endpoint-picker", "scaling")]


def objects() -> list[dict[str, Any]]:
    return [
        each
        for folder in FOLDERS
        for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        for each in documents(folder / name)
    ]


def workloads() -> list[dict[str, Any]]:
    return [each for each in objects() if each["kind"] in ("Deployment", "DaemonSet")]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in objects() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("each", objects(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_object_keeps_to_the_published_schema(each: dict[str, Any], release: str) -> None:
    if each["kind"].startswith("ValidatingAdmissionPolicy") and release == RELEASES[0]:
        pytest.skip("policies are of 1.30; the file says so")
    kubernetes_validate.validate(each, release, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="'metadate' was unexpected"):
        kubernetes_validate.validate({**each, "metadate": {}}, release, strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kustomization_names_each_file(folder: Any) -> None:
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {*named, "kustomization.yaml"} == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("each", workloads(), ids=lambda each: each["metadata"]["name"])
def test_arguments_are_those_of_the_command_and_ports_its_defaults(each: dict[str, Any]) -> None:
    (container,) = each["spec"]["template"]["spec"]["containers"]
    name, *arguments = container["args"]
    command = load_command(name, COMMANDS[name][1])
    context = command.make_context(name, list(arguments))  # fails for an option that there is not
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    options = {"grpc": "port", "metrics": "metrics_port" if "metrics_port" in context.params else "port"}
    assert ports == {port: context.params[options[port]] for port in ports}
    annotations = each["spec"]["template"]["metadata"].get("annotations", {})
    assert annotations.get("prometheus.io/port", str(ports.get("metrics", ""))) == str(ports.get("metrics", ""))


@pytest.mark.parametrize("each", workloads(), ids=lambda each: each["metadata"]["name"])
def test_pods_have_no_more_than_they_need(each: dict[str, Any]) -> None:
    spec = each["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and "privileged" not in str(each)
    assert spec["automountServiceAccountToken"] == ("serviceAccountName" in spec)
    for container in spec["containers"]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "limits" in container["resources"]


def test_policy_keeps_an_exporter_to_its_node_and_to_annotations() -> None:
    """An API server of 1.30 judges by it, and there is none here: it is held against the account and the write."""
    spec = one("ValidatingAdmissionPolicy", "cotenant-device-exporter")["spec"]
    (condition,) = spec["matchConditions"]
    (subject,) = one("ClusterRoleBinding", "cotenant-device-exporter")["subjects"]
    account = f'"system:serviceaccount:{subject["namespace"]}:{subject["name"]}"'
    assert condition["expression"] == f"request.userInfo.username == {account}"
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["operations"], rule["resources"]) == (["UPDATE"], ["nodes"])
    own, annotations_alone = (each["expression"] for each in spec["validations"])
    assert own == "variables.own == object.metadata.name"
    assert all(f"object.{field} == oldObject.{field}" in annotations_alone for field in ("spec", "metadata.?labels"))
    binding = one("ValidatingAdmissionPolicyBinding", "cotenant-device-exporter")["spec"]
    assert (binding["policyName"], binding["validationActions"]) == ("cotenant-device-exporter", ["Deny"])


def used(roles: list[dict[str, Any]], requests: list[str]) -> set[tuple[int, int]]:
    """The rules, by role and number, that allow these requests. Fails for one that none allows."""
    rules = set()
    for request in set(requests):
        allowing = [(n, rule) for n, role in enumerate(roles) if (rule := rule_for(role, request)) is not None]
        assert allowing, request
        rules.update(allowing)
    return rules


def test_controller_has_the_rights_that_it_uses_and_no_others() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        cluster(api)
        api.put("nodes", node_object("n3", device("GPU-3", MIG, mig=True, recut=True, instances=instances("7g.80gb"))))
        api.put("pods", pod_object("p", "tiny", "100ms", "20"))
        api.put("pods", pod_object("q", "unknown"))
        async with controlling(client, name="cotenant-shares"):
            await eventually(lambda: whole(api, "p") and message(pods(api)["q"]))
        api.put("configmaps", {**api.objects("configmaps")[0], "data": {}})
        changed = pods(api)["p"]
        del changed["metadata"]["annotations"]["cotenant.dev/placement"]
        changed["spec"]["schedulingGates"] = [{"name": "cotenant.dev/share"}]
        api.put("pods", changed)  # written anew over what is there
        async with controlling(client, "min", (MIG,), name="cotenant-shares"):
            await eventually(lambda: "cotenant.dev/cuts" in str(api.objects("nodes")) or whole(api, "p"))
            api.put("pods", pod_object("r", "tiny", "100ms", "5"))
            await eventually(lambda: "cotenant.dev/cuts" in str(api.objects("nodes")))
        async with extending(client) as (scheduler, _):
            pod = api.put("pods", pod_object("s", "tiny", "100ms", "5", gated=False))
            assert await scheduler.schedule(pod)
        requests = [request.replace("/leases/shares", "/leases/cotenant-shares") for request in api.requests]
        roles = [one("ClusterRole", "cotenant-share-controller"), one("Role", "cotenant-share-controller")]
        rules = {(n, rule) for n, role in enumerate(roles) for rule in range(len(role["rules"]))}
        assert used(roles, requests) == rules

    play(scenario, 120)


def test_instance_controller_has_the_rights_that_it_uses_and_no_others() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("podtemplates", template())
        kept = InstancePods(client)
        for _ in range(2):
            await kept.provision(order())
        await kept.list()
        await kept.release(order().name)
        role = one("Role", "cotenant-instance-controller")
        assert used([role], api.requests) == {(0, rule) for rule in range(len(role["rules"]))}
        assert [set(rule["verbs"]) for rule in role["rules"]] == [{"list"}, {"list", "get", "create", "delete"}]
        asked = {request.split()[0] for request in api.requests}
        assert asked == {"GET", "POST", "DELETE"}

    play(scenario)


def test_exporter_has_the_rights_that_it_uses_and_no_others() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        api.put("nodes", {"metadata": {"name": "n1"}})
        agent = DeviceAgent("n1", read_devices, client, interval=0.02)
        task = asyncio.create_task(agent.run())
        await eventually(lambda: "cotenant.dev/devices" in str(api.objects("nodes")))
        await eventually(lambda: any("/pods" in request for request in api.requests))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        role = one("ClusterRole", "cotenant-device-exporter")
        assert used([role], api.requests) == {(0, rule) for rule in range(len(role["rules"]))}

    with loaded("h200"):
        play(scenario)
