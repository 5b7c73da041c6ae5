"""Why a placement has its share.

It is explained by the next smaller legal share. The rest of its device stays as it is, and conditions are lifted one by
one until the smaller share would do: what has to be lifted is what binds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from cotenant.core import mig
from cotenant.core.device_groups import DeviceGroup
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.units import show_memory, show_names, show_share
from cotenant.planners import Problem
from cotenant.planners.capacity import PartitionDraft, batched_partitions, footprint
from cotenant.planners.forecast import forecast

# Of a smaller share. share: there is none, or none that lies beside the others. memory: its memory is too small.
# target: not even single requests are done in time. rate: it does not keep up, however long requests may wait. both:
# it keeps up only in batches that take too long. chance: it would do for evenly spaced requests, not for random ones.
# other: it would do but for another model of the partition. room: it would do, so the rest is to spare.
Bind = Literal["share", "memory", "target", "rate", "both", "chance", "other", "room"]

ENDLESS = 1 << 62  # bytes; where memory is no question
NEVER = 1e9  # seconds; a target that is none


class PlacementExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One placement, on each of `count` devices that are alike.

    target_used: the worst case as a part of the target. rate_used: the rate as a part of what the partition carries.
    memory_used: what all workers of the device need, as a part of its memory; None where that is no question.
    """

    partition: str
    count: int
    share: int
    model: str
    rate: float
    target_used: float
    rate_used: float
    memory_used: float | None
    binds: Bind
    why: str


def explain_placements(group: DeviceGroup, plan: Plan, problem: Problem) -> Iterator[PlacementExplanation]:
    device = group.device
    kind = problem.kind(device.kind)
    need = sum(partition_need(problem, kind, cut) for cut in device.partitions)
    for slot, partition in enumerate(device.partitions):
        binds = _binds(problem, plan, kind, device, slot)
        for placement in partition.placements:
            bind, why = binds[placement.model]
            yield PlacementExplanation(
                partition=f"{group.name}/{slot}",
                count=group.count,
                share=partition.share,
                model=placement.model,
                rate=placement.rate,
                target_used=(placement.duty + placement.latency) / problem.model(placement.model).slo,
                rate_used=placement.rate * placement.duty / (placement.procs * placement.batch),
                memory_used=None if kind.memory >= ENDLESS else need / kind.memory,
                binds=bind,
                why=why,
            )


def partition_need(problem: Problem, kind: Kind, cut: Partition) -> int:
    return sum(it.procs * footprint(problem, kind.name, it.model, it.batch) for it in cut.placements)


def _binds(problem: Problem, plan: Plan, kind: Kind, device: Device, slot: int) -> dict[str, tuple[Bind, str]]:
    """By model of one partition, what keeps it from a smaller share."""
    partition = device.partitions[slot]
    names = [placement.model for placement in partition.placements]
    smaller = max((cut for cut in kind.cuts if cut < partition.share), default=None)
    if smaller is None:
        return dict.fromkeys(names, ("share", "none is smaller"))
    less = show_share(smaller)

    def made(
        *, on: Kind = kind, timeless: Sequence[str] = (), idle: Sequence[str] = ()
    ) -> tuple[Partition, ...] | None:
        cuts = [with_share(it, smaller if i == slot else it.share, idle) for i, it in enumerate(device.partitions)]
        return batched_partitions(_timeless(problem, timeless), on, cuts)

    def each(bind: Bind, why: str, lifted: Callable[[Sequence[str]], bool]) -> dict[str, tuple[Bind, str]]:
        """That for the models that stand in the way even with it lifted for all others; where none does, for all."""
        guilty = [name for name in names if not lifted([other for other in everyone if other != name])] or names
        return {name: (bind, why) if name in guilty else _shares_with(guilty) for name in names}

    everyone = [placement.model for it in device.partitions for placement in it.placements]
    if (anew := made()) is not None:
        return _by_chance(problem, plan, device, anew, names, less)
    if made(on=with_unlimited_devices(kind)) is not None:
        if kind.geometry is not None and not mig.placements_fit(
            kind.geometry, [(share, 0) for share in _shares(device, slot, smaller)]
        ):
            return dict.fromkeys(names, ("share", f"{less}: no such instance fits beside the others"))
        need = show_memory(partition_need(problem, kind, partition))
        return dict.fromkeys(names, ("memory", f"{less}: no room for {need}"))
    free = with_unlimited_devices(kind)
    if made(on=free, idle=everyone) is None:
        why = f"{less}: too slow"
        return each("target", why, lambda others: made(on=free, idle=everyone, timeless=others) is not None)
    if made(on=free, timeless=everyone) is None:
        why = f"{less}: falls behind"
        return each("rate", why, lambda others: made(on=free, timeless=everyone, idle=others) is not None)
    why = f"{less}: keeps up, but late"
    return each("both", why, lambda others: made(on=free, idle=others, timeless=others) is not None)


def _by_chance(
    problem: Problem, plan: Plan, device: Device, anew: tuple[Partition, ...], names: Sequence[str], less: str
) -> dict[str, tuple[Bind, str]]:
    """A smaller share that evenly spaced requests would do with."""
    changed = msgspec.structs.replace(device, partitions=anew)
    devices = tuple(changed if it is device else it for it in plan.devices)
    before, after = (forecast(it, problem).models for it in (plan, msgspec.structs.replace(plan, devices=devices)))
    broken = {
        name: f"{less}: {after[name].attainment * 100:.1f} % in time"
        for name in after
        if after[name].attainment < min(problem.model(name).attainment, before[name].attainment)
    }
    if not broken:
        return dict.fromkeys(names, ("room", f"{less}: would do"))
    guilty = [name for name in names if name in broken]
    if not guilty:
        return dict.fromkeys(names, ("other", f"{less}: {show_names(list(broken))} too slow"))
    return {name: ("chance", broken[name]) if name in broken else _shares_with(guilty) for name in names}


def _shares_with(guilty: Sequence[str]) -> tuple[Bind, str]:
    return "other", f"beside {show_names(guilty)}"


def with_share(partition: Partition, share: int, idle: Sequence[str]) -> PartitionDraft:
    return PartitionDraft(
        share,
        {it.model: 0.0 if it.model in idle else it.rate for it in partition.placements},
        {it.model: it.procs for it in partition.placements},
    )


def _shares(device: Device, slot: int, smaller: int) -> list[int]:
    return [smaller if i == slot else it.share for i, it in enumerate(device.partitions)]


def _timeless(problem: Problem, names: Sequence[str]) -> Problem:
    if not names:
        return problem
    models = tuple(
        msgspec.structs.replace(model, slo=NEVER) if model.name in names else model for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)


def with_unlimited_devices(kind: Kind) -> Kind:
    return msgspec.structs.replace(kind, memory=ENDLESS, geometry=None)
