"""Compute the differences between two plans: which partitions stay, and which workers start and stop.

A partition keeps its workers if it stays on the same device with the same share and models, and no batch grows.
Everything else is a new worker next to the old one, which then stops; the finer distinctions below, such as a resized
partition or a moved model, are for people to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count
from typing import Literal

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Partition, Plan

# keep: unchanged. tune: the worker stays, with other rates or smaller batches. reload: larger batches. resize:
# another share. refill: some models change. move: from another device.
Verb = Literal["keep", "tune", "reload", "resize", "refill", "move", "start", "stop"]
KEEPS_WORKERS: tuple[Verb, ...] = ("keep", "tune")

LocatedPartition = tuple[DeviceId, Partition]  # a partition, and its device


class PartitionChange(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the change of one partition. device, origin: where it will be, and where it was."""

    verb: Verb
    device: DeviceId | Literal[""] = ""
    origin: DeviceId | Literal[""] = ""
    before: Partition | None = None
    after: Partition | None = None


class PlanDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Hold all changes between two plans. rates: requests/s before and after, of each model whose rate changes."""

    devices_added: tuple[DeviceId, ...]
    devices_removed: tuple[DeviceId, ...]
    changes: tuple[PartitionChange, ...]
    rates: dict[str, tuple[float, float]]
    workers_started: int
    workers_stopped: int
    workers_kept: int


def diff_plans(current: Plan, plan: Plan) -> PlanDiff:
    """Return what must change for `plan` to replace `current`. Devices are the same where their identities are."""
    old: list[LocatedPartition] = [
        (device.id, partition) for device in current.devices for partition in device.partitions
    ]
    new: list[LocatedPartition] = [(device.id, partition) for device in plan.devices for partition in device.partitions]
    changes: list[PartitionChange] = []
    for rule in (_stays, _reloaded, _resized, _moved, _refilled):
        changes += _pair_up(old, new, rule)
    changes += [PartitionChange(verb="start", device=device_id, after=partition) for device_id, partition in new]
    changes += [PartitionChange(verb="stop", origin=device_id, before=partition) for device_id, partition in old]
    before, after = ({device.id: device for device in each.devices} for each in (current, plan))
    models = sorted({placement.model for each in (current, plan) for _, _, placement in each.placements()})
    rates = {model: (current.rate(model), plan.rate(model)) for model in models}
    return PlanDiff(
        devices_added=tuple(device_id for device_id in after if device_id not in before),
        devices_removed=tuple(device_id for device_id in before if device_id not in after),
        changes=tuple(changes),
        rates={model: (was, will) for model, (was, will) in rates.items() if abs(will - was) > 1e-6 * max(was, will)},
        workers_started=sum(_workers(each.after) for each in changes if each.verb not in KEEPS_WORKERS),
        workers_stopped=sum(_workers(each.before) for each in changes if each.verb not in KEEPS_WORKERS),
        workers_kept=sum(_workers(each.before) for each in changes if each.verb in KEEPS_WORKERS),
    )


def renumber_devices(plan: Plan, current: Plan, available: Collection[DeviceId] | None = None) -> Plan:
    """Renumber the devices of a plan so that few partitions move.

    Planners treat devices of one kind as interchangeable. Each gets the number of the current device with which it has
    most in common, as far as that is still free. available: the devices that there are, enough for the plan; None: any.
    """
    if available is not None:
        kept = tuple(device for device in current.devices if device.id in available)
        current = msgspec.structs.replace(current, devices=kept)
    renamed: dict[DeviceId, DeviceId] = {}
    for kind in dict.fromkeys(device.kind for device in plan.devices):
        new, old = _layouts(plan, kind), _layouts(current, kind)
        for layout in new.keys() & old.keys():
            renamed |= _match(new[layout], old[layout])
        pairs = ((a, b) for a in new for b in old if new[a] and old[b])
        scored = [(score, a, b) for a, b in pairs if (score := _common(a, b))]
        for _, a, b in sorted(scored, reverse=True):
            renamed |= _match(new[a], old[b])
        used = set(renamed.values())
        ids: Iterable[DeviceId] = (
            (DeviceId(kind, index) for index in count()) if available is None else sorted(available)
        )
        free_ids = (device for device in ids if device.kind == kind and device not in used)
        renamed |= {device_id: next(free_ids) for remaining in new.values() for device_id in remaining}
    order = list(dict.fromkeys(device.kind for device in plan.devices))
    devices = [msgspec.structs.replace(device, id=renamed[device.id]) for device in plan.devices]
    devices.sort(key=lambda device: (order.index(device.kind), device.id))
    return msgspec.structs.replace(plan, devices=tuple(devices))


# The share and models of each partition of a device.
Layout = tuple[tuple[int, tuple[str, ...]], ...]


def _layouts(plan: Plan, kind: str) -> dict[Layout, list[DeviceId]]:
    """Return the devices of a kind, by their layout."""
    layouts: dict[Layout, list[DeviceId]] = {}
    devices = {device.id: device for device in plan.devices if device.kind == kind}  # a file may contain a number twice
    for device in devices.values():
        layout = tuple(sorted((partition.share, _models(partition)) for partition in device.partitions))
        layouts.setdefault(layout, []).append(device.id)
    return layouts


def _match(new: list[DeviceId], old: list[DeviceId]) -> dict[DeviceId, DeviceId]:
    """Pair up as many devices as possible, those of equal identity first, and remove them from both lists."""
    common = sorted(set(new) & set(old))
    remaining = ([n for n in new if n not in common], [n for n in old if n not in common])
    pairs = dict([(n, n) for n in common] + list(zip(*remaining, strict=False)))
    for new_id, old_id in pairs.items():
        new.remove(new_id)
        old.remove(old_id)
    return pairs


def _common(a: Layout, b: Layout) -> int:
    """Return the ‰ that stay unchanged, plus 1 for each set of models that only changes its share."""
    stay = Counter(a) & Counter(b)
    models = Counter(models for _, models in a) & Counter(models for _, models in b)
    return sum(share * times for (share, _), times in stay.items()) + models.total()


def _pair_up(
    old: list[LocatedPartition],
    new: list[LocatedPartition],
    rule: Callable[[LocatedPartition, LocatedPartition], Verb | None],
) -> Iterator[PartitionChange]:
    """Yield changes for pairs of partitions to which a rule assigns a verb, and remove them from both lists."""
    for after in list(new):
        for before in old:
            if verb := rule(before, after):
                old.remove(before)
                new.remove(after)
                yield PartitionChange(verb=verb, device=after[0], origin=before[0], before=before[1], after=after[1])
                break


def _stays(before: LocatedPartition, after: LocatedPartition) -> Verb | None:
    if _reloaded(before, after) is None:
        return None
    batches = {p.model: (p.batch, p.procs) for p in before[1].placements}
    if any(batches[p.model][0] < p.batch or batches[p.model][1] != p.procs for p in after[1].placements):
        return None
    rates = {p.model: p.rate for p in before[1].placements}
    same = all(
        batches[p.model][0] == p.batch and abs(rates[p.model] - p.rate) <= 1e-6 * p.rate for p in after[1].placements
    )
    return "keep" if same else "tune"


def _reloaded(before: LocatedPartition, after: LocatedPartition) -> Verb | None:
    return "reload" if _resized(before, after) and before[1].share == after[1].share else None


def _resized(before: LocatedPartition, after: LocatedPartition) -> Verb | None:
    return "resize" if before[0] == after[0] and _models(before[1]) == _models(after[1]) else None


def _moved(before: LocatedPartition, after: LocatedPartition) -> Verb | None:
    return "move" if _models(before[1]) == _models(after[1]) else None


def _refilled(before: LocatedPartition, after: LocatedPartition) -> Verb | None:
    common = set(_models(before[1])) & set(_models(after[1]))
    return "refill" if before[0] == after[0] and common else None


def _models(partition: Partition) -> tuple[str, ...]:
    return tuple(sorted(placement.model for placement in partition.placements))


def _workers(partition: Partition | None) -> int:
    """Return the number of worker processes of a partition."""
    return max((placement.procs for placement in partition.placements), default=1) if partition else 0
