"""Say which ResourceClaim stands for a placement that the controller has decided for a pod. Pure.

A pod that names the claim among its own gets its share by it: the scheduler allocates the device that was planned, and
the kubelet has the driver prepare it. For any other pod that has a share, which reaches it by its ConfigMap, the claim
only accounts for it: it is allocated as it is created, and no kubelet asks for it.
"""

from __future__ import annotations

import re
import uuid
from typing import Any, Final

import msgspec

from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError, DeviceError
from cotenant.k8s.dra.devices import DRIVER, MEMORY, SHARE, device_name
from cotenant.k8s.dra.placement_config import PlacementConfig
from cotenant.k8s.pods.request import FINISHED, PLACEMENT, SharePlacement, read_placement
from cotenant.k8s.resource import KubeObject, ObjectKey, key_of
from cotenant.k8s.share_environment import sharing_of

LABEL: Final = "cotenant.dev/share"  # of claims that are ours
LABELS: Final = f"{LABEL}=true"
ENTRY: Final = "cotenant"  # name of the claim within a pod
CLASS: Final = "cotenant.dev"  # the DeviceClass
REQUEST: Final = "share"
LONGEST_NAME: Final = 253

_UUID = re.compile(r"[A-Za-z0-9-]{1,63}")  # as it becomes part of an expression


class PlannedClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The claim of a pod. accounts: it is only for the scheduler to count. pod: as it is now."""

    key: ObjectKey
    pod: KubeObject
    placement: SharePlacement
    accounts: bool


def read_planned(pod: KubeObject) -> PlannedClaim | None:
    """Return the claim that stands for a pod's share; None for a pod that has none, has ended, or names a claim of a
    template, whose specification is not the controller's. Raises ConfigError for a placement that cannot be read."""
    metadata = pod["metadata"]
    if (pod.get("status") or {}).get("phase") in FINISHED:
        return None
    key = key_of(pod)
    try:
        placement = read_placement((metadata.get("annotations") or {}).get(PLACEMENT))
    except ConfigError as error:
        raise ConfigError(f"pod {key}: {error}") from None
    if placement is None:
        return None
    try:
        for each in (placement.device, placement.visible):
            if not _UUID.fullmatch(each):
                raise ConfigError(f"{each!r} is not a UUID of a device")
        device_name(placement.device)
        if not 0 < placement.share <= WHOLE or placement.memory < 0:
            raise ConfigError(f"a share of {placement.share} ‰ with {placement.memory} bytes is none")
    except (ConfigError, DeviceError) as error:
        raise ConfigError(f"pod {key}: {PLACEMENT}: {error}; leave this annotation to the controller") from None
    named = next((each for each in (pod.get("spec") or {}).get("resourceClaims") or () if each["name"] == ENTRY), None)
    if named is None:
        name = f"{key.name[: LONGEST_NAME - len(ENTRY) - 1]}-{ENTRY}"
        return PlannedClaim(key=ObjectKey(key.namespace, name), pod=pod, placement=placement, accounts=True)
    if not named.get("resourceClaimName"):
        return None
    return PlannedClaim(
        key=ObjectKey(key.namespace, named["resourceClaimName"]), pod=pod, placement=placement, accounts=False
    )


def claim_body(planned: PlannedClaim) -> dict[str, Any]:
    """Return the claim to create. It goes with its pod."""
    pod, placement = planned.pod["metadata"], planned.placement
    expression = f'device.attributes["{DRIVER}"].uuid == "{placement.device}"'
    request = {
        "deviceClassName": CLASS,
        "allocationMode": "ExactCount",
        "count": 1,
        "selectors": [{"cel": {"expression": expression}}],
        "capacity": {"requests": _capacity(placement)},
    }
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod["name"], "uid": pod["uid"], "controller": True}
    return {
        "metadata": {
            "name": planned.key.name,
            "namespace": planned.key.namespace,
            "labels": {LABEL: "true"},
            "ownerReferences": [owner],
        },
        "spec": {
            "devices": {
                "requests": [{"name": REQUEST, "exactly": request}],
                "config": [{"requests": [REQUEST], "opaque": _opaque(placement)}],
            }
        },
    }


def claim_status(planned: PlannedClaim, claim: KubeObject) -> dict[str, Any] | None:
    """Return the status that allocates a claim which only accounts, and reserves it for its pod; None where it has
    it, or where the scheduler is to allocate the claim."""
    if not planned.accounts or (claim.get("status") or {}).get("allocation"):
        return None
    pod, placement = planned.pod["metadata"], planned.placement
    result = {
        "request": REQUEST,
        "driver": DRIVER,
        "pool": placement.node,
        "device": device_name(placement.device),
        "shareID": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{DRIVER}/{claim['metadata']['uid']}")),
        "consumedCapacity": _capacity(placement),
    }
    fields = [{"key": "metadata.name", "operator": "In", "values": [placement.node]}]
    return {
        "allocation": {
            "devices": {
                "results": [result],
                "config": [{"source": "FromClaim", "requests": [REQUEST], "opaque": _opaque(placement)}],
            },
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]},
        },
        "reservedFor": [{"resource": "pods", "name": pod["name"], "uid": pod["uid"]}],
    }


def is_stale(planned: PlannedClaim, claim: KubeObject) -> bool:
    """Return whether a claim of ours stands for something else than this placement of this pod: one of a former pod of
    its name, or of a placement that was decided again. It is created anew, since what it asks for cannot be changed."""
    owners = claim["metadata"].get("ownerReferences") or ()
    if not any(owner.get("uid") == planned.pod["metadata"]["uid"] for owner in owners):
        return True
    configs = ((claim.get("spec") or {}).get("devices") or {}).get("config") or [{}]
    parameters = (configs[0].get("opaque") or {}).get("parameters")
    return bool(parameters != _opaque(planned.placement)["parameters"])


def is_foreign(claim: KubeObject) -> bool:
    """Return whether a claim is somebody else's."""
    return (claim["metadata"].get("labels") or {}).get(LABEL) != "true"


def _capacity(placement: SharePlacement) -> dict[str, str]:
    return {SHARE: str(placement.share), MEMORY: str(placement.memory)}


def _opaque(placement: SharePlacement) -> dict[str, Any]:
    instance = placement.visible if placement.visible != placement.device else ""
    config = PlacementConfig(
        sharing=sharing_of(placement.device, placement.visible, placement.share),
        device=placement.device,
        instance=instance,
        share=placement.share,
        memory=placement.memory,
        slot=placement.slot,
        model=placement.model,
        slo=placement.slo,
        rate=placement.rate,
    )
    return {"driver": DRIVER, "parameters": config.parameters()}
