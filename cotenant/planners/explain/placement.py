"""Explain why a placement has its share: find its bottleneck.

The next smaller legal share is tried with the rest of the device unchanged, and constraints are lifted one at a time
until it is feasible: the one that has to be lifted is the bottleneck.
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

# Why the next smaller share is infeasible. share: there is none, or none that fits beside the others. memory: it has
# too little. target: single requests already take too long. rate: it does not keep up, however long requests may wait.
# both: it keeps up only in batches that take too long. arrivals: it is enough for evenly spaced requests, not for
# random ones. other: it is enough but for another model of the partition. headroom: it is feasible.
Bottleneck = Literal["share", "memory", "target", "rate", "both", "arrivals", "other", "headroom"]

UNLIMITED_MEMORY = 1 << 62  # bytes
NO_TARGET = 1e9  # seconds


class PlacementExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Explain one placement, on each of `count` identical devices.

    share: in ‰. target_used: worst-case latency over the target. rate_used: the rate over what the partition sustains.
    memory_used: what all workers of the device need over its memory; None where that is unlimited. bottleneck: what
    rules out the next smaller share; why: the same in words.
    """

    partition: str
    count: int
    share: int
    model: str
    rate: float
    target_used: float
    rate_used: float
    memory_used: float | None
    bottleneck: Bottleneck
    why: str


def explain_placements(group: DeviceGroup, plan: Plan, problem: Problem) -> Iterator[PlacementExplanation]:
    """Yield the explanation of each placement of a group of identical devices."""
    device = group.device
    kind = problem.kind(device.kind)
    need = sum(partition_need(problem, kind, partition) for partition in device.partitions)
    for slot, partition in enumerate(device.partitions):
        bottlenecks = _bottlenecks(problem, plan, kind, device, slot)
        for placement in partition.placements:
            bottleneck, why = bottlenecks[placement.model]
            yield PlacementExplanation(
                partition=f"{group.name}/{slot}",
                count=group.count,
                share=partition.share,
                model=placement.model,
                rate=placement.rate,
                target_used=(placement.duty + placement.latency) / problem.model(placement.model).slo,
                rate_used=placement.rate * placement.duty / (placement.procs * placement.batch),
                memory_used=None if kind.memory >= UNLIMITED_MEMORY else need / kind.memory,
                bottleneck=bottleneck,
                why=why,
            )


def partition_need(problem: Problem, kind: Kind, partition: Partition) -> int:
    """Return the bytes that all workers of a partition need."""
    return sum(one.procs * footprint(problem, kind.name, one.model, one.batch) for one in partition.placements)


def _bottlenecks(
    problem: Problem, plan: Plan, kind: Kind, device: Device, slot: int
) -> dict[str, tuple[Bottleneck, str]]:
    """Return, by model of one partition, what rules out the next smaller share."""
    partition = device.partitions[slot]
    names = [placement.model for placement in partition.placements]
    smaller = max((cut for cut in kind.cuts if cut < partition.share), default=None)
    if smaller is None:
        return dict.fromkeys(names, ("share", "none is smaller"))
    less = show_share(smaller)

    def feasible(
        *, on: Kind = kind, without_target: Sequence[str] = (), idle: Sequence[str] = ()
    ) -> tuple[Partition, ...] | None:
        drafts = [
            with_share(other, smaller if i == slot else other.share, idle) for i, other in enumerate(device.partitions)
        ]
        return batched_partitions(_without_target(problem, without_target), on, drafts)

    def limiting(
        bottleneck: Bottleneck, why: str, lifted: Callable[[Sequence[str]], bool]
    ) -> dict[str, tuple[Bottleneck, str]]:
        """Return that bottleneck for the models that rule the share out even with it lifted for all others; else for
        all."""
        limited = [name for name in names if not lifted([other for other in everyone if other != name])] or names
        return {name: (bottleneck, why) if name in limited else _shares_with(limited) for name in names}

    everyone = [placement.model for partition in device.partitions for placement in partition.placements]
    if (recut := feasible()) is not None:
        return _under_random_arrivals(problem, plan, device, recut, names, less)
    if feasible(on=with_unlimited_devices(kind)) is not None:
        if kind.geometry is not None and not mig.placements_fit(
            kind.geometry, [(share, 0) for share in _shares(device, slot, smaller)]
        ):
            return dict.fromkeys(names, ("share", f"{less}: no such instance fits beside the others"))
        need = show_memory(partition_need(problem, kind, partition))
        return dict.fromkeys(names, ("memory", f"{less}: too little memory for {need}"))
    free = with_unlimited_devices(kind)
    if feasible(on=free, idle=everyone) is None:
        why = f"{less}: too slow"
        return limiting(
            "target", why, lambda others: feasible(on=free, idle=everyone, without_target=others) is not None
        )
    if feasible(on=free, without_target=everyone) is None:
        why = f"{less}: falls behind"
        return limiting("rate", why, lambda others: feasible(on=free, without_target=everyone, idle=others) is not None)
    why = f"{less}: keeps up, but late"
    return limiting("both", why, lambda others: feasible(on=free, idle=others, without_target=others) is not None)


def _under_random_arrivals(
    problem: Problem, plan: Plan, device: Device, recut: tuple[Partition, ...], names: Sequence[str], less: str
) -> dict[str, tuple[Bottleneck, str]]:
    """Return, by model, the bottleneck of a smaller share that suffices for evenly spaced requests."""
    changed = msgspec.structs.replace(device, partitions=recut)
    devices = tuple(changed if other is device else other for other in plan.devices)
    before, after = (forecast(one, problem).models for one in (plan, msgspec.structs.replace(plan, devices=devices)))
    violated = {
        name: f"{less}: attainment {after[name].attainment * 100:.1f} %"
        for name in after
        if after[name].attainment < min(problem.model(name).attainment, before[name].attainment)
    }
    if not violated:
        return dict.fromkeys(names, ("headroom", f"{less}: is enough"))
    limited = [name for name in names if name in violated]
    if not limited:
        return dict.fromkeys(names, ("other", f"{less}: {show_names(list(violated))} too slow"))
    return {name: ("arrivals", violated[name]) if name in violated else _shares_with(limited) for name in names}


def _shares_with(limited: Sequence[str]) -> tuple[Bottleneck, str]:
    return "other", f"shares with {show_names(limited)}"


def with_share(partition: Partition, share: int, idle: Sequence[str]) -> PartitionDraft:
    """Return a draft of the partition with another share (‰). idle: models whose rate is taken to be 0."""
    return PartitionDraft(
        share,
        {one.model: 0.0 if one.model in idle else one.rate for one in partition.placements},
        {one.model: one.procs for one in partition.placements},
    )


def _shares(device: Device, slot: int, smaller: int) -> list[int]:
    return [smaller if i == slot else partition.share for i, partition in enumerate(device.partitions)]


def _without_target(problem: Problem, names: Sequence[str]) -> Problem:
    if not names:
        return problem
    models = tuple(
        msgspec.structs.replace(model, slo=NO_TARGET) if model.name in names else model for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)


def with_unlimited_devices(kind: Kind) -> Kind:
    """Return the kind without limits on memory and MIG placements."""
    return msgspec.structs.replace(kind, memory=UNLIMITED_MEMORY, geometry=None)
