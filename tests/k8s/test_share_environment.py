"""One share has one environment, whichever way it reaches its pod."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotenant.core.units import WHOLE
from cotenant.k8s.dra.allocation import AllocatedClaim, AllocatedDevice
from cotenant.k8s.dra.container_edits import environment_of as environment_of_claim
from cotenant.k8s.dra.devices import device_name
from cotenant.k8s.dra.placement_config import read_parameters
from cotenant.k8s.dra.planned_claims import claim_body, read_planned
from cotenant.k8s.dra.preparation import prepare
from cotenant.k8s.pods.objects import environment_of
from cotenant.k8s.pods.request import PLACEMENT, SharePlacement
from cotenant.k8s.resource import ObjectKey
from tests.k8s.dra.samples import GIB, NODE, gpu, mig_gpu, named
from tests.k8s.pods.cluster import pod_object

GPU, MIG_GPU = gpu(0), mig_gpu(1)


@pytest.mark.parametrize(
    "share",
    [
        {"device": GPU.uuid, "visible": GPU.uuid, "share": 125, "memory": 3 * GIB + 1},
        {"device": GPU.uuid, "visible": GPU.uuid, "share": 300},
        {"device": GPU.uuid, "visible": GPU.uuid, "share": WHOLE, "memory": GIB},
        {"device": MIG_GPU.uuid, "visible": MIG_GPU.instances[1].uuid, "share": 285},
    ],
    ids=["part", "part of any memory", "whole", "MIG instance"],
)
def test_pod_has_one_environment_by_its_config_map_and_by_its_claim(share: dict[str, Any]) -> None:
    placement = SharePlacement(node=NODE, slot=0, model="mid", slo=0.1, rate=50.0, **share)
    pod = pod_object("p", annotations={PLACEMENT: msgspec.json.encode(placement).decode()})
    pod["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    planned = read_planned(pod)
    assert planned is not None
    [config] = claim_body(planned)["spec"]["devices"]["config"]
    asked = AllocatedDevice(
        request="share",
        pool=NODE,
        device=device_name(placement.device),
        share=placement.share,
        memory=placement.memory,
        config=read_parameters(config["opaque"]["parameters"], "claim"),
    )
    claim = AllocatedClaim(uid="c", key=ObjectKey("default", "c"), devices=(asked,))
    [prepared] = prepare(claim, NODE, named(GPU, MIG_GPU), ()).devices
    assert environment_of_claim(prepared) == environment_of(placement)
