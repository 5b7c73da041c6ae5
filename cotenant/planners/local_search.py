"""A better cut of each device of a plan, judged by the forecast.

The papers' planners cut for evenly spaced arrivals, and as little as serves those. Under random ones the models may
break promises that another cut of the same device keeps: what is left over widens a partition, two partitions that
become one share their slack, a model may be better off next door. This is a local search over such moves.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Device, Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import PartitionDraft, batched_partitions
from cotenant.planners.forecast import forecast

TRIES = 100  # cuts that are looked at


def attainment_shortfall(plan: Plan, problem: Problem) -> dict[str, float]:
    """By how much models miss the fraction promised, for those that do."""
    expected = forecast(plan, problem).models
    missing = {name: problem.model(name).attainment - model.attainment for name, model in expected.items()}
    return {name: amount for name, amount in missing.items() if amount > 0}


def improve_plan(plan: Plan, problem: Problem) -> Plan:
    """The plan, with devices cut anew as long as that brings models closer to their promises."""
    tries = TRIES
    plan = _roomy(plan, problem)
    missing = attainment_shortfall(plan, problem)
    improved = True
    while missing and improved:
        improved = False
        for index, device in enumerate(plan.devices):
            if not missing.keys() & {p.model for cut in device.partitions for p in cut.placements}:
                continue
            for cuts in _moves(device, problem.kind(device.kind)):
                if tries == 0:
                    return plan
                tries -= 1
                made = batched_partitions(problem, problem.kind(device.kind), cuts, full=True)
                if made is None:
                    continue
                changed = msgspec.structs.replace(device, partitions=made)
                candidate = msgspec.structs.replace(
                    plan, devices=(*plan.devices[:index], changed, *plan.devices[index + 1 :])
                )
                still = attainment_shortfall(candidate, problem)
                if sum(still.values()) < sum(missing.values()) - 1e-4:
                    plan, missing, improved = candidate, still, True
                    break
    return plan


def _roomy(plan: Plan, problem: Problem) -> Plan:
    """The same cuts, with batches that have room for bursts, where no promise suffers from it."""
    devices = []
    for device in plan.devices:
        cuts = _cuts(device)
        made = batched_partitions(problem, problem.kind(device.kind), cuts, full=True)
        devices.append(device if made is None else msgspec.structs.replace(device, partitions=made))
    roomy = msgspec.structs.replace(plan, devices=tuple(devices))
    return plan if roomy == plan or _short(roomy, problem) > _short(plan, problem) else roomy


def _short(plan: Plan, problem: Problem) -> float:
    return sum(attainment_shortfall(plan, problem).values())


def _cuts(device: Device) -> list[PartitionDraft]:
    return [
        PartitionDraft(
            cut.share,
            {p.model: p.rate for p in cut.placements},
            {p.model: p.procs for p in cut.placements if p.procs != 1},
        )
        for cut in device.partitions
    ]


def _moves(device: Device, kind: Kind) -> Iterator[list[PartitionDraft]]:
    """The device cut otherwise: those first that give most."""
    cuts = _cuts(device)
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
