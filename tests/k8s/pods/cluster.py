"""A small cluster: two kinds of devices, three models, and pods that ask for them."""

from __future__ import annotations

from typing import Any

from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile, Profiles
from cotenant.k8s.pods.catalogue import Catalogue
from cotenant.k8s.pods.inventory import DEVICES, DeviceReport, InstanceReport, NodeDevices, read_node, write_devices
from cotenant.k8s.pods.request import GATE, MODEL, RATE, SLO, SharePod, read_pod
from cotenant.predictors import ConstantMargin, Interference

GIB = 1 << 30
CUTS = tuple(range(100, 1001, 50))
BIG = Kind(name="a100", memory=40 * GIB, price=3.0, cuts=CUTS)
SMALL = Kind(name="t4", memory=16 * GIB, price=1.0, cuts=CUTS)
MIG = Kind(
    name="a100-mig",
    memory=80 * GIB,
    price=3.0,
    geometry="mig-a100-80gb",
    cuts=mig.instance_shares("mig-a100-80gb"),
)
SECONDS = {"tiny": 0.002, "mid": 0.008, "large": 0.030}  # of one row on a whole a100
SPEED = {"a100": 1.0, "t4": 0.4, "a100-mig": 1.0}


def profiles() -> Profiles:
    """A batch of n rows takes 0.5 + n/2 times as long as one; time goes with the inverse of the share."""
    found = {}
    for model, seconds in SECONDS.items():
        for kind in (BIG, SMALL, MIG):
            points = [
                Point(
                    share=share,
                    batch=batch,
                    latency=seconds * (0.5 + batch / 2) * 1000 / share / SPEED[kind.name],
                    memory=2 * GIB,
                )
                for share in kind.cuts
                for batch in (1, 2, 4, 8, 16)
            ]
            found[model, kind.name] = Profile(model, kind.name, points)
    return found


def catalogue(*kinds: Kind, interference: Interference | None = None) -> Catalogue:
    return Catalogue(kinds or (BIG, SMALL), profiles(), interference or ConstantMargin(1.1))


def instances(*shapes: str, device: str = "GPU-0") -> tuple[InstanceReport, ...]:
    """MIG instances, such as 1g.10gb."""
    table = {each.name: each for each in mig.GEOMETRIES["mig-a100-80gb"]}
    return tuple(
        InstanceReport(uuid=f"MIG-{device}-{n}", profile=name, share=table[name].share, memory=table[name].memory)
        for n, name in enumerate(shapes)
    )


def device(uuid: str, kind: Kind = BIG, **options: Any) -> DeviceReport:
    return DeviceReport(uuid=uuid, kind=kind.name, memory=kind.memory, **options)


def node_object(name: str, *devices: DeviceReport, ready: bool = True, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "zone": name[-1]},
            "annotations": {DEVICES: write_devices(devices)},
        },
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


def node(name: str, *devices: DeviceReport, **options: Any) -> NodeDevices:
    found = read_node(node_object(name, *devices, **options))
    assert found is not None
    return found


def pod_object(
    name: str,
    model: str = "mid",
    slo: str = "100ms",
    qps: str = "50",
    *,
    gated: bool = True,
    created: str = "2026-01-01T00:00:00Z",
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod as a user writes it, but for what the API server fills in."""
    gates = {"schedulingGates": [{"name": GATE}]} if gated else {}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "creationTimestamp": created,
            "annotations": {MODEL: model, SLO: slo, RATE: qps, **(annotations or {})},
        },
        "spec": {"containers": [{"name": "main", "image": "registry.example/serve"}], **gates, **spec},
        "status": {"phase": "Pending"},
    }


def pod(name: str, *arguments: str, **options: Any) -> SharePod:
    body = pod_object(name, *arguments, **options)
    body["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "1"}
    found = read_pod(body)
    assert isinstance(found, SharePod), found
    return found
