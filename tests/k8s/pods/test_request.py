"""What pods and nodes say of shares."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotenant.k8s.pods.inventory import DEVICES, read_node
from cotenant.k8s.pods.request import (
    CONFIG_MAP,
    MODEL,
    PLACEMENT,
    RATE,
    SLO,
    BrokenPod,
    SharePlacement,
    SharePod,
    read_pod,
)
from tests.k8s.pods.cluster import device, node_object, pod, pod_object

PLACED = SharePlacement(
    node="n1", device="GPU-0", visible="GPU-0", slot=0, share=250, memory=1 << 30, model="mid", slo=0.1, rate=50.0
)


def read(body: dict[str, Any]) -> Any:
    body["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    return read_pod(body)


def test_read_pod_has_what_it_asks_for() -> None:
    found = pod("p")
    assert (found.model, found.slo, found.rate, found.gated, found.bound) == ("mid", 0.1, 50.0, True, "")
    assert (found.config_map, found.shared, found.placement) == ("p", False, None)


def test_read_pod_of_a_deployment_shares_a_config_map() -> None:
    found = pod("web-abc", annotations={CONFIG_MAP: "web-shares"})
    assert (found.config_map, found.shared) == ("web-shares", True)
    assert not pod("p", annotations={CONFIG_MAP: "p"}).shared


def test_read_pod_that_asks_for_nothing_is_none() -> None:
    body = pod_object("p", gated=False)
    body["metadata"]["annotations"] = {}
    assert read(body) is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_read_pod_that_has_ended_holds_nothing(phase: str) -> None:
    body = pod_object("p")
    body["status"]["phase"] = phase
    assert read(body) is None


def test_read_pod_has_its_placement() -> None:
    text = msgspec.json.encode(PLACED).decode()
    found = read(pod_object("p", gated=False, annotations={PLACEMENT: text}, nodeName="n1"))
    assert isinstance(found, SharePod)
    assert (found.placement, found.bound, found.gated) == (PLACED, "n1", False)


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        ({SLO: "50"}, f'{SLO}: \'50\' has no unit of time; write it as "25ms" or "1.5s"'),
        ({SLO: "0s"}, f"{SLO}: 0 must be above 0 and finite"),
        ({RATE: "many"}, f"{RATE}: 'many' is not a number of requests per second"),
        ({RATE: "-1"}, f"{RATE}: -1 must be above 0 and finite"),
        ({RATE: "nan"}, f"{RATE}: nan must be above 0 and finite"),
        ({RATE: ""}, f"{RATE}: missing; a pod that asks for a share says {MODEL}, {SLO} and {RATE}"),
    ],
)
def test_read_pod_that_asks_wrongly_says_why(annotations: dict[str, str], reason: str) -> None:
    found = read(pod_object("p", annotations=annotations))
    assert isinstance(found, BrokenPod) and found.reason == reason


def test_read_pod_behind_the_gate_without_annotations_is_broken() -> None:
    body = pod_object("p")
    body["metadata"]["annotations"] = None
    found = read(body)
    assert isinstance(found, BrokenPod) and found.reason.startswith(f"{MODEL}: missing")


def test_read_pod_with_an_edited_placement_is_broken() -> None:
    found = read(pod_object("p", annotations={PLACEMENT: "{}"}))
    assert isinstance(found, BrokenPod) and found.reason.endswith("leave this annotation to the controller")


def test_read_node_without_devices_is_none() -> None:
    body = node_object("n")
    body["metadata"]["annotations"] = {}
    assert read_node(body) is None


def test_read_node_that_is_cordoned_or_not_ready_takes_no_pods() -> None:
    for body in (node_object("n", unschedulable=True), node_object("n", ready=False)):
        found = read_node(body)
        assert found is not None and not found.open
    found = read_node(node_object("n", device("GPU-0")))
    assert found is not None and found.open and found.devices == (device("GPU-0"),)


def test_read_node_with_a_broken_report_says_why() -> None:
    body = node_object("n")
    body["metadata"]["annotations"][DEVICES] = '[{"uuid": 1}]'
    found = read_node(body)
    assert found is not None and not found.open
    assert found.fault.startswith(f"{DEVICES}: Expected `str`, got `int` - at `$[0].uuid`")
