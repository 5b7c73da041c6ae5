"""Change the plan in force by a learnt policy, device by device: `inss-plus`, ours.

1. Without a plan in force, or without a policy, geometry plans.
2. Where the devices of the plan in force sustain the rates, with other batches at most, they stay as they are.
3. Else the policy makes some moves (moves.py), each of which gives a device another of the options that are prepared
   for the problem (device_options.py). From the best state on its way pairs of devices get other options as long as
   that serves more, and devices are opened while rates are unserved.

InSS places each model on one device, which leaves rates beyond that unserved; options know no such limit, and hold
their targets under the interference of the problem. What `check` finds is never returned: the plan in force is then
kept with what it sustains, or geometry plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.planners import geometry
from cotenant.planners.capacity import PartitionDraft, partitions_with_batches, with_totals
from cotenant.planners.check import check
from cotenant.planners.inss.device_options import capacities_of, options_of, partitions_in_force
from cotenant.planners.inss.moves import FEATURES, DeviceStates, moved_by_gain, moved_by_pairs
from cotenant.planners.local_search import rebatched_plan
from cotenant.planners.policy import Policy
from cotenant.planners.problem import Problem
from cotenant.planners.rates import rescaled_plan

OPEN = 4  # devices of a kind that may be opened at once
# Moves by the policy, and after them sweeps over pairs of devices, which the last percent needs; where one device is in
# use, moves by gain.
BY_POLICY, SWEEPS, BY_GAIN = 2, 2, 6


def plan(problem: Problem) -> Plan:
    """Keep the plan in force where it sustains the rates, else change it by the policy.

    Raises PlanError for a policy of another planner or version, and for one that is untrained.
    """
    if problem.policy is not None:
        problem.policy.require("inss-plus")
        problem.policy.require_features(FEATURES)
    moved = _from_current(problem)
    if moved is None:
        return msgspec.structs.replace(geometry.plan(problem), planner="inss-plus")
    return msgspec.structs.replace(moved, planner="inss-plus", provenance=None)


def _from_current(problem: Problem) -> Plan | None:
    """Return the plan in force at the problem's rates, changed where it does not sustain them; None where there is
    none, or no way to change it."""
    if problem.current is None or problem.objective == "rate" or not any(problem.rates.values()):
        return None
    slots = list(_slots(problem, problem.current))
    start = _start(problem, slots)
    if start.served:
        kept = _plan(problem, slots, [slot.partitions for slot in slots])
        if not check(kept, problem):
            return kept
    elif any(len(partition.placements) > 1 for slot in slots for partition in slot.partitions):
        rebatched = _rebatched(problem, problem.current)
        if rebatched is not None:
            return rebatched
    if problem.policy is None:
        return None
    options = options_of(problem)
    chosen = _moved(start, problem.policy)
    partitions = [
        slot.partitions if option < 0 else options.partitions[option]
        for slot, option in zip(slots, chosen, strict=True)
    ]
    for candidate in (partitions, [slot.partitions for slot in slots]):
        made = _plan(problem, slots, candidate)
        if not check(made, problem):
            return made
    return None


class _Slot(msgspec.Struct, frozen=True):
    """Hold a device that is in use, or may be: partitions have what they sustain."""

    kind: Kind
    id: DeviceId
    partitions: tuple[Partition, ...]


def _slots(problem: Problem, current: Plan) -> Iterator[_Slot]:
    """Yield the devices in use, as far as the fleet still has them, and those that may be opened."""
    for kind in problem.fleet:
        devices = [device for device in current.devices if device.kind == kind.name][: kind.count]
        for device in devices:
            yield _Slot(kind, device.id, partitions_in_force(problem, kind, device) or ())
        taken = {device.id.index for device in devices}
        free = (index for index in range(len(taken) + OPEN) if index not in taken)
        more = OPEN if kind.count is None else min(OPEN, kind.count - len(devices))
        yield from (_Slot(kind, DeviceId(kind.name, index), ()) for index, _ in zip(free, range(more), strict=False))


def _start(problem: Problem, slots: Sequence[_Slot]) -> DeviceStates:
    names = [model.name for model in problem.models]
    kinds = [kind.name for kind in problem.fleet]
    return DeviceStates(
        options_of(problem),
        np.array([problem.rates.get(name, 0.0) for name in names]),
        [kinds.index(slot.kind.name) for slot in slots],
        np.array([capacities_of(slot.partitions, names) for slot in slots]).reshape(len(slots), len(names)),
    )


def _moved(states: DeviceStates, policy: Policy) -> list[int]:
    """Return the option of each device, -1 where it stays: after the policy's likeliest moves as far as they serve
    more, then moves of two devices at once, and then of devices that are not in use, where rates are left."""
    best = states.copy()
    for _ in range(BY_POLICY):
        moves = states.moves()
        if states.served or not len(moves.device):
            break
        choice = int(np.argmax(policy.logits(states.features(moves))[:, 0]))
        states.make(int(moves.device[choice]), int(moves.option[choice]))
        if states.unserved < best.unserved:
            best = states.copy()
    best = moved_by_pairs(best, SWEEPS) if len(best.in_use(2)) > 1 else moved_by_gain(best, BY_GAIN)
    return moved_by_gain(best, len(best.kinds), idle=True).chosen


def _plan(problem: Problem, slots: Sequence[_Slot], partitions: Sequence[tuple[Partition, ...]]) -> Plan:
    """Return the plan of partitions by slot, each placement with its part of its model's rate."""
    sustained: defaultdict[str, float] = defaultdict(float)
    for own in partitions:
        for placement in _placements(own):
            sustained[placement.model] += _sustained(placement)
    parts = {
        name: min(1.0, problem.rates.get(name, 0.0) / most) if most > 0 else 0.0 for name, most in sustained.items()
    }
    devices = []
    for slot, own in zip(slots, partitions, strict=True):
        needed = (
            own
            if all(parts[placement.model] for placement in _placements(own))
            else _without_idle(problem, slot.kind, own, parts)
        )
        if needed:
            devices.append(Device(id=slot.id, partitions=tuple(_with_rates(each, parts) for each in needed)))
    return with_totals(Plan(planner="inss-plus", devices=tuple(devices)), problem)


def _placements(partitions: Sequence[Partition]) -> Iterator[Placement]:
    for partition in partitions:
        yield from partition.placements


def _sustained(placement: Placement) -> float:
    return placement.procs * placement.batch / placement.duty


def _with_rates(partition: Partition, parts: dict[str, float]) -> Partition:
    placements = tuple(
        msgspec.structs.replace(placement, rate=parts[placement.model] * _sustained(placement))
        for placement in partition.placements
    )
    return Partition(share=partition.share, placements=placements)


def _without_idle(
    problem: Problem, kind: Kind, partitions: Sequence[Partition], parts: dict[str, float]
) -> tuple[Partition, ...]:
    """Return a device's partitions without models that nobody asks for; the others are slowed less then."""
    kept = [
        (partition.share, [p for p in partition.placements if parts[p.model]])
        for partition in partitions
        if any(parts[p.model] for p in partition.placements)
    ]
    drafts = [
        PartitionDraft(share, {p.model: 0.0 for p in own}, {p.model: p.procs for p in own}) for share, own in kept
    ]
    return partitions_with_batches(problem, kind, drafts, [[p.batch for p in own] for _, own in kept]) or ()


def _rebatched(problem: Problem, current: Plan) -> Plan | None:
    """Return the plan in force at the problem's rates, with other batches, where several models share a partition in
    time; None where that violates anything."""
    carried = current.rates()
    if any(bool(carried.get(name)) != bool(rate) for name, rate in problem.rates.items()):
        return None
    if any(device.kind not in {kind.name for kind in problem.fleet} for device in current.devices):
        return None
    rescaled = rescaled_plan(msgspec.structs.replace(current, objective="devices", bound=None), problem)
    kept = rebatched_plan(rescaled, problem)
    return None if kept is None or kept.unserved or check(kept, problem) else kept
