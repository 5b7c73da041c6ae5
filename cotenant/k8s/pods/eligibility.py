"""Tell whether a pod may run on a node at all: by its node selector, its required node affinity and its tolerations.

What else there is to say, such as room for its requests, the default scheduler says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cotenant.k8s.pods.inventory import NodeDevices

_EFFECTS = frozenset(("NoSchedule", "NoExecute"))


def may_run(spec: Mapping[str, Any], node: NodeDevices) -> bool:
    """Return whether a pod of this spec may run on a node."""
    selector = spec.get("nodeSelector") or {}
    if any(node.labels.get(name) != value for name, value in selector.items()):
        return False
    terms = required_terms(spec)
    if terms is not None and not any(_matches(term, node) for term in terms):
        return False
    tolerations = spec.get("tolerations") or []
    return all(
        any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in node.taints
        if taint.get("effect") in _EFFECTS
    )


def required_terms(spec: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the terms of the required node affinity, of which one has to match; None where none is required."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return None if required is None else required.get("nodeSelectorTerms") or []


def _matches(term: Mapping[str, Any], node: NodeDevices) -> bool:
    expressions = term.get("matchExpressions") or []
    fields = term.get("matchFields") or []
    if not expressions and not fields:
        return False  # as Kubernetes has it
    return all(_holds(each, node.labels) for each in expressions) and all(
        _holds(each, {"metadata.name": node.name}) for each in fields
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                ours, theirs = int(value or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return ours > theirs if operator == "Gt" else ours < theirs
    return False


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key")
    if toleration.get("operator", "Equal") == "Exists":
        return not key or key == taint.get("key")
    return key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")
