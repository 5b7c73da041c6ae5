"""Say what to write into the API: a pod's ConfigMap, the pod with its gate opened, a condition, the cuts of a GPU.

Each function returns what a write has to bring, or None where it would change nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from cotenant.k8s.pods.eligibility import required_terms
from cotenant.k8s.pods.request import GATE, PLACEMENT, SharePlacement, SharePod
from cotenant.k8s.resource import KubeObject
from cotenant.k8s.share_environment import share_environment, sharing_of

LABEL: Final = "cotenant.dev/shares"  # of ConfigMaps that are ours
LABELS: Final = f"{LABEL}=true"
HELD: Final = "cotenant.dev/held"  # annotation of these: pods → uid and placement
CUTS: Final = "cotenant.dev/cuts"  # annotation of nodes: UUID of a GPU → shares in ‰ to cut it into
CONDITION: Final = "cotenant.dev/Share"


class Held(msgspec.Struct, frozen=True):
    """What a ConfigMap says of a pod."""

    uid: str
    placement: SharePlacement


def environment_of(placement: SharePlacement) -> dict[str, str]:
    """Return the environment of a pod with a share."""
    device, visible, share = placement.device, placement.visible, placement.share
    sharing = sharing_of(device, visible, share)
    return share_environment(device=device, visible=visible, share=share, memory=placement.memory, sharing=sharing)


def read_held(config_map: KubeObject) -> dict[str, Held]:
    """Return what a ConfigMap says of pods, by name; nothing where somebody has edited that into what is no more read:
    then it is written anew."""
    text = (config_map["metadata"].get("annotations") or {}).get(HELD, "{}")
    try:
        return msgspec.json.decode(text, type=dict[str, Held])
    except msgspec.DecodeError:
        return {}


def config_map_for(pod: SharePod, placement: SharePlacement, present: KubeObject | None) -> dict[str, Any] | None:
    """Return the ConfigMap that hands a share to a pod. One of its own has a key for each variable, for `envFrom`, and
    goes with the pod. One that it shares with others of its owner has a file of variables for each, named after it."""
    held = {} if present is None else read_held(present)
    mine = Held(pod.uid, placement)
    wanted = _data(pod, placement)
    data = {} if present is None or not pod.shared else dict(present.get("data") or {})
    data.update(wanted)
    if present is not None and held.get(pod.key.name) == mine and (present.get("data") or {}) == data:
        return None
    held = ({**held} if pod.shared else {}) | {pod.key.name: mine}
    metadata: dict[str, Any] = {
        "name": pod.config_map,
        "namespace": pod.key.namespace,
        "labels": {LABEL: "true"},
        "annotations": {HELD: _written(held)},
    }
    if present is not None:
        metadata["resourceVersion"] = present["metadata"]["resourceVersion"]
        metadata["labels"] = (present["metadata"].get("labels") or {}) | metadata["labels"]
        metadata["annotations"] = (present["metadata"].get("annotations") or {}) | metadata["annotations"]
        if owners := present["metadata"].get("ownerReferences"):
            metadata["ownerReferences"] = owners
    if not pod.shared:
        metadata["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Pod", "name": pod.key.name, "uid": pod.uid, "controller": True}
        ]
    return {"metadata": metadata, "data": data}


def is_foreign(pod: SharePod, present: KubeObject | None) -> bool:
    """Return whether a ConfigMap of the name that a pod mounts is somebody else's: not ours, or that of a pod of
    another name. One that a former pod of the same name has left is taken over."""
    if present is None:
        return False
    if (present["metadata"].get("labels") or {}).get(LABEL) != "true":
        return True
    owners = present["metadata"].get("ownerReferences") or []
    return not pod.shared and any((owner.get("kind"), owner.get("name")) != ("Pod", pod.key.name) for owner in owners)


def without_gone(config_map: KubeObject, uids: Collection[str]) -> dict[str, Any] | None:
    """Return a shared ConfigMap without the pods that are gone. uids: of those that are there."""
    held = read_held(config_map)
    if config_map["metadata"].get("ownerReferences"):
        return None  # it goes with its pod
    gone = {name for name, each in held.items() if each.uid not in uids}
    if not gone:
        return None
    body = copy.deepcopy({"metadata": config_map["metadata"], "data": config_map.get("data") or {}})
    for name in gone:
        body["data"].pop(_file(name), None)
    kept = {name: each for name, each in held.items() if name not in gone}
    body["metadata"]["annotations"][HELD] = _written(kept)
    return body


def opened(pod: KubeObject, placement: SharePlacement) -> dict[str, Any]:
    """Return what to merge into a pod: its placement, its node as the only one, and our gate away."""
    spec = pod.get("spec") or {}
    fields = [{"key": "metadata.name", "operator": "In", "values": [placement.node]}]
    terms = required_terms(spec)
    narrowed = (
        [{"matchFields": fields}]
        if terms is None
        else [{**term, "matchFields": [*(term.get("matchFields") or []), *fields]} for term in terms]
    )
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": narrowed}}
    return {
        "metadata": {
            "resourceVersion": pod["metadata"]["resourceVersion"],
            "annotations": {PLACEMENT: msgspec.json.encode(placement).decode()},
        },
        "spec": {
            "affinity": {"nodeAffinity": required},
            "schedulingGates": [gate for gate in spec.get("schedulingGates") or [] if gate.get("name") != GATE],
        },
    }


def condition(pod: KubeObject, reason: str, message: str, now: str) -> dict[str, Any] | None:
    """Return what to merge into a pod's status, to say why it has no share, or that it has. now: as RFC 3339."""
    status = "True" if reason == "Placed" else "False"
    present: list[dict[str, Any]] = (pod.get("status") or {}).get("conditions") or []
    before = next((each for each in present if each.get("type") == CONDITION), None)
    if before is not None and (before.get("status"), before.get("reason"), before.get("message")) == (
        status,
        reason,
        message,
    ):
        return None
    since = before.get("lastTransitionTime") if before is not None and before.get("status") == status else now
    own = {"type": CONDITION, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}
    others = [each for each in present if each.get("type") != CONDITION]
    return {
        "metadata": {"resourceVersion": pod["metadata"]["resourceVersion"]},
        "status": {"conditions": [*others, own]},
    }


def cuts_for(node: KubeObject, device: str, shares: tuple[int, ...]) -> dict[str, Any] | None:
    """Return what to merge into a node, so that its exporter cuts a GPU."""
    present = read_cuts(node)
    if present.get(device) == shares:
        return None
    text = msgspec.json.encode({**present, device: shares}).decode()
    return {
        "metadata": {"resourceVersion": node["metadata"]["resourceVersion"], "annotations": {CUTS: text}},
    }


def read_cuts(node: KubeObject) -> dict[str, tuple[int, ...]]:
    """Return the shares in ‰ that GPUs of a node are to be cut into, by UUID."""
    text = (node["metadata"].get("annotations") or {}).get(CUTS, "{}")
    try:
        return msgspec.json.decode(text, type=dict[str, tuple[int, ...]])
    except msgspec.DecodeError:
        return {}


def _data(pod: SharePod, placement: SharePlacement) -> Mapping[str, str]:
    found = environment_of(placement)
    if not pod.shared:
        return found
    return {_file(pod.key.name): "".join(f"{name}={value}\n" for name, value in found.items())}


def _file(pod: str) -> str:
    return f"{pod}.env"


def _written(held: Mapping[str, Held]) -> str:
    return msgspec.json.encode(dict(sorted(held.items()))).decode()
