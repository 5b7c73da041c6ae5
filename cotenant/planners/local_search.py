"""Improve a plan by local search over the partitions of its devices, guided by the forecast.

The papers' planners give each model the least share that serves evenly spaced arrivals. Under random arrivals models
may miss SLOs that other partitions of the same device would meet: a free share widens a partition, two partitions that
merge share their headroom, a model may do better on another partition.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import PartitionDraft, batched_partitions, latency_curve, partitions_with_batches
from cotenant.planners.forecast import forecast

MAX_MOVES = 100  # moves tried for one plan
MIN_GAIN = 1e-4  # minimum reduction of the summed shortfall of attainment for which a move is made


def attainment_shortfall(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return by how much the predicted attainment of models is below their objective, for those that miss it."""
    predicted = forecast(plan, problem).models
    shortfall = {name: problem.model(name).attainment - model.attainment for name, model in predicted.items()}
    return {name: amount for name, amount in shortfall.items() if amount > 0}


def improve_plan(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with devices repartitioned as long as that reduces the predicted shortfall of attainment."""
    moves_left = MAX_MOVES
    plan = _with_burst_batches(plan, problem)
    missing = attainment_shortfall(plan, problem)
    improved = True
    while missing and improved:
        improved = False
        for index, device in enumerate(plan.devices):
            if not missing.keys() & {p.model for partition in device.partitions for p in partition.placements}:
                continue
            for drafts in _moves(device, problem.kind(device.kind)):
                if moves_left == 0:
                    return plan
                moves_left -= 1
                partitions = batched_partitions(problem, problem.kind(device.kind), drafts, full=True)
                if partitions is None:
                    continue
                candidate = with_partitions(plan, index, partitions)
                shortfall = attainment_shortfall(candidate, problem)
                if sum(shortfall.values()) < sum(missing.values()) - MIN_GAIN:
                    plan, missing, improved = candidate, shortfall, True
                    break
    return plan


def _with_burst_batches(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with batches that have headroom for bursts, unless that increases the shortfall."""
    devices = []
    for device in plan.devices:
        partitions = batched_partitions(problem, problem.kind(device.kind), drafts_of(device), full=True)
        devices.append(device if partitions is None else msgspec.structs.replace(device, partitions=partitions))
    larger = msgspec.structs.replace(plan, devices=tuple(devices))
    return plan if larger == plan or _total_shortfall(larger, problem) > _total_shortfall(plan, problem) else larger


def rebatched_plan(plan: Plan, problem: Problem) -> Plan | None:
    """Return the plan with the batches that leave most headroom at its rates, in the same partitions; None where no
    batches serve them in time."""
    devices = list(plan.devices)
    # The busiest first: where some device cannot, it is mostly that one, and the others need not be looked at.
    for n, device in sorted(enumerate(plan.devices), key=lambda each: -_busiest(each[1], problem)):
        partitions = batched_partitions(problem, problem.kind(device.kind), drafts_of(device), full=True)
        if partitions is None:
            return None
        devices[n] = msgspec.structs.replace(device, partitions=partitions)
    return msgspec.structs.replace(plan, devices=tuple(devices))


def _busiest(device: Device, problem: Problem) -> float:
    """Return the part of the time that a device's busiest partition is, alone and with the largest batches."""
    busy = [0.0]
    for partition in device.partitions:
        curves = [
            (p.rate, latency_curve(problem, p.model, device.kind, partition.share, p.procs))
            for p in partition.placements
        ]
        busy.append(sum(rate * curve[-1] / len(curve) for rate, curve in curves if curve))
    return max(busy)


def with_same_batches(plan: Plan, problem: Problem) -> Plan | None:
    """Return the plan with the latencies that its batches have for a problem; None where they miss a target."""
    devices = []
    for device in plan.devices:
        batches = [[placement.batch for placement in partition.placements] for partition in device.partitions]
        partitions = partitions_with_batches(problem, problem.kind(device.kind), drafts_of(device), batches)
        if partitions is None:
            return None
        devices.append(msgspec.structs.replace(device, partitions=partitions))
    return msgspec.structs.replace(plan, devices=tuple(devices))


def _total_shortfall(plan: Plan, problem: Problem) -> float:
    return sum(attainment_shortfall(plan, problem).values())


def with_partitions(plan: Plan, index: int, partitions: tuple[Partition, ...]) -> Plan:
    """Return the plan with other partitions on one of its devices."""
    changed = msgspec.structs.replace(plan.devices[index], partitions=partitions)
    return msgspec.structs.replace(plan, devices=(*plan.devices[:index], changed, *plan.devices[index + 1 :]))


def drafts_of(device: Device) -> list[PartitionDraft]:
    """Return the partitions of a device as drafts."""
    return [
        PartitionDraft(
            partition.share,
            {p.model: p.rate for p in partition.placements},
            {p.model: p.procs for p in partition.placements if p.procs != 1},
        )
        for partition in device.partitions
    ]


def _moves(device: Device, kind: Kind) -> Iterator[list[PartitionDraft]]:
    """Yield other partitions of a device: merge two, widen one, widen one at the cost of another, move a model."""
    cuts = drafts_of(device)
    pairs = [(i, j) for i in range(len(cuts)) for j in range(len(cuts)) if i != j]

    def legal(share: int) -> int:
        return max((cut for cut in kind.cuts if cut <= share), default=0)

    def others(*gone: int) -> list[PartitionDraft]:
        return [cut for i, cut in enumerate(cuts) if i not in gone]

    for i, j in pairs:
        if i < j:
            rates = dict(cuts[i].rates)
            for model, rate in cuts[j].rates.items():
                rates[model] = rates.get(model, 0.0) + rate
            yield [
                *others(i, j),
                PartitionDraft(legal(cuts[i].share + cuts[j].share), rates, cuts[j].procs | cuts[i].procs),
            ]
    for i, cut in enumerate(cuts):
        larger = [share for share in kind.cuts if cut.share < share <= cut.share + device.free]
        for share in dict.fromkeys(larger[-1:] + larger[:1]):
            yield [*others(i), PartitionDraft(share, cut.rates, cut.procs)]
    for i, j in pairs:
        larger = [share for share in kind.cuts if share > cuts[i].share]
        if larger and (smaller := legal(cuts[j].share - max(0, larger[0] - cuts[i].share - device.free))):
            yield [
                *others(i, j),
                PartitionDraft(larger[0], cuts[i].rates, cuts[i].procs),
                PartitionDraft(smaller, cuts[j].rates, cuts[j].procs),
            ]
    for i, j in pairs:
        for model, rate in cuts[i].rates.items():
            if len(cuts[i].rates) > 1 and model not in cuts[j].rates:
                left = {name: other for name, other in cuts[i].rates.items() if name != model}
                fewer = {name: n for name, n in cuts[i].procs.items() if name != model}
                more = cuts[j].procs | {name: n for name, n in cuts[i].procs.items() if name == model}
                yield [
                    *others(i, j),
                    PartitionDraft(cuts[i].share, left, fewer),
                    PartitionDraft(cuts[j].share, cuts[j].rates | {model: rate}, more),
                ]
