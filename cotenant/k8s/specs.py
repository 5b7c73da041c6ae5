"""Read ServedModels, DevicePools and the agents' pods as values. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from cotenant.config.devices import DeviceEntry, DeviceSettings, read_devices
from cotenant.config.models import ModelEntry, ModelSettings, read_model
from cotenant.config.toml import parse_name
from cotenant.errors import ConfigError
from cotenant.k8s.resource import KubeObject, ObjectKey, key_of

POOL_LABEL = "cotenant.dev/pool"  # of an agent's pod: the DevicePool that its devices are of
SHARING_LABEL = "cotenant.dev/sharing"  # of an agent's pod: how it shares devices
DUPLICATE, INVALID = "DuplicateModel", "InvalidSpec"  # reasons why a resource cannot be used
AGENT_PORT = "agent"  # name of the port in its pod


class _ModelSpec(msgspec.Struct, rename="camel"):
    model: str | None = None
    slo: str | None = None
    attainment: str = "99%"
    rate: float | None = None
    max_batch: int | None = None
    max_queue_delay: str | None = None
    priority: int = 1


class _PoolSpec(msgspec.Struct, rename="camel"):
    kind: str
    limit: int | None = None
    price_per_hour: float | None = None
    cuts: tuple[float, ...] | None = None
    sharing: tuple[str, ...] = ()


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """An object of ours as it was read. body: as the API server sent it. error: why it cannot be used; empty where it
    can."""

    key: ObjectKey
    generation: int
    created: str
    body: KubeObject
    error: str = ""
    reason: str = ""


class FoundModel(Found, frozen=True, kw_only=True):
    """A ServedModel. settings: None where it cannot be used."""

    name: str
    settings: ModelSettings | None = None


class FoundPool(Found, frozen=True, kw_only=True):
    """A DevicePool. sharing: the ways that are allowed; empty: all."""

    kind: str
    settings: DeviceSettings | None = None
    sharing: tuple[str, ...] = ()


def read_served_models(bodies: Iterable[KubeObject]) -> list[FoundModel]:
    """Read ServedModels, the oldest first. Of several of one model the first is used."""
    found: list[FoundModel] = []
    used: dict[str, FoundModel] = {}
    for body in _by_age(bodies):
        each = _served_model(body)
        if not each.error and (first := used.setdefault(each.name, each)) is not each:
            error = f"model {each.name!r} is that of ServedModel {first.key} already; delete one of the two"
            each = msgspec.structs.replace(each, error=error, reason=DUPLICATE, settings=None)
        found.append(each)
    return found


def read_device_pools(bodies: Iterable[KubeObject]) -> list[FoundPool]:
    """Read DevicePools, the oldest first. Of several of one kind the first is used."""
    found: list[FoundPool] = []
    used: dict[str, FoundPool] = {}
    for body in _by_age(bodies):
        each = _device_pool(body)
        if not each.error and (first := used.setdefault(each.kind, each)) is not each:
            error = f"devices of kind {each.kind!r} are those of DevicePool {first.key} already; delete one of the two"
            each = msgspec.structs.replace(each, error=error, reason="DuplicateKind", settings=None)
        found.append(each)
    return found


def agents_of(pods: Collection[KubeObject], pools: Iterable[FoundPool] = ()) -> dict[str, str]:
    """Return the address of each node's agent, where that is ready and its pool allows its way of sharing.

    While one pod of a node replaces another, the one that was created last counts.
    """
    refused = {node for nodes in refused_agents(pods, pools).values() for node in nodes}
    agents: dict[str, str] = {}
    for pod in _by_age(pods):
        node, address = pod["spec"].get("nodeName"), _address(pod)
        if node and address and node not in refused:
            agents[node] = address
    return agents


def refused_agents(pods: Iterable[KubeObject], pools: Iterable[FoundPool]) -> dict[ObjectKey, dict[str, str]]:
    """Return, by pool, the nodes whose agents share in a way that it does not allow, with that way."""
    allowed = {pool.key: pool.sharing for pool in pools if pool.sharing}
    refused: dict[ObjectKey, dict[str, str]] = {}
    for pod in pods:
        labels, node = pod["metadata"].get("labels") or {}, pod["spec"].get("nodeName")
        pool, way = ObjectKey(key_of(pod).namespace, labels.get(POOL_LABEL, "")), labels.get(SHARING_LABEL)
        if node and pool in allowed and way is not None and way not in allowed[pool]:
            refused.setdefault(pool, {})[node] = way
    return refused


def _address(pod: KubeObject) -> str:
    """Return the address of an agent; empty where it takes no calls."""
    status = pod.get("status", {})
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    ip = status.get("podIP", "")
    if not ready or not ip or "deletionTimestamp" in pod["metadata"]:
        return ""
    port = next(
        (
            port["containerPort"]
            for container in pod["spec"].get("containers") or ()
            for port in container.get("ports") or ()
            if port.get("name") == AGENT_PORT
        ),
        None,
    )
    if port is None:
        return ""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _by_age(bodies: Iterable[KubeObject]) -> list[KubeObject]:
    return sorted(bodies, key=lambda body: (body["metadata"].get("creationTimestamp") or "", key_of(body)))


def _about(body: KubeObject) -> dict[str, Any]:
    metadata = body["metadata"]
    return {
        "key": key_of(body),
        "generation": metadata.get("generation", 0),
        "created": metadata.get("creationTimestamp") or "",
        "body": body,
    }


def _served_model(body: KubeObject) -> FoundModel:
    about, name = _about(body), body["metadata"]["name"]
    try:
        spec = _read(body.get("spec") or {}, _ModelSpec)
        name = name if spec.model is None else parse_name(spec.model, "spec.model")
        entry = ModelEntry(
            name=name,
            slo=spec.slo,
            rate=spec.rate,
            attainment=spec.attainment,
            max_batch=spec.max_batch,
            max_queue_delay=spec.max_queue_delay,
            priority=spec.priority,
        )
        return FoundModel(**about, name=name, settings=read_model(entry, "spec"))
    except ConfigError as error:
        return FoundModel(**about, name=name, error=str(error), reason=INVALID)


def _device_pool(body: KubeObject) -> FoundPool:
    about, kind = _about(body), ""
    try:
        spec = _read(body.get("spec") or {}, _PoolSpec)
        kind = spec.kind
        entry = DeviceEntry(kind=kind, count=spec.limit, price=spec.price_per_hour, cuts=spec.cuts)
        return FoundPool(**about, kind=kind, settings=read_devices(entry, "spec"), sharing=spec.sharing)
    except ConfigError as error:
        return FoundPool(**about, kind=kind, error=str(error), reason=INVALID)


def _read(spec: Mapping[str, Any], type_: type[Any]) -> Any:
    try:
        return msgspec.convert(spec, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(f"spec: {error}") from None
