"""Manifests keep to the published schemas, to the settings that they carry, and to each other."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft7Validator

from cotenant import __version__
from cotenant.cli.commands import COMMANDS
from cotenant.config import read_settings
from cotenant.k8s.specs import AGENT_PORT, POOL_LABEL, SHARING_LABEL, read_device_pools
from tests.k8s.cluster import BINARIES, Cluster
from tests.k8s.manifests import BASE, CHART, DEFINITIONS, DEPLOY, documents
from tests.k8s.schema import admitted

RELEASES = ("1.29.0", "1.37.0")  # the oldest and the newest that manifests are held against
NVIDIA = DEPLOY / "kustomize" / "overlays" / "nvidia"
OURS = ("ServedModel", "DevicePool", "PodMonitor")  # of custom resources there are no published schemas


def base() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return [each for name in kustomization["resources"] for each in documents(BASE / name)]


def one(kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [each for each in base() if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    return found


def pod_of(kind: str) -> dict[str, Any]:
    template: dict[str, Any] = one(kind)["spec"]["template"]
    return template


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("each", base(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_object_keeps_to_the_published_schema(each: dict[str, Any], release: str) -> None:
    kubernetes_validate.validate(each, release, strict=True)


def test_schema_notices_a_field_that_does_not_exist() -> None:
    wrong = {**one("Deployment"), "spec": {**one("Deployment")["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_kustomization_names_each_file() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    carried = [each.partition("=")[2] for made in kustomization["configMapGenerator"] for each in made["files"]]
    named = {*kustomization["resources"], *carried, "kustomization.yaml"}
    assert named == {path.name for path in BASE.iterdir()}


def test_chart_has_the_same_resources() -> None:
    for name in DEFINITIONS:
        assert (CHART / "crds" / name).read_bytes() == (BASE / name).read_bytes()
    assert {path.name for path in (CHART / "crds").iterdir()} == set(DEFINITIONS)


def test_default_values_of_the_chart_keep_to_their_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    Draft7Validator(schema).validate(values)
    assert values.keys() <= schema["properties"].keys()


def test_front_end_is_as_its_settings_say() -> None:
    settings = read_settings(BASE / "front-end.toml")
    template = pod_of("Deployment")
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.model_control_mode == "kubernetes"
    assert settings.backend == "none"
    assert ports == {"http": settings.http_port, "grpc": settings.grpc_port, "metrics": settings.metrics_port}
    assert settings.grace < template["spec"]["terminationGracePeriodSeconds"]
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(settings.model_repository) in mounts
    assert str(settings.cluster.token).startswith(tuple(mounts))
    service = one("Service")
    assert settings.kubernetes.service == service["metadata"]["name"]
    assert "selector" not in service["spec"]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == {
        "http": settings.http_port,
        "grpc": settings.grpc_port,
    }
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(settings.metrics_port)


@pytest.mark.parametrize("folder", [BASE, NVIDIA], ids=["base", "nvidia"])
def test_agent_is_as_its_settings_say(folder: Path) -> None:
    settings = read_settings(folder / "agent.toml")
    template = pod_of("DaemonSet")
    (container,) = template["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {AGENT_PORT: settings.node.port}
    mounts = tuple(each["mountPath"] for each in container["volumeMounts"])
    assert str(settings.cluster.token).startswith(mounts)
    assert str(settings.node.cache).startswith(mounts)
    labels = template["metadata"]["labels"]
    if folder == NVIDIA:
        (patch,) = documents(folder / "agent.yaml")
        labels = labels | patch["spec"]["template"]["metadata"]["labels"]
        (pool,) = documents(folder / "devicepool.yaml")
        (read,) = read_device_pools([pool])
        assert labels[POOL_LABEL] == pool["metadata"]["name"]
        assert labels[SHARING_LABEL] in read.sharing
    assert labels[SHARING_LABEL] == settings.backend
    selector = dict(term.split("=") for term in read_settings(BASE / "front-end.toml").kubernetes.agents.split(","))
    assert selector.items() <= labels.items()


def test_role_names_the_lease_and_the_slice_of_the_settings() -> None:
    settings = read_settings(BASE / "front-end.toml").kubernetes
    named = {rule["resources"][0]: rule["resourceNames"] for rule in one("Role")["rules"] if "resourceNames" in rule}
    assert named == {"leases": [settings.lease], "endpointslices": [settings.service]}
    binding = one("RoleBinding")
    assert binding["subjects"][0]["name"] == pod_of("Deployment")["spec"]["serviceAccountName"]


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_pods_have_no_more_than_they_need(kind: str) -> None:
    spec = pod_of(kind)["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] == (kind == "Deployment")
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "limits" in container["resources"]
    for account in (each for each in base() if each["kind"] == "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_selectors_choose_the_pods_that_they_are_for() -> None:
    for kind in ("Deployment", "DaemonSet"):
        labels = pod_of(kind)["metadata"]["labels"]
        assert one(kind)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    front, agent = (pod_of(kind)["metadata"]["labels"] for kind in ("Deployment", "DaemonSet"))
    assert one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= front.items()
    policy = one("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= agent.items()
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= front.items()
    (monitor,) = documents(DEPLOY / "kustomize" / "components" / "prometheus-operator" / "podmonitor.yaml")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= front.items()


def test_pool_of_the_overlay_keeps_to_its_schema() -> None:
    (definition,) = documents(BASE / "devicepools.yaml")
    (pool,) = documents(NVIDIA / "devicepool.yaml")
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert admitted({"spec": pool["spec"]}, schema) == ({"spec": pool["spec"]}, [])


def test_image_has_extras_that_exist_and_the_version_of_the_manifests() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"EXTRAS=([\w,]+)", text):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    commands = {pod_of(kind)["spec"]["containers"][0]["args"][0] for kind in ("Deployment", "DaemonSet")}
    assert commands <= COMMANDS.keys()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    tag = yaml.safe_load((BASE / "kustomization.yaml").read_text())["images"][0]["newTag"]
    assert tag == chart["appVersion"] == __version__


def test_image_copies_all_that_the_package_is_built_of() -> None:
    root = DEPLOY.parent
    text = (DEPLOY / "Containerfile").read_text()
    copied: set[str] = set()
    for sources, folder in re.findall(r"^COPY (?!--)(.+) (\S+)$", text, re.MULTILINE):
        for source in sources.split():
            assert (root / source).exists(), source
            copied.add(f"{folder}{source}" if folder.endswith("/") else folder)
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    fragments = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    described = {each["path"] for each in fragments if "path" in each}
    needed = {"pyproject.toml", "LICENSE", *described, *wheel["packages"], *wheel["force-include"]}
    assert copied == {f"/source/{each}" for each in needed}


def test_resources_of_the_documentation_are_admitted() -> None:
    text = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block.split("```")[0]) for block in text.split("```yaml")[1:]]
    schemas = {}
    for name in DEFINITIONS:
        (definition,) = documents(BASE / name)
        schemas[definition["spec"]["names"]["kind"]] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert [each["kind"] for each in blocks] == ["ServedModel", "DevicePool"]
    for each in blocks:
        stored, errors = admitted({"spec": each["spec"]}, schemas[each["kind"]])
        assert errors == []
        assert each["spec"].items() <= stored["spec"].items()


# With the programs that users have: marked `cluster`, which `make kube` brings along.


def run(*command: str | Path) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def kustomized(folder: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(run(BINARIES / "kubectl-1.33", "kustomize", folder)) if each]


def rendered(*arguments: str) -> list[dict[str, Any]]:
    text = run(BINARIES / "helm", "template", "cotenant", CHART, "--namespace", "cotenant", *arguments)
    return [each for each in yaml.safe_load_all(text) if each]


def plain(each: dict[str, Any]) -> dict[str, Any]:
    """An object without what kustomize and Helm each do in their own way."""
    text = json.dumps(each)
    for made in ("cotenant-front-end", "cotenant-agent"):  # ConfigMaps of kustomize have a hash in their name
        for found in {word for word in text.split('"') if word.startswith(f"{made}-") and len(word) == len(made) + 11}:
            text = text.replace(f'"{found}"', f'"{made}"')
    each = json.loads(text)
    metadata = each["metadata"]
    metadata.pop("namespace", None)
    for subject in each.get("subjects", ()):
        subject.pop("namespace", None)
    for labels in (metadata.get("labels", {}),):
        for name in ("part-of", "instance", "version", "managed-by"):
            labels.pop(f"app.kubernetes.io/{name}", None)
        labels.pop("helm.sh/chart", None)
    if not metadata.get("labels"):
        metadata.pop("labels", None)
    if each["kind"] == "ConfigMap":
        metadata.pop("labels", None)
        each["data"] = {name: text.split() for name, text in each["data"].items()}
    template = each.get("spec", {}).get("template")
    if template is not None:
        annotations = template["metadata"].get("annotations", {})
        annotations.pop("checksum/settings", None)
        if not annotations:
            template["metadata"].pop("annotations", None)
        for container in template["spec"]["containers"]:
            container.pop("imagePullPolicy", None)
    return each


@pytest.mark.cluster
def test_chart_renders_what_kustomize_does() -> None:
    def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(each["kind"], plain(each)["metadata"]["name"]): plain(each) for each in objects}

    wanted = by_name(kustomized(BASE))
    del wanted["Namespace", "cotenant"]  # which Helm makes, where it is told to
    found = by_name(rendered("--include-crds"))
    assert found.keys() == wanted.keys()
    for key, each in wanted.items():
        assert found[key] == each, key


@pytest.mark.cluster
def test_chart_is_well_formed_and_keeps_to_the_published_schemas() -> None:
    run(BINARIES / "helm", "lint", "--strict", CHART)
    more = ("--set", "agent.backend=mps", "--set", "agent.pool=gpus", "--set", "podMonitor.enabled=true")
    settings = '--set-string=frontEnd.settings=planner = "geometry"\n[jobs]\nenabled = false'
    for each in [*rendered(), *rendered(*more, settings)]:
        if each["kind"] not in OURS:
            kubernetes_validate.validate(each, RELEASES[-1], strict=True)
    carried = {
        each["metadata"]["name"]: each["data"] for each in rendered(*more, settings) if each["kind"] == "ConfigMap"
    }
    assert carried["cotenant-front-end"]["cotenant.toml"].count("[jobs]") == 1


@pytest.mark.cluster
def test_settings_that_the_chart_renders_can_be_read(tmp_path: Path) -> None:
    more = '--set-string=frontEnd.settings=planner = "elastic"\n[jobs]\nenabled = false'
    for each in rendered(more, "--set", "agent.backend=mps"):
        if each["kind"] == "ConfigMap":
            path = tmp_path / f"{each['metadata']['name']}.toml"
            path.write_text(each["data"]["cotenant.toml"])
    front, agent = read_settings(tmp_path / "cotenant-front-end.toml"), read_settings(tmp_path / "cotenant-agent.toml")
    assert (front.planner, front.jobs.enabled, front.kubernetes.service) == ("elastic", False, "cotenant")
    assert (agent.backend, agent.node.port) == ("mps", 8010)


@pytest.mark.cluster
@pytest.mark.parametrize("values", ["frontEnd.replicas=0", "agent.backend=threads", "frontEnds.replicas=2"])
def test_values_that_are_wrong_are_refused(values: str) -> None:
    command = (BINARIES / "helm", "template", "cotenant", CHART, "--set", values)
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode != 0


@pytest.mark.cluster
@pytest.mark.parametrize("folder", [BASE, NVIDIA], ids=["base", "nvidia"])
def test_a_real_server_takes_what_kustomize_makes(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    objects = kustomized(folder)
    # policy/v1 is newer than that server.
    known = [each for each in objects if each["kind"] != "PodDisruptionBudget"]
    first = [each for each in known if each["kind"] in ("Namespace", "CustomResourceDefinition")]
    (tmp_path / "first.yaml").write_text(yaml.safe_dump_all(first))
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(known))
    cluster.kubectl("apply", "-f", tmp_path / "first.yaml")
    cluster.kubectl(
        "wait", "--for=condition=established", "crd/servedmodels.cotenant.dev", "crd/devicepools.cotenant.dev"
    )
    cluster.kubectl("apply", "-f", tmp_path / "all.yaml")
    unchanged = cluster.kubectl("apply", "-f", tmp_path / "all.yaml")
    assert "created" not in unchanged
