"""What is remembered of pods and nodes decides and writes the same as the whole of them."""

from __future__ import annotations

from typing import Any

import msgspec

from cotenant.k8s.dra.planned_claims import read_planned
from cotenant.k8s.pods.eligibility import may_run
from cotenant.k8s.pods.inventory import read_node
from cotenant.k8s.pods.kept import kept_of_node, kept_of_pod
from cotenant.k8s.pods.objects import CUTS, condition, cuts_for, opened
from cotenant.k8s.pods.request import PLACEMENT, SharePod, read_pod
from cotenant.k8s.resource import KubeObject
from tests.k8s.pods.cluster import device, node_object, pod_object
from tests.k8s.pods.test_request import PLACED


def whole_pod(**annotations: str) -> KubeObject:
    """A pod as an API server sends it."""
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["1"]}]}]
    body: dict[str, Any] = pod_object(
        "p",
        annotations={"kubectl.kubernetes.io/last-applied-configuration": "x" * 5000, **annotations},
        nodeSelector={"kubernetes.io/hostname": "n1"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
        resourceClaims=[{"name": "cotenant", "resourceClaimName": "c"}],
        volumes=[{"name": f"v{n}"} for n in range(20)],
    )
    body["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [{"manager": "kubectl"}] * 10}
    body["status"] |= {"conditions": [{"type": "Other", "status": "True"}], "containerStatuses": [{}] * 5}
    return body


def test_pod_that_is_kept_says_the_same() -> None:
    text = msgspec.json.encode(PLACED).decode()
    for whole in (whole_pod(), whole_pod(**{PLACEMENT: text})):
        kept = kept_of_pod(whole)
        assert kept is not None and len(msgspec.json.encode(kept)) < len(msgspec.json.encode(whole)) / 4
        was, now = read_pod(whole), read_pod(kept)
        assert isinstance(was, SharePod) and isinstance(now, SharePod)
        assert msgspec.structs.replace(now, spec={}) == msgspec.structs.replace(was, spec={})
        for node in (read_node(node_object(name)) for name in ("n1", "n2")):
            assert node is not None and may_run(now.spec, node) == may_run(was.spec, node)
        assert opened(kept, PLACED) == opened(whole, PLACED)
        assert condition(kept, "NoRoom", "why", "now") == condition(whole, "NoRoom", "why", "now")
        planned, expected = read_planned(kept), read_planned(whole)
        assert planned == (None if expected is None else msgspec.structs.replace(expected, pod=kept))


def test_pod_without_a_share_is_not_kept() -> None:
    whole = whole_pod()
    whole["metadata"]["annotations"], whole["spec"]["schedulingGates"] = {"other": "x"}, [{"name": "other"}]
    assert kept_of_pod(whole) is None
    whole["metadata"]["annotations"] = {PLACEMENT: msgspec.json.encode(PLACED).decode()}
    assert kept_of_pod(whole) is not None


def test_node_that_is_kept_says_the_same() -> None:
    whole = node_object("n1", device("GPU-0"), taints=[{"key": "gpu", "effect": "NoSchedule"}], podCIDR="10.0.0.0/24")
    whole["metadata"] |= {"resourceVersion": "7", "uid": "n"}
    whole["metadata"]["annotations"] |= {CUTS: '{"GPU-1":[500,500]}', "other": "x" * 1000}
    whole["status"] |= {"images": [{"names": ["x" * 100]}] * 50, "addresses": []}
    whole["status"]["conditions"].append({"type": "MemoryPressure", "status": "False"})
    kept = kept_of_node(whole)
    assert kept is not None and len(msgspec.json.encode(kept)) < len(msgspec.json.encode(whole)) / 4
    assert read_node(kept) == read_node(whole)
    assert cuts_for(kept, "GPU-0", (1000,)) == cuts_for(whole, "GPU-0", (1000,))
    del whole["metadata"]["annotations"]
    assert kept_of_node(whole) is None
