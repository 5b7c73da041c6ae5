"""Say what to write so that a node's ResourceSlice tells its devices. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from cotenant.core.units import WHOLE
from cotenant.errors import DeviceError
from cotenant.k8s.dra.devices import DRIVER, MEMORY, SHARE, NodeDevice
from cotenant.k8s.dra.quantities import is_same_capacity
from cotenant.k8s.resource import KubeObject, ObjectKey

MOST_DEVICES: Final = 128  # in one slice, which is all that a node has
LONGEST_NAME: Final = 253
LONGEST_VALUE: Final = 64  # characters of an attribute
MODES: Final = ("mps", "green", "mig")


class SliceChange(msgspec.Struct, frozen=True):
    """What to write. create, replace: the slice; at most one of them. delete: slices that are not ours any more."""

    create: KubeObject | None = None
    replace: KubeObject | None = None
    delete: tuple[ObjectKey, ...] = ()


def selector(node: str) -> str:
    """Return the field selector of the slices that this driver has for a node."""
    return f"spec.driver={DRIVER},spec.nodeName={node}"


def slice_name(node: str) -> str:
    """Return the name of a node's slice."""
    name = f"{node}-{DRIVER}"
    if len(name) <= LONGEST_NAME:
        return name
    digest = sha256(node.encode()).hexdigest()[:16]
    return f"{node[: LONGEST_NAME - len(DRIVER) - len(digest) - 2].rstrip('.-')}-{digest}-{DRIVER}"


def slice_change(
    node: str, node_uid: str, devices: Collection[NodeDevice], present: Mapping[ObjectKey, KubeObject], seen: int = 0
) -> SliceChange:
    """Return what makes the slices of a node tell its devices; nothing where they do. seen: the largest generation of
    the pool that was ever seen, also in slices that were deleted since.

    Raises DeviceError for more devices than a slice can have.
    """
    if len(devices) > MOST_DEVICES:
        raise DeviceError(f"node {node}: {len(devices)} devices are more than the {MOST_DEVICES} of a ResourceSlice")
    key = ObjectKey("", slice_name(node))
    others = tuple(sorted(other for other in present if other != key))
    generation = max([seen, *(_generation(each) for each in present.values())])
    published = [describe_device(each) for each in sorted(devices, key=lambda device: device.name)]
    before = present.get(key)
    spec = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": generation + 1, "resourceSliceCount": 1},
        "devices": published,
    }
    owners = [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": True}]
    if before is None:
        body = {"metadata": {"name": key.name, "ownerReferences": owners}, "spec": spec}
        return SliceChange(create=body, delete=others)
    if _is_current(before, node, published, node_uid):
        return SliceChange(delete=others)
    metadata = {**before["metadata"], "ownerReferences": owners}
    return SliceChange(replace={"metadata": metadata, "spec": spec}, delete=others)


def describe_device(device: NodeDevice) -> dict[str, Any]:
    """Return a device as a ResourceSlice has it.

    A claim that asks for no share takes the whole, and one that asks for no memory takes all of it: nothing is given
    twice because somebody left a figure out.
    """
    whole = str(WHOLE)
    policy = {"default": whole, "validRange": {"min": "1", "max": whole, "step": "1"}}
    attributes: dict[str, dict[str, Any]] = {
        "kind": {"string": device.kind[:LONGEST_VALUE]},
        "index": {"int": device.index},
        "uuid": {"string": device.uuid},
        "product": {"string": device.product[:LONGEST_VALUE]},
    }
    attributes |= {mode: {"bool": mode in device.modes} for mode in MODES}
    return {
        "name": device.name,
        "allowMultipleAllocations": True,
        "attributes": attributes,
        "capacity": {
            SHARE: {"value": whole, "requestPolicy": policy},
            MEMORY: {"value": str(device.memory)},
        },
    }


def pool_generation(slices: Collection[KubeObject]) -> int:
    """Return the largest generation of a pool in some slices; 0 where there is none."""
    return max((_generation(each) for each in slices), default=0)


def _generation(body: KubeObject) -> int:
    return int(body.get("spec", {}).get("pool", {}).get("generation", 0))


def keeps_shares(stored: KubeObject) -> bool:
    """Return whether an API server has kept what lets several claims have a device. It drops that where its feature
    DRAConsumableCapacity is off; then a claim has a device whole."""
    return all(each.get("allowMultipleAllocations") for each in stored.get("spec", {}).get("devices") or ())


def _is_current(before: KubeObject, node: str, published: list[dict[str, Any]], node_uid: str) -> bool:
    spec = before.get("spec", {})
    stored = spec.get("devices") or []
    return (
        len(stored) == len(published)
        and all(_is_same(one, other) for one, other in zip(stored, published, strict=True))
        and spec.get("pool", {}).get("name") == node
        and spec.get("pool", {}).get("resourceSliceCount") == 1
        and any(each.get("uid") == node_uid for each in before["metadata"].get("ownerReferences") or ())
    )


def _is_same(stored: dict[str, Any], published: dict[str, Any]) -> bool:
    others = [{key: each for key, each in device.items() if key != "capacity"} for device in (stored, published)]
    return others[0] == others[1] and is_same_capacity(stored.get("capacity"), published["capacity"])
