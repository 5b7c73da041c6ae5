"""Read which devices a node has, as its exporter reports them in an annotation of the node."""

from __future__ import annotations

from typing import Final

import msgspec

from cotenant.k8s.resource import KubeObject

DEVICES: Final = "cotenant.dev/devices"


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG instance. share: ‰ of its GPU. memory: bytes. profile: such as ``3g.40gb``."""

    uuid: str
    profile: str
    share: int
    memory: int


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU of a node. kind: as profiles name it. memory: bytes. mig: MIG is on. recut: it may be cut anew while
    nobody uses it. instances: in the order of their places."""

    uuid: str
    kind: str
    memory: int
    mig: bool = False
    recut: bool = False
    instances: tuple[InstanceReport, ...] = ()


class NodeDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a node. open: it takes new pods. labels, taints: of the node. fault: why its report cannot be
    read; "" where it can."""

    name: str
    open: bool
    labels: dict[str, str] = {}
    taints: tuple[dict[str, str], ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    fault: str = ""


_decode = msgspec.json.Decoder(tuple[DeviceReport, ...]).decode


def read_node(node: KubeObject) -> NodeDevices | None:
    """Read a node; None for one that reports no devices."""
    metadata = node["metadata"]
    text = (metadata.get("annotations") or {}).get(DEVICES)
    if text is None:
        return None
    conditions = node.get("status", {}).get("conditions") or []
    ready = all(each.get("status") == "True" for each in conditions if each.get("type") == "Ready")
    open_ = ready and not node.get("spec", {}).get("unschedulable") and "deletionTimestamp" not in metadata
    labels = metadata.get("labels") or {}
    taints = tuple(node.get("spec", {}).get("taints") or ())
    try:
        return NodeDevices(name=metadata["name"], open=open_, labels=labels, taints=taints, devices=_decode(text))
    except msgspec.DecodeError as error:
        return NodeDevices(name=metadata["name"], open=False, fault=f"{DEVICES}: {error}")


def write_devices(devices: tuple[DeviceReport, ...]) -> str:
    """Return the text of the annotation."""
    return msgspec.json.encode(devices).decode()
