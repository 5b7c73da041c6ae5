"""Choose a partition for one pod among devices that are in use: the planners' rules, one instance at a time.

The schedulers of the papers place instances one after the other on a cluster that is given. So their rules are asked
here as the planners have them: `score` and `hetsev`, the thesis' `min`, `max` and `roundrobin`, and KACE's choice of
co-located models. Other planners plan whole problems; they are asked in `residual.py`, with what devices have left.

A rule never takes a device where a pod, the new one or one that is there, would miss its target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.k8s.pods.residual import by_planner
from cotenant.k8s.pods.slots import Choice, DeviceSlots, DeviceState
from cotenant.planners import PLANNERS, Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    RoundShare,
    largest_slowdown,
    latency_curve,
    max_throughput_batch,
    smallest_batches,
)
from cotenant.planners.cluster import fits, smallest_chunk
from cotenant.planners.colocate import rank_by_prediction
from cotenant.planners.hetsev import InstanceType, instance_type
from cotenant.planners.kind_by_kind import Instance, sustained_rate
from cotenant.planners.score import Binding, busy_parts, mps_shares, node_binding
from cotenant.predictors import Load

MAX_COMPARED = 8  # devices, unlike each other, that can take a pod


class Resident(msgspec.Struct, frozen=True):
    """A pod that has a partition for itself. load: with the batch that it needs alone on the device. tolerates: the
    slowdown up to which it meets its target."""

    load: Load
    tolerates: float


class Memo(msgspec.Struct):
    """Remember what was found of devices that are alike, from one decision to the next. bindings, colocated: of an
    instance; idle: the part of a device's partitions that is, at most, times 100; throughput, residents, chunks: see
    `_throughput`, `_residents` and `_chunked`."""

    bindings: dict[tuple[Instance, DeviceState], Binding | None] = {}
    idle: dict[DeviceState, float] = {}
    colocated: dict[tuple[Instance, DeviceState], Choice | None] = {}
    throughput: dict[DeviceState, float] = {}
    residents: dict[DeviceState, tuple[Resident, ...]] = {}
    chunks: dict[DeviceState, list[PartitionDraft]] = {}

    def limit(self, entries: int) -> None:
        """Forget all where there are more entries."""
        if max(map(len, self._tables())) > entries:
            self.clear()

    def clear(self) -> None:
        """Forget all."""
        for table in self._tables():
            table.clear()

    def _tables(self) -> tuple[dict[Any, Any], ...]:
        return self.bindings, self.idle, self.colocated, self.throughput, self.residents, self.chunks


Rule = Callable[[Problem, Sequence[DeviceSlots], Instance, Memo], Choice | None]


def choose_rule(name: str) -> Rule:
    """Return the rule of that name, or that asks the planner of that name. Raises PlanError for an unknown one."""
    if name in RULES:
        return RULES[name]
    if name not in PLANNERS:
        known = ", ".join(dict.fromkeys([*RULES, *PLANNERS]))
        raise PlanError(f"unknown planner {name!r}; available: {known}")
    return partial(by_planner, name)


def by_score(problem: Problem, devices: Sequence[DeviceSlots], instance: Instance, memo: Memo) -> Choice | None:
    """Choose as the NTUA thesis' scheduler: the partition of the highest score (`planners.score`).

    No score is above 100 times the idle part of the partition, so devices come in that order, and the search ends at
    the first that cannot be better, or once `MAX_COMPARED` that are unlike each other could take the pod: as schedulers
    of clusters do, it does not look at all of a large one.
    """
    room = {kind.name: _least_room(problem, kind, instance) for kind in problem.fleet}
    bounds = sorted(
        (-_most_idle(problem, device, memo), index)
        for index, device in enumerate(devices)
        if device.open and device.free >= room[device.draft.kind.name]
    )
    best: Choice | None = None
    able: set[DeviceState] = set()
    for bound, index in bounds:
        if best is not None and (-bound < best.score or len(able) >= MAX_COMPARED):
            break
        device = devices[index]
        key = (instance, device.state)
        if key not in memo.bindings:
            memo.bindings[key] = node_binding(problem, device.draft, instance)
        binding = memo.bindings[key]
        if binding is None:
            continue
        able.add(device.state)
        if best is None or binding.score > best.score or (binding.score == best.score and index < best.device):
            best = Choice(index, binding.cuts, _changed(device.draft.cuts, binding.cuts), binding.score)
    return best


def _least_room(problem: Problem, kind: Kind, instance: Instance) -> float:
    """Return the share (‰) that a device of a kind has to have left for an instance; that of MIG says nothing of it."""
    if kind.geometry is not None:
        return -math.inf
    return min(mps_shares(problem, kind, instance), default=math.inf)


def _most_idle(problem: Problem, device: DeviceSlots, memo: Memo) -> float:
    """Return the upper bound of the score of a device's partitions."""
    bound = memo.idle.get(device.state)
    if bound is None:
        busy = [sum(busy_parts(problem, device.draft.kind, cut).values()) for cut in device.draft.cuts]
        if device.draft.kind.geometry is None:
            used = sum(part * cut.share / WHOLE for part, cut in zip(busy, device.draft.cuts, strict=True))
        else:
            used = min(busy, default=0.0)
        bound = memo.idle[device.state] = 100 * (1 - used)
    return bound


def by_hetsev(problem: Problem, devices: Sequence[DeviceSlots], instance: Instance, memo: Memo) -> Choice | None:
    """Choose as HetSev: the kind that costs least for the instance, and of its devices the one with the most left that
    has no other of the model (`planners.hetsev`). An instance is one pod, so kinds on which one does not sustain the
    rate are passed over."""
    types = [made for kind in problem.fleet if (made := instance_type(problem, instance.model, kind)) is not None]
    able = [each for each in types if each.capacity >= instance.rate]
    for chosen in sorted(able, key=lambda each: (each.cost(instance.rate), -each.capacity)):
        worst_fit = sorted(enumerate(devices), key=lambda pair: -pair[1].draft.free)
        for index, device in worst_fit:
            if device.draft.kind.name != chosen.kind.name or any(
                instance.model in cut.rates for cut in device.draft.cuts
            ):
                continue
            if (choice := _on(problem, device, index, instance, chosen.share, _cost_score(chosen, device))) is not None:
                return choice
    return None


def _cost_score(chosen: InstanceType, device: DeviceSlots) -> float:
    return device.draft.free / WHOLE * 100 / (1 + chosen.cost(1.0)) if math.isfinite(chosen.price) else 0.0


def by_minimum(problem: Problem, devices: Sequence[DeviceSlots], instance: Instance, memo: Memo) -> Choice | None:
    """Choose as the thesis' Min: the first smallest chunk that nobody has; of a device without MIG, an idle one."""
    for index, device in _by_price(devices):
        if device.draft.kind.geometry is None and device.draft.cuts:
            continue
        if (choice := _on(problem, device, index, instance, smallest_chunk(device.draft.kind))) is not None:
            return choice
    return None


def by_maximum(problem: Problem, devices: Sequence[DeviceSlots], instance: Instance, memo: Memo) -> Choice | None:
    """Choose as the thesis' Max: the first device that nobody uses, as a whole."""
    for index, device in _by_price(devices):
        whole = device.draft.kind.cuts[-1]
        if not device.used and (choice := _on(problem, device, index, instance, whole)) is not None:
            return choice
    return None


def by_turns(problem: Problem, devices: Sequence[DeviceSlots], instance: Instance, memo: Memo) -> Choice | None:
    """Choose as the thesis' round robin: the next of the smallest chunks of all devices, whatever is there already.

    Whose turn it is follows from how many pods have been placed, so that nothing has to be remembered.
    """
    chunks: list[tuple[int, list[PartitionDraft], int]] = []
    for index, device in enumerate(devices):
        cuts = memo.chunks.get(device.state)
        if cuts is None:
            cuts = memo.chunks[device.state] = _chunked(problem, device)
        chunks += [(index, cuts, slot) for slot in range(len(cuts))]
    turn = sum(device.pods for device in devices)
    for step in range(len(chunks)):
        index, cuts, slot = chunks[(turn + step) % len(chunks)]
        if not devices[index].open:
            continue
        after = _with(cuts, slot, instance)
        if fits(problem, DeviceDraft(devices[index].draft.kind, after)):
            kept = [cut for place, cut in enumerate(after) if place < len(devices[index].draft.cuts) or cut.rates]
            if devices[index].draft.kind.geometry is not None:
                kept = after
            return Choice(index, kept, min(slot, len(kept) - 1), 100.0 * (len(chunks) - step) / len(chunks))
    return None


def _chunked(problem: Problem, device: DeviceSlots) -> list[PartitionDraft]:
    """Return the partitions of a device with what is left of it in smallest chunks."""
    cuts, share = list(device.draft.cuts), smallest_chunk(device.draft.kind)
    if device.fixed:
        return cuts
    while fits(problem, DeviceDraft(device.draft.kind, [*cuts, PartitionDraft(share, {})])):
        cuts.append(PartitionDraft(share, {}))
    return cuts


def by_colocation(problem: Problem, devices: Sequence[DeviceSlots], instance: Instance, memo: Memo) -> Choice | None:
    """Choose as KACE: the device where all that then run together are predicted to have the largest sum of throughputs,
    relative to each one's alone (`planners.colocate`). The pod gets the smallest share that meets its objective.

    One more adds at most 1 to the sum, so devices come in the order of what theirs is now, and `MAX_COMPARED` that are
    unlike each other and can take the pod are compared.
    """
    wanted = {kind.name: _able_loads(problem, kind, instance) for kind in problem.fleet}
    order = sorted(
        (-_throughput(problem, device, memo), index)
        for index, device in enumerate(devices)
        if device.open and (loads := wanted[device.draft.kind.name]) and _may_have(device, loads[0].share)
    )
    best: Choice | None = None
    compared: set[DeviceState] = set()
    for _, index in order:
        device = devices[index]
        if device.state in compared:
            continue
        key = (instance, device.state)
        if key not in memo.colocated:
            memo.colocated[key] = _colocated(problem, device, instance, wanted[device.draft.kind.name], memo)
        found = memo.colocated[key]
        if found is None:
            continue
        compared.add(device.state)
        if best is None or found.score > best.score or (found.score == best.score and index < best.device):
            best = msgspec.structs.replace(found, device=index)
        if len(compared) >= MAX_COMPARED:
            break
    return best


def _may_have(device: DeviceSlots, share: int) -> bool:
    """Return whether a device may have a share (‰) left; what of MIG is free is not known by that."""
    return device.draft.kind.geometry is not None or share <= device.free


def _throughput(problem: Problem, device: DeviceSlots, memo: Memo) -> float:
    """Return the predicted sum of throughputs of those on a device, relative to each one's alone."""
    known = memo.throughput.get(device.state)
    if known is None:
        loads = _loads(problem, device.draft.kind, device.draft.cuts)
        known = memo.throughput[device.state] = _relative_throughput(problem, loads[0], loads[1:]) if loads else 0.0
    return known


def _relative_throughput(problem: Problem, target: Load, colocated: Sequence[Load]) -> float:
    score = rank_by_prediction(target, problem.interference, problem.profiles, "relative")
    return score(tuple(colocated)) or 0.0


def _residents(problem: Problem, device: DeviceSlots, memo: Memo) -> tuple[Resident, ...]:
    """Return the pods on a device that have a partition for themselves."""
    known = memo.residents.get(device.state)
    if known is None:
        alone = [(cut.share, *pod) for cut in device.draft.cuts if len(cut.rates) == 1 for pod in cut.rates.items()]
        known = tuple([_resident(problem, device.draft.kind, share, model, rate) for share, model, rate in alone])
        memo.residents[device.state] = known
    return known


def _resident(problem: Problem, kind: Kind, share: int, model: str, rate: float) -> Resident:
    curve, slo = latency_curve(problem, model, kind.name, share), problem.model(model).slo
    tolerates = largest_slowdown(curve, rate, slo) * (1 + ROUNDING_TOLERANCE)
    return Resident(_smallest_load(problem, kind, share, model, rate), tolerates)


def _smallest_load(problem: Problem, kind: Kind, share: int, model: str, rate: float) -> Load:
    """Return a model with the batch that it needs alone on a device."""
    curve = latency_curve(problem, model, kind.name, share)
    batches = smallest_batches([RoundShare(curve, rate, problem.model(model).slo)])
    return Load(model, kind.name, 1 if batches is None else batches[0], share)


def _able_loads(problem: Problem, kind: Kind, instance: Instance) -> list[Load]:
    """Return an instance on each share of a kind that sustains its rate alone, ascending."""
    model, rate = instance.model, instance.rate
    shares = [share for share in kind.cuts if sustained_rate(problem, model, kind, share) >= rate]
    return [_smallest_load(problem, kind, share, model, rate) for share in shares]


def _missed_beside(problem: Problem, residents: Sequence[Resident], new: Load) -> bool:
    """Return whether a resident would miss its target beside a new load. `fits` would say no, after much more work:
    what it assumes of slowdowns only rises from what it is for these batches, where more co-located loads slow no less.
    """
    loads = [each.load for each in residents]
    return any(
        problem.interference.slowdown(each.load, (*loads[:i], *loads[i + 1 :], new)) > each.tolerates
        for i, each in enumerate(residents)
    )


def _colocated(
    problem: Problem, device: DeviceSlots, instance: Instance, wanted: Sequence[Load], memo: Memo
) -> Choice | None:
    """Return the choice of the smallest share with which all on a device meet their targets. wanted: the instance on
    shares that sustain its rate alone, ascending."""
    kind = device.draft.kind
    residents = _residents(problem, device, memo)
    for load in wanted:
        if not _may_have(device, load.share):
            break
        if _missed_beside(problem, residents, load):
            continue
        choice = _on(problem, device, 0, instance, load.share)
        if choice is not None:
            target = _load(problem, kind.name, instance.model, load.share)
            others = [cut for slot, cut in enumerate(choice.cuts) if slot != choice.slot]
            score = _relative_throughput(problem, target, _loads(problem, kind, others))
            return msgspec.structs.replace(choice, score=score)
    return None


def _loads(problem: Problem, kind: Kind, cuts: Sequence[PartitionDraft]) -> list[Load]:
    return [_load(problem, kind.name, model, cut.share) for cut in cuts for model in cut.rates]


def _load(problem: Problem, kind: str, model: str, share: int) -> Load:
    batch, _ = max_throughput_batch(latency_curve(problem, model, kind, share), problem.model(model).slo)
    return Load(model, kind, max(1, batch), share)


def _on(
    problem: Problem, device: DeviceSlots, index: int, instance: Instance, share: int, score: float = 0.0
) -> Choice | None:
    """Return the choice of a partition of that share on a device: one that is empty, or a new one; None where there is
    none that meets all targets."""
    if not device.open:
        return None
    cuts = device.draft.cuts
    for slot in range(len(cuts) + (not device.fixed)):
        if slot < len(cuts):
            if cuts[slot].rates or cuts[slot].share != share:
                continue
            after = _with(cuts, slot, instance)
        else:
            after = [*cuts, PartitionDraft(share, {instance.model: instance.rate})]
        if fits(problem, DeviceDraft(device.draft.kind, after)):
            return Choice(index, _filled(problem, device, after), slot, score)
    return None


def _filled(problem: Problem, device: DeviceSlots, cuts: list[PartitionDraft]) -> list[PartitionDraft]:
    """Return the cuts of an idle MIG device with as many more alike as fit, since it is cut once and for all; those of
    another as they are."""
    if device.draft.kind.geometry is None or device.fixed or len(cuts) != 1:
        return cuts
    while fits(problem, DeviceDraft(device.draft.kind, more := [*cuts, PartitionDraft(cuts[0].share, {})])):
        cuts = more
    return cuts


def _with(cuts: Sequence[PartitionDraft], slot: int, instance: Instance) -> list[PartitionDraft]:
    before = cuts[slot]
    rates = {**before.rates, instance.model: before.rates.get(instance.model, 0.0) + instance.rate}
    return [*cuts[:slot], PartitionDraft(before.share, rates), *cuts[slot + 1 :]]


def _changed(before: Sequence[PartitionDraft], after: Sequence[PartitionDraft]) -> int:
    """Return which partition of those after has more than before."""
    for slot, cut in enumerate(after):
        if cut.rates and (slot >= len(before) or cut.rates != before[slot].rates):
            return slot
    raise AssertionError("a binding changes a partition")


def _by_price(devices: Sequence[DeviceSlots]) -> list[tuple[int, DeviceSlots]]:
    """Return the devices with their indices, the cheapest kinds first; those without a price last."""

    def price(pair: tuple[int, DeviceSlots]) -> float:
        cost = pair[1].draft.kind.price
        return math.inf if cost is None else cost

    return sorted(enumerate(devices), key=price)


RULES: dict[str, Rule] = {
    "score": by_score,
    "hetsev": by_hetsev,
    "min": by_minimum,
    "max": by_maximum,
    "roundrobin": by_turns,
    "colocate": by_colocation,
}
