"""Describe, in the status of a resource, what has become of it. Pure: what is known in, a status out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from cotenant.control.controller_status import ModelState
from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import show_count
from cotenant.k8s.resource import KubeObject
from cotenant.k8s.specs import DUPLICATE, Found, FoundModel, FoundPool
from cotenant.live.oip import IndexEntry
from cotenant.live.status import Status

# What moves with every request is written seldom, unless something else is written, too.
MOVING = ("attainment", "offeredRate")
MOVING_SECONDS = 30.0
LONGEST_MESSAGE = 1024


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller sees of the server.

    fleet: of all devices, as their backends tell. available: the models in the repository; None where that is not
    known. changing: whether a new state is being applied.
    """

    status: Status
    plan: Plan
    fleet: tuple[Kind, ...]
    available: Collection[str] | None
    repository: str
    changing: bool = False


def model_error(model: FoundModel, available: Collection[str] | None, repository: str) -> tuple[str, str]:
    """Return why a model cannot even be asked for, as reason and message; both empty where it can."""
    if model.error:
        return model.reason, model.error
    if available is not None and model.name not in available:
        return "ModelNotFound", f"no model {model.name!r} in {repository!r}; a model is one of its folders"
    return "", ""


def model_status(model: FoundModel, view: ServerView, rejection: str, now: str) -> KubeObject:
    """Return the status of a ServedModel. rejection: why the server has rejected it last. now: in RFC 3339."""
    name, plan, server = model.name, view.plan, view.status
    mine = model.reason != DUPLICATE  # else what is served of that name is another's
    index = {entry.name: entry for entry in server.models}.get(name) if mine else None
    in_force = mine and (name in plan.rates() or name in server.targets)
    status: KubeObject = {"observedGeneration": model.generation}
    conditions = [_accepted(model, view, rejection)]
    if in_force:
        state = None if server.adaptation is None else server.adaptation.models.get(name)
        status |= _figures(name, view, state)
        conditions += [
            _planned(name, view),
            _met(model, state),
        ]
    conditions.append(_ready(conditions, index, view))
    if mine:
        status["model"] = name
    status["conditions"] = _dated(conditions, model, now)
    return status


def _accepted(model: FoundModel, view: ServerView, rejection: str) -> KubeObject:
    reason, message = model_error(model, view.available, view.repository)
    if not reason and rejection:
        reason, message = "Rejected", rejection
    if reason:
        return _condition("Accepted", "False", reason, message)
    return _condition("Accepted", "True", "Accepted", "the server takes it as it is")


def _planned(name: str, view: ServerView) -> KubeObject:
    plan, adaptation = view.plan, view.status.adaptation
    placements = [device.id for device, _, placement in plan.placements() if placement.model == name]
    if unserved := plan.unserved.get(name):
        short = "" if adaptation is None or not adaptation.short else f"; {adaptation.short}"
        planned = plan.rate(name)
        return _condition(
            "Planned",
            "False",
            "Unschedulable",
            f"{unserved:.4g} of {unserved + planned:.4g} requests/s fit on no device within the target{short}; add "
            "devices, or raise its target or its priority",
        )
    if not placements and name not in view.status.targets:
        return _condition("Planned", "Unknown", "Pending", "the plan in force is older than the resource")
    if not placements and name not in plan.split and not view.status.planned.get(name):
        message = "no share of the devices is free that serves it within its target"
        return _condition("Planned", "False", "Unschedulable", f"{message}; add devices, or raise its target")
    where = f"{show_count(len(placements), 'placement')} on {show_count(len(set(placements)), 'device')}"
    return _condition("Planned", "True", "Placed", where if placements else "by the models of its steps")


def _met(model: FoundModel, state: ModelState | None) -> KubeObject:
    attained = None if state is None else state.attainment
    if attained is None:
        return _condition("SLOMet", "Unknown", "NoRequests", "no recent request")
    objective = 0.0 if model.settings is None else model.settings.attainment
    if attained >= objective:
        return _condition("SLOMet", "True", "SLOMet", f"recently at least {objective * 100:g}% met the target")
    return _condition("SLOMet", "False", "SLOViolated", f"recently less than {objective * 100:g}% met the target")


def _ready(conditions: Collection[KubeObject], index: IndexEntry | None, view: ServerView) -> KubeObject:
    """Say whether requests are answered now. A model whose change was rejected is served as before."""
    if index is not None and index.state == "READY":
        return _condition("Ready", "True", "Serving", "requests are answered")
    for condition in conditions:
        if condition["type"] in ("Accepted", "Planned") and condition["status"] == "False":
            return _condition("Ready", "False", condition["reason"], condition["message"])
    if index is not None and index.state in ("LOADING", "UNLOADING"):
        return _condition("Ready", "False", index.state.capitalize(), index.reason or f"{index.state.lower()} it")
    if not view.fleet:
        return _condition("Ready", "False", "NoDevices", "no agent of any node has answered yet")
    if view.changing or index is None or not view.status.ready:
        return _condition("Ready", "False", "Pending", view.status.startup or "a plan with it is being made")
    return _condition("Ready", "False", "Unavailable", index.reason or "no worker is ready")


def _figures(name: str, view: ServerView, state: ModelState | None) -> KubeObject:
    server, plan = view.status, view.plan
    figures: KubeObject = {"revision": server.rollout.revision}
    if name in server.targets:
        figures["slo"] = f"{server.targets[name] * 1000:g}ms"
    counts = server.statistics.get(name)
    if counts is not None and counts.attainment is not None:
        figures["attainment"] = f"{counts.attainment * 100:.2f}%"
    figures["plannedRate"] = round(plan.rate(name) or server.planned.get(name, 0.0), 3)
    if state is not None:
        figures["offeredRate"] = round(state.offered, 1)
    figures["placements"] = [
        {
            "device": str(device.id),
            "share": f"{partition.share / 10:g}%",
            "batch": placement.batch,
            "rate": round(placement.rate, 3),
        }
        for device, partition, placement in plan.placements()
        if placement.model == name
    ]
    return figures


def pool_status(
    pool: FoundPool, view: ServerView, rejection: str, now: str, refused: Mapping[str, str] = MappingProxyType({})
) -> KubeObject:
    """Return the status of a DevicePool. rejection: why the server has rejected it last. now: in RFC 3339. refused:
    nodes whose agents share in a way that the pool does not allow, with that way."""
    kinds = [kind for kind in view.fleet if _plain(kind.name) == pool.kind]
    devices = sum(kind.count or 0 for kind in kinds)
    used = sum(1 for device in view.plan.devices if _plain(device.kind) == pool.kind)
    status: KubeObject = {"observedGeneration": pool.generation}
    if pool.error:
        condition = _condition("Ready", "False", pool.reason, pool.error)
    else:
        status |= {"nodes": len(kinds), "devices": devices, "used": used}
        price = None if pool.settings is None else pool.settings.price
        if price is not None:
            status["costPerHour"] = round(price * used, 6)
        if rejection:
            condition = _condition("Ready", "False", "Rejected", rejection)
        elif refused:
            nodes = ", ".join(f"{node} ({way})" for node, way in sorted(refused.items()))
            condition = _condition(
                "Ready", "False", "SharingNotAllowed", f"not used, since they share in another way: {nodes}"
            )
        elif not devices:
            known = ", ".join(sorted({_plain(kind.name) for kind in view.fleet})) or "none"
            condition = _condition(
                "Ready", "False", "NoDevices", f"no agent has a device of kind {pool.kind!r}; available: {known}"
            )
        else:
            condition = _condition("Ready", "True", "DevicesFound", show_count(devices, "device"))
    status["conditions"] = _dated([condition], pool, now)
    return status


def worth_writing(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> bool:
    """Tell whether a status is to be written over another. seconds: since this one was written last."""
    if before == after:
        return False
    fixed = [{key: each for key, each in status.items() if key not in MOVING} for status in (before, after)]
    return fixed[0] != fixed[1] or seconds >= MOVING_SECONDS


def _plain(kind: str) -> str:
    """Return a kind without its node."""
    return kind.rpartition("/")[2]


def _condition(type_: str, status: str, reason: str, message: str) -> KubeObject:
    """Return a condition. message: never empty, which some API servers take for none."""
    return {"type": type_, "status": status, "reason": reason, "message": message[:LONGEST_MESSAGE]}


def _dated(conditions: Collection[KubeObject], found: Found, now: str) -> list[KubeObject]:
    """Return conditions with the time since when each has its status."""
    before = {
        condition["type"]: condition
        for condition in (found.body.get("status") or {}).get("conditions") or ()
        if isinstance(condition, dict) and "type" in condition
    }
    dated = []
    for condition in conditions:
        old = before.get(condition["type"], {})
        since = old.get("lastTransitionTime") if old.get("status") == condition["status"] else None
        dated.append({**condition, "observedGeneration": found.generation, "lastTransitionTime": since or now})
    return sorted(dated, key=lambda condition: str(condition["type"]))
