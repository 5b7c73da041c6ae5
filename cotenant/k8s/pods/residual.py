"""Ask any planner where one pod goes: with what devices have left as devices of their own, and the pods there as given.

Devices that are alike become a kind of device: its shares are those that are free and on which the pod alone meets its
objective, its memory is what is left, and the pods there slow whatever comes, and are slowed. A free MIG instance is a
device with one share. The planner has the least to use for the pod's rate, so it takes one partition.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.k8s.pods.slots import Choice, DeviceSlots, DeviceState
from cotenant.planners import Problem, load_planner
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, batched_partitions, footprint
from cotenant.planners.cluster import fits
from cotenant.planners.kind_by_kind import Instance, sustained_rate
from cotenant.predictors import Interference, Load, at_quantile


class Remains(msgspec.Struct, frozen=True):
    """What a device has left, as a kind of its own. kind: the device's own. device: index of the first such device.
    slot: of the empty MIG instance that it is; None for a part of a device. beside: what runs there."""

    rest: Kind
    kind: Kind
    device: int
    slot: int | None
    beside: tuple[Load, ...]


class BesideInterference:
    """Predict slowdowns on what is left of devices, where others run. remains: by the name of their kind."""

    def __init__(self, inner: Interference, remains: dict[str, Remains]) -> None:
        self._inner = inner
        self._remains = remains

    @property
    def interferes(self) -> bool:
        return self._inner.interferes

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        remains = self._remains[victim.kind]

        def there(load: Load) -> Load:
            return msgspec.structs.replace(load, kind=remains.kind.name)

        return self._inner.slowdown(there(victim), (*map(there, colocated), *remains.beside))

    def with_quantile(self, quantile: float) -> BesideInterference:
        return BesideInterference(at_quantile(self._inner, quantile), self._remains)


def by_planner(
    name: str, problem: Problem, devices: Sequence[DeviceSlots], instance: Instance, memo: object
) -> Choice | None:
    """Return where a planner puts a pod; None where it finds no place."""
    planner = load_planner(name)
    rests = remains_of(problem, devices, instance)
    while rests:
        plan = planner(_residual_problem(problem, list(rests.values()), instance))
        found = _single(plan)
        if found is None:
            return None
        kind, share = found
        chosen = rests.pop(kind)
        choice = _choice(devices, chosen, share, instance)
        if choice is not None and fits(problem, DeviceDraft(chosen.kind, choice.cuts)):
            return choice
        # Those who are there would miss their targets, which the planner does not know: another.
    return None


def remains_of(problem: Problem, devices: Sequence[DeviceSlots], instance: Instance) -> dict[str, Remains]:
    """Return what devices have left for an instance, by name; of those that are alike, of the first."""
    rests: dict[str, Remains] = {}
    seen: set[DeviceState] = set()
    for index, device in enumerate(devices):
        if not device.open or device.state in seen:
            continue
        seen.add(device.state)
        kind = device.draft.kind
        able = [cut for cut in kind.cuts if sustained_rate(problem, instance.model, kind, cut) >= instance.rate]
        partitions = batched_partitions(problem, kind, device.draft.cuts)
        if not able or partitions is None:
            continue
        running = tuple(
            Load(each.model, kind.name, each.batch, part.share) for part in partitions for each in part.placements
        )
        name = f"{kind.name}~{len(rests)}"
        if device.fixed:
            for slot, cut in enumerate(device.draft.cuts):
                if not cut.rates and cut.share in able:
                    rest = Kind(name=name, count=1, price=kind.price, cuts=(cut.share,), max_partitions=1)
                    rests[name] = Remains(rest, kind, index, slot, running)
                    break
            continue
        free = tuple(cut for cut in able if cut <= device.draft.free)
        full = kind.max_partitions is not None and len(device.draft.cuts) >= kind.max_partitions
        if not free or full:
            continue
        taken = sum(footprint(problem, kind.name, load.model, load.batch) for load in running)
        rest = Kind(
            name=name,
            count=1,
            price=kind.price,
            cuts=free,
            memory=kind.memory - taken,
            max_partitions=1,
            geometry=kind.geometry,
        )
        rests[name] = Remains(rest, kind, index, None, running)
    return rests


def _residual_problem(problem: Problem, rests: Sequence[Remains], instance: Instance) -> Problem:
    profiles = {
        (instance.model, each.rest.name): profile
        for each in rests
        if (profile := problem.profile(instance.model, each.kind.name)) is not None
    }
    return Problem(
        models=(problem.model(instance.model),),
        rates={instance.model: instance.rate},
        fleet=tuple(each.rest for each in rests),
        profiles=profiles,
        interference=BesideInterference(problem.interference, {each.rest.name: each for each in rests}),
        arrivals="even",
        bounded=False,
    )


def _single(plan: Plan) -> tuple[str, int] | None:
    """Return the kind and the share of a plan's one partition; None where there is none, or more."""
    if plan.unserved:
        return None
    used = [(device.kind, part.share) for device in plan.devices for part in device.partitions if part.placements]
    return used[0] if len(used) == 1 else None


def _choice(devices: Sequence[DeviceSlots], chosen: Remains, share: int, instance: Instance) -> Choice | None:
    cuts = devices[chosen.device].draft.cuts
    cut = PartitionDraft(share, {instance.model: instance.rate})
    if chosen.slot is None:
        return Choice(chosen.device, [*cuts, cut], len(cuts), 0.0)
    return Choice(chosen.device, [*cuts[: chosen.slot], cut, *cuts[chosen.slot + 1 :]], chosen.slot, 0.0)
