"""What is written for a share."""

from __future__ import annotations

from typing import Any

import msgspec

from cotenant.k8s.pods.eligibility import may_run
from cotenant.k8s.pods.objects import (
    CONDITION,
    HELD,
    LABEL,
    condition,
    config_map_for,
    cuts_for,
    environment_of,
    is_foreign,
    opened,
    read_cuts,
    read_held,
    without_gone,
)
from cotenant.k8s.pods.request import CONFIG_MAP, GATE, PLACEMENT, read_placement
from tests.k8s.pods.cluster import node, node_object, pod, pod_object
from tests.k8s.pods.test_request import PLACED

NOW = "2026-01-01T00:00:00Z"


def stored(body: dict[str, Any] | None) -> dict[str, Any]:
    """The ConfigMap as the API server has it."""
    assert body is not None
    body = msgspec.json.decode(msgspec.json.encode(body))
    body["metadata"]["resourceVersion"] = str(int(body["metadata"].get("resourceVersion", "0")) + 1)
    assert isinstance(body, dict)
    return body


def test_variables_of_a_part_of_a_gpu() -> None:
    assert environment_of(PLACED) == {
        "COTENANT_DEVICE_UUID": "GPU-0",
        "COTENANT_SHARE": "25",
        "CUDA_VISIBLE_DEVICES": "GPU-0",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1024M",
    }
    odd = msgspec.structs.replace(PLACED, share=125, memory=1)
    assert environment_of(odd)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
    assert environment_of(odd)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1M"


def test_variables_of_a_mig_instance_leave_its_limits_to_it() -> None:
    instance = msgspec.structs.replace(PLACED, visible="MIG-0", memory=0)
    assert environment_of(instance) == {
        "COTENANT_DEVICE_UUID": "GPU-0",
        "COTENANT_SHARE": "25",
        "CUDA_VISIBLE_DEVICES": "MIG-0",
    }


def test_config_map_of_a_pod_goes_with_it_and_is_written_once() -> None:
    body = config_map_for(pod("p"), PLACED, None)
    assert body is not None and body["data"] == environment_of(PLACED)
    assert body["metadata"]["labels"] == {LABEL: "true"}
    assert body["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "uid-p", "controller": True}
    ]
    present = stored(body)
    assert config_map_for(pod("p"), PLACED, present) is None
    assert read_held(present)["p"].placement == PLACED
    other = msgspec.structs.replace(PLACED, share=500)
    changed = config_map_for(pod("p"), other, present)
    assert changed is not None and changed["data"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert changed["metadata"]["resourceVersion"] == "1"


def test_config_map_edited_by_hand_is_written_anew() -> None:
    present = stored(config_map_for(pod("p"), PLACED, None))
    present["data"]["CUDA_VISIBLE_DEVICES"] = "GPU-9"
    assert config_map_for(pod("p"), PLACED, present) is not None
    present = stored(config_map_for(pod("p"), PLACED, None))
    present["metadata"]["annotations"][HELD] = "nonsense"
    assert read_held(present) == {} and config_map_for(pod("p"), PLACED, present) is not None


def test_config_map_of_a_deployment_has_a_file_for_each_pod() -> None:
    shared = {CONFIG_MAP: "web"}
    a, b = pod("web-a", annotations=shared), pod("web-b", annotations=shared)
    present = stored(config_map_for(a, PLACED, None))
    assert "ownerReferences" not in present["metadata"]
    second = msgspec.structs.replace(PLACED, share=500)
    present = stored(config_map_for(b, second, present))
    assert set(present["data"]) == {"web-a.env", "web-b.env"}
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50\n" in present["data"]["web-b.env"]
    assert {name: each.placement.share for name, each in read_held(present).items()} == {"web-a": 250, "web-b": 500}
    assert config_map_for(a, PLACED, present) is None
    assert without_gone(present, {"uid-web-a", "uid-web-b"}) is None
    left = without_gone(present, {"uid-web-b"})
    assert left is not None and set(left["data"]) == {"web-b.env"} and set(read_held(left)) == {"web-b"}
    assert set(read_held(present)) == {"web-a", "web-b"}  # what is known is not changed


def test_is_foreign_tells_what_is_not_ours() -> None:
    own = stored(config_map_for(pod("p"), PLACED, None))
    assert not is_foreign(pod("p"), None) and not is_foreign(pod("p"), own)
    assert is_foreign(pod("q", annotations={CONFIG_MAP: "q"}), {**own, "metadata": {**own["metadata"], "name": "q"}})
    assert is_foreign(pod("p"), {"metadata": {"name": "p", "resourceVersion": "1"}})
    again = msgspec.structs.replace(pod("p"), uid="uid-of-the-next")
    assert not is_foreign(again, own)
    taken = config_map_for(again, PLACED, own)
    assert taken is not None and taken["metadata"]["ownerReferences"][0]["uid"] == "uid-of-the-next"


def test_opened_leaves_other_gates_and_narrows_to_the_node() -> None:
    body = pod_object("p")
    body["metadata"]["resourceVersion"] = "7"
    body["spec"]["schedulingGates"] = [{"name": "other/gate"}, {"name": GATE}]
    change = opened(body, PLACED)
    assert change["metadata"]["resourceVersion"] == "7"
    assert read_placement(change["metadata"]["annotations"][PLACEMENT]) == PLACED
    assert change["spec"]["schedulingGates"] == [{"name": "other/gate"}]
    assert may_run(change["spec"], node("n1")) and not may_run(change["spec"], node("n2"))


def test_opened_narrows_each_term_that_is_there() -> None:
    terms = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["1"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n3"]}]},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    body = pod_object("p", affinity={"nodeAffinity": required})
    body["metadata"]["resourceVersion"] = "7"
    [first, second] = opened(body, PLACED)["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    ours = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    assert first == {**terms[0], "matchFields": [ours]}
    assert second["matchFields"] == [*terms[1]["matchFields"], ours]


def test_condition_is_written_once_and_leaves_others() -> None:
    body = pod_object("p")
    body["metadata"]["resourceVersion"] = "7"
    body["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    change = condition(body, "NoRoom", "short of room", NOW)
    assert change is not None
    ready, own = change["status"]["conditions"]
    assert ready == {"type": "PodScheduled", "status": "False"}
    assert own == {
        "type": CONDITION,
        "status": "False",
        "reason": "NoRoom",
        "message": "short of room",
        "lastTransitionTime": NOW,
    }
    body["status"] = change["status"]
    assert condition(body, "NoRoom", "short of room", "2026-02-02T00:00:00Z") is None
    other = condition(body, "NoRoom", "still short", "2026-02-02T00:00:00Z")
    assert other is not None and other["status"]["conditions"][1]["lastTransitionTime"] == NOW


def test_cuts_are_written_once_and_kept_beside_others() -> None:
    body = node_object("n1")
    body["metadata"]["resourceVersion"] = "7"
    change = cuts_for(body, "GPU-0", (142, 428))
    assert change is not None
    body["metadata"]["annotations"] |= change["metadata"]["annotations"]
    assert read_cuts(body) == {"GPU-0": (142, 428)}
    assert cuts_for(body, "GPU-0", (142, 428)) is None
    assert cuts_for(body, "GPU-1", (1000,)) is not None
    body["metadata"]["annotations"] |= {"cotenant.dev/cuts": "x"}
    assert read_cuts(body) == {}
