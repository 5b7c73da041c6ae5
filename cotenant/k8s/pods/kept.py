"""Say which fields of pods and nodes are remembered.

As a whole each takes KiB, for containers, images and managed fields. Of pods that ask for no share nothing is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cotenant.k8s.pods.inventory import DEVICES
from cotenant.k8s.pods.objects import CUTS
from cotenant.k8s.pods.request import PLACEMENT, asks_for_share
from cotenant.k8s.resource import GROUP, KubeObject

_METADATA: Final = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
_POD: Final = ("nodeName", "nodeSelector", "affinity", "tolerations", "schedulingGates", "resourceClaims")


def kept_of_pod(pod: KubeObject) -> KubeObject | None:
    """Return what is kept of a pod; None for one that neither asks for a share nor has one. All conditions are, since
    a write brings the whole list."""
    annotations = _ours(pod)
    if not asks_for_share(pod) and PLACEMENT not in annotations:
        return None
    return {
        "metadata": _some(pod["metadata"], _METADATA) | {"annotations": annotations},
        "spec": _some(pod.get("spec") or {}, _POD),
        "status": _some(pod.get("status") or {}, ("phase", "conditions")),
    }


def kept_of_node(node: KubeObject) -> KubeObject | None:
    """Return what is kept of a node; None for one that reports no devices."""
    annotations = _ours(node)
    if DEVICES not in annotations:
        return None
    conditions = (node.get("status") or {}).get("conditions") or []
    return {
        "metadata": _some(node["metadata"], (*_METADATA, "labels"))
        | {"annotations": _some(annotations, (DEVICES, CUTS))},
        "spec": _some(node.get("spec") or {}, ("unschedulable", "taints")),
        "status": {"conditions": [each for each in conditions if each.get("type") == "Ready"]},
    }


def _ours(each: KubeObject) -> dict[str, str]:
    annotations = each["metadata"].get("annotations") or {}
    return {name: text for name, text in annotations.items() if name.startswith(f"{GROUP}/")}


def _some(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}
