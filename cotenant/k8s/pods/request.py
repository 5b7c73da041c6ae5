"""Read from a pod which share of a device it asks for, and which it has."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from cotenant.core.units import parse_seconds
from cotenant.errors import ConfigError
from cotenant.k8s.resource import KubeObject, ObjectKey, key_of, version_of

GATE: Final = "cotenant.dev/share"  # the scheduling gate that holds a pod
MODEL: Final = "cotenant.dev/model"
KIND: Final = "cotenant.dev/kind"  # of device, where only that one will do
SLO: Final = "cotenant.dev/slo"
RATE: Final = "cotenant.dev/qps"
CONFIG_MAP: Final = "cotenant.dev/config-map"
PLACEMENT: Final = "cotenant.dev/placement"

FINISHED: Final = frozenset(("Succeeded", "Failed"))  # phases in which a pod holds no share


class SharePlacement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Say which share a pod has. device: UUID of the GPU. visible: UUID of what the pod sees: the GPU, or a MIG
    instance of it. slot: number of the partition on the device. share: ‰ of the device. memory: bytes that it may
    take; 0: any. model, slo, rate: what it was decided for, with seconds and requests/s."""

    node: str
    device: str
    visible: str
    slot: int
    share: int
    memory: int = 0
    model: str
    slo: float
    rate: float


class SharePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that asks for a share. version: of the object. config_map: the ConfigMap that it mounts; shared:
    with others of its owner. gated: it waits behind our gate. bound: the node that it runs on; "" for none yet.
    kind: of device that it wants; "": any. leaving: it is being deleted. placement: the share that it has. spec: the
    pod's, for what it asks of nodes."""

    key: ObjectKey
    uid: str
    version: str
    created: str
    model: str
    slo: float
    rate: float
    kind: str = ""
    config_map: str
    shared: bool = False
    gated: bool = False
    bound: str = ""
    leaving: bool = False
    placement: SharePlacement | None = None
    spec: dict[str, Any] = {}


class BrokenPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that asks for a share in a way that cannot be read, and why."""

    key: ObjectKey
    uid: str
    version: str
    reason: str


def asks_for_share(pod: KubeObject) -> bool:
    """Return whether a pod asks for a share, or waits behind the gate for those that do."""
    return MODEL in _annotations(pod) or _is_gated(pod)


def read_pod(pod: KubeObject) -> SharePod | BrokenPod | None:
    """Read a pod; None for one that asks for no share, or has ended and holds none."""
    if not asks_for_share(pod) or pod.get("status", {}).get("phase") in FINISHED:
        return None
    metadata, annotations = pod["metadata"], _annotations(pod)
    key, uid, version = key_of(pod), str(metadata.get("uid", "")), version_of(pod)
    try:
        named = annotations.get(CONFIG_MAP)
        return SharePod(
            key=key,
            uid=uid,
            version=version,
            created=str(metadata.get("creationTimestamp", "")),
            model=_required(annotations, MODEL),
            slo=_positive(parse_seconds(_required(annotations, SLO), SLO), SLO),
            rate=_rate(_required(annotations, RATE)),
            kind=annotations.get(KIND, ""),
            config_map=named or key.name,
            shared=named is not None and named != key.name,
            gated=_is_gated(pod),
            bound=str(pod.get("spec", {}).get("nodeName") or ""),
            leaving="deletionTimestamp" in metadata,
            placement=read_placement(annotations.get(PLACEMENT)),
            spec=pod.get("spec") or {},
        )
    except ConfigError as error:
        return BrokenPod(key=key, uid=uid, version=version, reason=str(error))


def read_placement(text: str | None) -> SharePlacement | None:
    """Read what was written of a placement. Raises ConfigError for what was not written by us."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=SharePlacement)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{PLACEMENT}: {error}; leave this annotation to the controller") from None


def _annotations(pod: KubeObject) -> dict[str, str]:
    return pod["metadata"].get("annotations") or {}


def _is_gated(pod: KubeObject) -> bool:
    gates: list[dict[str, Any]] = pod.get("spec", {}).get("schedulingGates") or []
    return any(gate.get("name") == GATE for gate in gates)


def _required(annotations: dict[str, str], name: str) -> str:
    if not annotations.get(name):
        raise ConfigError(f"{name}: missing; a pod that asks for a share says {MODEL}, {SLO} and {RATE}")
    return annotations[name]


def _rate(text: str) -> float:
    try:
        return _positive(float(text), RATE)
    except ValueError:
        raise ConfigError(f"{RATE}: {text!r} is not a number of requests per second") from None


def _positive(value: float, place: str) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{place}: {value:g} must be above 0 and finite")
    return value
