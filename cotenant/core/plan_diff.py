"""From one plan to the next: which partitions stay, and which workers start and stop.

A partition keeps its worker as the server has it: on the same device, with the same share and models, and no batch
larger than before. Everything else is a new worker beside the old one, which then stops; what is told apart below, a
share that changes from a model that moves, is for people to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Partition, Plan

# keep: nothing changes. tune: the worker stays, with other rates or smaller batches. reload: larger batches. resize:
# another share. refill: some other models. move: from another device.
Verb = Literal["keep", "tune", "reload", "resize", "refill", "move", "start", "stop"]
STAY: tuple[Verb, ...] = ("keep", "tune")

Slot = tuple[DeviceId, Partition]  # a partition, and its device


class PartitionChange(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a partition, or where one comes from. device, origin: where it will be, and where it was."""

    verb: Verb
    device: DeviceId | Literal[""] = ""
    origin: DeviceId | Literal[""] = ""
    before: Partition | None = None
    after: Partition | None = None


class PlanDiff(msgspec.Struct, frozen=True, kw_only=True):
    """rates: requests/s before and after of each model whose rate changes."""

    devices_added: tuple[DeviceId, ...]
    devices_removed: tuple[DeviceId, ...]
    changes: tuple[PartitionChange, ...]
    rates: dict[str, tuple[float, float]]
    workers_started: int
    workers_stopped: int
    workers_kept: int


def diff_plans(current: Plan, plan: Plan) -> PlanDiff:
    """What has to change for `plan` to take over from `current`. Devices are the same where kind and number are."""
    old: list[Slot] = [(device.id, cut) for device in current.devices for cut in device.partitions]
    new: list[Slot] = [(device.id, cut) for device in plan.devices for cut in device.partitions]
    changes: list[PartitionChange] = []
    for rule in (_stays, _reloaded, _resized, _moved, _refilled):
        changes += _paired(old, new, rule)
    changes += [PartitionChange(verb="start", device=name, after=cut) for name, cut in new]
    changes += [PartitionChange(verb="stop", origin=name, before=cut) for name, cut in old]
    before, after = ({device.id: device for device in it.devices} for it in (current, plan))
    models = sorted({placement.model for it in (current, plan) for _, _, placement in it.placements()})
    rates = {model: (current.rate(model), plan.rate(model)) for model in models}
    return PlanDiff(
        devices_added=tuple(name for name in after if name not in before),
        devices_removed=tuple(name for name in before if name not in after),
        changes=tuple(changes),
        rates={model: (was, will) for model, (was, will) in rates.items() if abs(will - was) > 1e-6 * max(was, will)},
        workers_started=sum(_workers(it.after) for it in changes if it.verb not in STAY),
        workers_stopped=sum(_workers(it.before) for it in changes if it.verb not in STAY),
        workers_kept=sum(_workers(it.before) for it in changes if it.verb in STAY),
    )


def renumber_devices(plan: Plan, current: Plan) -> Plan:
    """The plan with its devices numbered so that little moves: to a planner, devices of one kind are all the same.

    Each becomes the current one with which it has most in common, as far as that is still there.
    """
    renamed: dict[DeviceId, DeviceId] = {}
    for kind in dict.fromkeys(device.kind for device in plan.devices):
        new, old = _shapes(plan, kind), _shapes(current, kind)
        for shape in new.keys() & old.keys():
            renamed |= _matched(new[shape], old[shape])
        pairs = ((a, b) for a in new for b in old if new[a] and old[b])
        scored = [(score, a, b) for a, b in pairs if (score := _common(a, b))]
        for _, a, b in sorted(scored, reverse=True):
            renamed |= _matched(new[a], old[b])
        taken = set(renamed.values())
        fresh = (device for index in count() if (device := DeviceId(kind, index)) not in taken)
        renamed |= {ours: next(fresh) for left in new.values() for ours in left}
    order = list(dict.fromkeys(device.kind for device in plan.devices))
    devices = [msgspec.structs.replace(device, id=renamed[device.id]) for device in plan.devices]
    devices.sort(key=lambda device: (order.index(device.kind), device.id))
    return msgspec.structs.replace(plan, devices=tuple(devices))


# What the partitions of a device are: share and models of each.
Shape = tuple[tuple[int, tuple[str, ...]], ...]


def _shapes(plan: Plan, kind: str) -> dict[Shape, list[DeviceId]]:
    """The devices of a kind, by what they are cut into."""
    found: dict[Shape, list[DeviceId]] = {}
    own = {device.id: device for device in plan.devices if device.kind == kind}  # a file may give a number twice
    for device in own.values():
        shape = tuple(sorted((cut.share, _models(cut)) for cut in device.partitions))
        found.setdefault(shape, []).append(device.id)
    return found


def _matched(ours: list[DeviceId], theirs: list[DeviceId]) -> dict[DeviceId, DeviceId]:
    """As many pairs as there are, those of the same number first. They are taken out of both."""
    both = sorted(set(ours) & set(theirs))
    rest = ([n for n in ours if n not in both], [n for n in theirs if n not in both])
    pairs = dict([(n, n) for n in both] + list(zip(*rest, strict=False)))
    for mine, yours in pairs.items():
        ours.remove(mine)
        theirs.remove(yours)
    return pairs


def _common(a: Shape, b: Shape) -> int:
    """‰ that stay as they are, and a little for models that stay on another share."""
    stay = Counter(a) & Counter(b)
    models = Counter(models for _, models in a) & Counter(models for _, models in b)
    return sum(share * times for (share, _), times in stay.items()) + models.total()


def _paired(old: list[Slot], new: list[Slot], verb: Callable[[Slot, Slot], Verb | None]) -> Iterator[PartitionChange]:
    """Pairs of a partition before and after for which a rule has a word. They are taken out of both."""
    for after in list(new):
        for before in old:
            if word := verb(before, after):
                old.remove(before)
                new.remove(after)
                yield PartitionChange(verb=word, device=after[0], origin=before[0], before=before[1], after=after[1])
                break


def _stays(before: Slot, after: Slot) -> Verb | None:
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


def _reloaded(before: Slot, after: Slot) -> Verb | None:
    return "reload" if _resized(before, after) and before[1].share == after[1].share else None


def _resized(before: Slot, after: Slot) -> Verb | None:
    return "resize" if before[0] == after[0] and _models(before[1]) == _models(after[1]) else None


def _moved(before: Slot, after: Slot) -> Verb | None:
    return "move" if _models(before[1]) == _models(after[1]) else None


def _refilled(before: Slot, after: Slot) -> Verb | None:
    common = set(_models(before[1])) & set(_models(after[1]))
    return "refill" if before[0] == after[0] and common else None


def _models(partition: Partition) -> tuple[str, ...]:
    return tuple(sorted(placement.model for placement in partition.placements))


def _workers(partition: Partition | None) -> int:
    """Processes: one for each partition, or as many as run at once in it."""
    return max((placement.procs for placement in partition.placements), default=1) if partition else 0
