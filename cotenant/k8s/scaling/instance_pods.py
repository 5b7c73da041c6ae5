"""Keep instances as pods: one pod each, of the instance's name, made from the PodTemplate of its model.

Nothing is kept but what the API has: whoever asks twice, or after a restart, finds what there is.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final

from cotenant.control.scaling.provisioning import Instance, InstanceState, Provision
from cotenant.errors import ConfigError, KubernetesError, StateConflictError
from cotenant.k8s.client import CONFLICT, NOT_FOUND, ApiClient
from cotenant.k8s.pods.objects import CONDITION
from cotenant.k8s.pods.request import CONFIG_MAP, FINISHED, GATE, KIND, MODEL, RATE, SLO
from cotenant.k8s.resource import POD_TEMPLATES, PODS, KubeObject, key_of

LABEL: Final = "cotenant.dev/instance"  # of pods that are instances
LABELS: Final = f"{LABEL}=true"

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

# Why a container waits, where it will go on waiting until somebody does something, though it is tried again.
_STUCK = frozenset(
    (
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    )
)


class InstancePods:
    """Make, list and delete the pods of instances in the client's namespace. Each raises KubernetesError."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def list(self) -> list[Instance]:
        """Return all instances, by name."""
        found = await self._client.list(PODS, labels=LABELS)
        return sorted(map(read_instance, found.objects), key=lambda each: each.name)

    async def provision(self, wanted: Provision) -> tuple[Instance, bool]:
        """Return an instance, and whether it was made now. Raises ConfigError for a model without a template, and for
        a name that something else has; StateConflictError while the last instance of that name leaves."""
        check_name(wanted.name)
        templates = (await self._client.list(POD_TEMPLATES)).objects
        body = pod_for(wanted, choose_template(templates, wanted.model, wanted.kind, self._client.namespace))
        try:
            return read_instance(await self._client.create(PODS, body)), True
        except KubernetesError as error:
            if error.status != CONFLICT:
                raise
        there = await self._own(wanted.name)
        if there is None:
            raise StateConflictError(f"instance {wanted.name!r} has just gone; try again")
        found = read_instance(there)
        if (found.model, found.kind) != (wanted.model, wanted.kind):
            raise ConfigError(f"instance {wanted.name!r} is one of {found.model!r} on {found.kind!r}; use another name")
        if found.state == "leaving":
            raise StateConflictError(f"instance {wanted.name!r} was released and is not gone yet; try again")
        return found, False

    async def release(self, name: str) -> bool:
        """Delete an instance; return whether there was one. Raises ConfigError for a pod that is none."""
        check_name(name)
        there = await self._own(name)
        if there is None:
            return False
        if read_instance(there).state != "leaving":
            await self._client.delete(PODS, key_of(there), uid=there["metadata"].get("uid", ""))
        return True

    async def _own(self, name: str) -> KubeObject | None:
        try:
            found = await self._client.get(PODS, name)
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        if (found["metadata"].get("labels") or {}).get(LABEL) != "true":
            raise ConfigError(f"pod {name!r} is not an instance: it has no label {LABELS}; use another name")
        return found


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot name an instance, which stands in URLs."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:100]!r} is not a name of an instance; use lower-case letters, digits and '-', up to 63"
        )


def choose_template(templates: list[KubeObject], model: str, kind: str, namespace: str) -> KubeObject:
    """Return the PodTemplate of a model: that for the kind of device, or else that for any. Raises ConfigError for
    none, or several."""

    def annotated(template: KubeObject, name: str) -> str:
        text: str = (template["metadata"].get("annotations") or {}).get(name, "")
        return text

    of_model = [each for each in templates if annotated(each, MODEL) == model]
    for wanted in (kind, ""):
        chosen = [each for each in of_model if annotated(each, KIND) == wanted]
        if len(chosen) > 1:
            names = " and ".join(sorted(each["metadata"]["name"] for each in chosen))
            raise ConfigError(f"model {model!r} has several PodTemplates: {names}; leave one, or tell them by {KIND}")
        if chosen:
            return chosen[0]
    raise ConfigError(
        f"model {model!r} has no PodTemplate for {kind!r}: create one in namespace {namespace} with the annotation"
        f" {MODEL}: {model}"
    )


def pod_for(wanted: Provision, template: KubeObject) -> dict[str, Any]:
    """Return the pod of an instance. Where the template's pods wait behind the gate for a share, it asks for one, and
    has its variables in each container, unless the template says where to mount them."""
    inner = copy.deepcopy(template.get("template") or {})
    metadata, spec = inner.get("metadata") or {}, inner.get("spec") or {}
    annotations = (metadata.get("annotations") or {}) | {
        MODEL: wanted.model,
        KIND: wanted.kind,
        SLO: f"{1000 * wanted.slo:.9g}ms",
        RATE: f"{wanted.rate:.12g}",
    }
    gated = any(gate.get("name") == GATE for gate in spec.get("schedulingGates") or [])
    if gated and CONFIG_MAP not in annotations:
        for container in spec.get("containers") or []:
            sources = container.get("envFrom") or []
            container["envFrom"] = [*sources, {"configMapRef": {"name": wanted.name}}]
    return {
        "metadata": {
            "name": wanted.name,
            "labels": (metadata.get("labels") or {}) | {LABEL: "true"},
            "annotations": annotations,
        },
        "spec": spec,
    }


def read_instance(pod: KubeObject) -> Instance:
    """Return the instance that a pod is, as far as its status tells."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations") or {}
    state, reason = _state(pod)
    return Instance(
        name=metadata["name"],
        model=annotations.get(MODEL, ""),
        kind=annotations.get(KIND, ""),
        state=state,
        reason=reason,
    )


def _state(pod: KubeObject) -> tuple[InstanceState, str]:
    status = pod.get("status") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or []}
    if "deletionTimestamp" in pod["metadata"]:
        return "leaving", "it was released"
    if status.get("phase") in FINISHED:
        return "ended", ": ".join(
            str(text) for text in (status.get("reason") or status["phase"], status.get("message")) if text
        )
    if conditions.get("Ready", {}).get("status") == "True":
        return "ready", ""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _STUCK:
                return "stuck", f"container {container.get('name')}: {waiting['reason']}: {waiting.get('message', '')}"
    for name, reasons in (("PodScheduled", ("Unschedulable",)), (CONDITION, None)):
        condition = conditions.get(name, {})
        refused = condition.get("status") == "False" and (reasons is None or condition.get("reason") in reasons)
        if refused:
            return "stuck", str(condition.get("message") or condition.get("reason"))
    return "pending", ""
