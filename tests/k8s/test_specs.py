"""What is read of resources and pods, whoever wrote them."""

from __future__ import annotations

from typing import Any

import pytest

from cotenant.config import DeviceSettings, ModelSettings
from cotenant.k8s.specs import agents_of, read_device_pools, read_served_models, refused_agents


def served(name: str, created: str = "2026-01-01T00:00:00Z", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "models", "creationTimestamp": created}, "spec": spec}


def pod(node: str = "node-a", created: str = "1", **changes: Any) -> dict[str, Any]:
    status = {"podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]} | changes.pop("status", {})
    metadata = {"name": f"agent-{created}", "namespace": "models", "creationTimestamp": created}
    ports = [{"name": "metrics", "containerPort": 1}, {"name": "agent", "containerPort": 8003}]
    spec = {"nodeName": node, "containers": [{"ports": changes.pop("ports", ports)}]}
    return {"metadata": metadata | changes.pop("metadata", {}), "spec": spec, "status": status}


def test_empty_spec_serves_the_model_of_the_resources_name() -> None:
    (found,) = read_served_models([served("resnet50")])
    assert found.settings == ModelSettings(name="resnet50")


def test_spec_is_spelled_as_settings_are() -> None:
    spec: dict[str, Any] = {
        "model": "ResNet_50",
        "slo": "50ms",
        "attainment": "99.5%",
        "rate": 20,
        "maxBatch": 8,
        "maxQueueDelay": "5ms",
        "priority": 2,
    }
    (found,) = read_served_models([served("resnet50", **spec)])
    assert found.settings == ModelSettings(
        name="ResNet_50", slo=0.05, attainment=0.995, rate=20.0, max_batch=8, max_queue_delay=0.005, priority=2
    )


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"slo": "50"}, "spec.slo: '50' has no unit of time"),
        ({"slo": 50}, "spec: Expected `str | null`, got `int` - at `$.slo`"),
        ({"attainment": "150%"}, "spec.attainment: '150%' must be above 0"),
        ({"rate": -1}, "spec.rate: -1 requests/s; a rate is finite and at least 0"),
        ({"rate": "many"}, "spec: Expected `float | null`, got `str` - at `$.rate`"),
        ({"maxBatch": 0}, "spec.max_batch: 0 must be at least 1"),
        ({"priority": 0}, "spec.priority: 0 must be at least 1"),
        ({"model": ""}, "spec.model: is empty"),
    ],
)
def test_spec_that_cannot_be_used_is_an_error_of_that_resource_alone(spec: dict[str, Any], error: str) -> None:
    bad, good = read_served_models([served("a", **spec), served("b")])
    assert bad.error.startswith(error)
    assert (bad.reason, bad.settings) == ("InvalidSpec", None)
    assert good.settings is not None


def test_of_two_resources_of_a_model_the_older_one_is_used() -> None:
    bodies = [served("new", "2026-01-02T00:00:00Z", model="m"), served("old", "2026-01-01T00:00:00Z", model="m")]
    first, second = read_served_models(bodies)
    assert first.key.name == "old"
    assert first.settings is not None
    assert second.error == "model 'm' is that of ServedModel models/old already; delete one of the two"
    assert second.settings is None


def test_pools_limit_devices_of_a_kind() -> None:
    spec = {"kind": "cpu", "limit": 2, "pricePerHour": 0.5, "cuts": [50, 12.5], "sharing": ["cpu"]}
    body = {"metadata": {"name": "p", "namespace": "models"}, "spec": spec}
    (found,) = read_device_pools([body])
    assert found.settings == DeviceSettings(kind="cpu", count=2, price=0.5, cuts=(125, 500))
    assert found.sharing == ("cpu",)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({}, "spec: Object missing required field `kind`"),
        ({"kind": "cpu", "limit": -1}, "spec.count: -1 devices"),
        ({"kind": "cpu", "cuts": [0]}, "spec.cuts: a share of 0 %"),
        ({"kind": "cpu", "pricePerHour": -2}, "spec.price: -2 must be finite"),
    ],
)
def test_pool_that_cannot_be_used_says_why(spec: dict[str, Any], error: str) -> None:
    (found,) = read_device_pools([{"metadata": {"name": "p"}, "spec": spec}])
    assert found.error.startswith(error)


def test_agents_are_pods_that_are_ready() -> None:
    waiting = {"conditions": [{"type": "Ready", "status": "False"}]}
    pods = [
        pod("node-a"),
        pod("node-b", status=waiting),
        pod("node-c", status={"podIP": ""}),
        pod("node-d", metadata={"deletionTimestamp": "1"}),
        pod("node-e", ports=[{"containerPort": 8003}]),
        pod("node-f", status={"podIP": "fd00::7"}),
        pod(""),
    ]
    assert agents_of(pods) == {"node-a": "10.0.0.7:8003", "node-f": "[fd00::7]:8003"}


def test_pod_that_replaces_another_on_its_node_counts_once_it_is_ready() -> None:
    old, new = pod(created="1"), pod(created="2", status={"podIP": "10.0.0.8"})
    assert agents_of([new, old]) == {"node-a": "10.0.0.8:8003"}
    new["status"]["conditions"] = []
    assert agents_of([new, old]) == {"node-a": "10.0.0.7:8003"}


def test_agent_that_shares_as_its_pool_does_not_allow_is_not_used() -> None:
    body = {"metadata": {"name": "gpus", "namespace": "models"}, "spec": {"kind": "h100", "sharing": ["mps", "green"]}}
    pools = read_device_pools([body])
    labels = {"cotenant.dev/pool": "gpus", "cotenant.dev/sharing": "mig"}
    pods = [
        pod("node-a", metadata={"labels": labels}),
        pod("node-b", metadata={"labels": labels | {"cotenant.dev/sharing": "mps"}}),
        pod("node-c", metadata={"labels": labels | {"cotenant.dev/pool": "others"}}),
    ]
    assert sorted(agents_of(pods, pools)) == ["node-b", "node-c"]
    assert refused_agents(pods, pools) == {pools[0].key: {"node-a": "mig"}}
