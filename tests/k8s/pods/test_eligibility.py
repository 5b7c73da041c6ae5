"""On which nodes a pod may run, as Kubernetes has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotenant.k8s.pods.eligibility import may_run
from tests.k8s.pods.cluster import node

NODE = msgspec.structs.replace(
    node("n1"), labels={"zone": "a", "gpus": "4"}, taints=({"key": "gpu", "value": "yes", "effect": "NoSchedule"},)
)
FREE = msgspec.structs.replace(NODE, taints=())


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"affinity": {"nodeAffinity": affinity}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("spec", "may"),
    [
        ({}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"nodeSelector": {"other": "x"}}, False),
        ({"affinity": None}, True),
        (required(expression("zone", "In", "a", "b")), True),
        (required(expression("zone", "NotIn", "a")), False),
        (required(expression("other", "NotIn", "a")), True),
        (required(expression("zone", "Exists")), True),
        (required(expression("zone", "DoesNotExist")), False),
        (required(expression("gpus", "Gt", "3")), True),
        (required(expression("gpus", "Lt", "3")), False),
        (required(expression("zone", "Gt", "3")), False),
        (required(expression("zone", "Gt")), False),
        (required(expression("zone", "Matches", "a")), False),
        (required(), False),
        (required({}), False),
        (required(expression("zone", "In", "b"), expression("gpus", "Exists")), True),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}), True),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}), False),
    ],
)
def test_may_run_by_selector_and_affinity(spec: dict[str, Any], may: bool) -> None:
    assert may_run(spec, FREE) is may


@pytest.mark.parametrize(
    ("toleration", "may"),
    [
        (None, False),
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_may_run_by_tolerations(toleration: dict[str, str] | None, may: bool) -> None:
    assert may_run({"tolerations": [] if toleration is None else [toleration]}, NODE) is may


def test_may_run_beside_a_taint_that_only_prefers() -> None:
    preferred = msgspec.structs.replace(NODE, taints=({"key": "x", "effect": "PreferNoSchedule"},))
    assert may_run({}, preferred)
