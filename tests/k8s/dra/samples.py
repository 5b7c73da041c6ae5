"""Devices of a node, and claims as a scheduler leaves them."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from cotenant.k8s.dra.devices import DRIVER, Instance, NodeDevice

NODE = "node-a"
GIB = 1 << 30


def gpu(number: int = 0, **changes: Any) -> NodeDevice:
    device = NodeDevice(
        uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000",
        kind="h100",
        index=number,
        product="NVIDIA H100 80GB HBM3",
        memory=80 * GIB,
        modes=("mps", "green"),
        minor=number,
    )
    return msgspec.structs.replace(device, **changes)


def mig_gpu(number: int = 0) -> NodeDevice:
    sizes = (("3g.40gb", 428, 40), ("2g.20gb", 285, 20), ("2g.20gb", 285, 20))
    instances = tuple(
        Instance(uuid=f"MIG-{number:08x}-{place}", profile=profile, share=share, memory=memory * GIB)
        for place, (profile, share, memory) in enumerate(sizes)
    )
    return gpu(number, kind="h100-mig", modes=("mig",), mig=True, instances=instances)


def named(*devices: NodeDevice) -> dict[str, NodeDevice]:
    return {each.name: each for each in devices}


def parameters(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": "cotenant.dev/v1alpha1", "kind": "PlacementConfig", **fields}


def config(source: str = "FromClaim", requests: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "source": source,
        "requests": requests or [],
        "opaque": {"driver": DRIVER, "parameters": parameters(**fields)},
    }


def result(
    device: NodeDevice, share: object = "200", memory: object = "16Gi", request: str = "share", **changes: Any
) -> dict[str, Any]:
    capacity = {name: each for name, each in (("share", share), ("memory", memory)) if each is not None}
    found = {"request": request, "driver": DRIVER, "pool": NODE, "device": device.name}
    return found | ({"consumedCapacity": capacity, "shareID": str(uuid.uuid4())} if capacity else {}) | changes


def claim(name: str, *results: dict[str, Any], configs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A claim that is allocated; one that is not, where it has no results."""
    request = {"name": "share", "exactly": {"deviceClassName": "cotenant.dev"}}
    body: dict[str, Any] = {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [request]}},
    }
    if results:
        body["status"] = {"allocation": {"devices": {"results": list(results), "config": configs or []}}}
    return body
