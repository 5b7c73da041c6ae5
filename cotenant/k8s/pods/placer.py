"""Decide which share each waiting pod gets: from all nodes and pods as they are, to what is to be done.

Nothing is remembered between two decisions but what saves work: what was decided stands in the pods and in ConfigMaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cotenant.core.model import Kind
from cotenant.core.units import WHOLE, show_rate, show_seconds, show_share
from cotenant.errors import PlanError
from cotenant.k8s.pods.catalogue import Catalogue
from cotenant.k8s.pods.eligibility import may_run
from cotenant.k8s.pods.inventory import DeviceReport, NodeDevices
from cotenant.k8s.pods.request import SharePlacement, SharePod
from cotenant.k8s.pods.rules import Memo, Rule
from cotenant.k8s.pods.slots import Choice, DeviceSlots
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, batched_partitions, footprint
from cotenant.planners.kind_by_kind import Instance, sustained_rate

MAX_MEMO = 200_000


class Placed(msgspec.Struct, frozen=True):
    """A pod gets a share, or goes on with the one that was written down for it."""

    pod: SharePod
    placement: SharePlacement


class NoRoom(msgspec.Struct, frozen=True):
    """No device has the share that a pod asks for, and what is short."""

    pod: SharePod
    reason: str


class Recut(msgspec.Struct, frozen=True):
    """An idle GPU is to be cut into MIG instances of these shares (‰), for a pod that waits for one."""

    pod: SharePod
    node: str
    device: str
    shares: tuple[int, ...]


Decision = Placed | NoRoom | Recut


class ClusterDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a node. numbers: of its partitions, by their place among `slots`. instances: UUIDs of those that are
    MIG instances."""

    node: NodeDevices
    report: DeviceReport
    slots: DeviceSlots
    numbers: tuple[int, ...] = ()


class Placer:
    """Decide by a rule. Feed it all that there is; it answers for the pods that wait."""

    def __init__(self, catalogue: Catalogue, rule: Rule) -> None:
        self._catalogue = catalogue
        self._rule = rule
        self._memo = Memo()
        self._nodes: dict[str, tuple[NodeDevices, list[SharePlacement], list[ClusterDevice]]] = {}

    def learn(self, catalogue: Catalogue) -> None:
        """Decide by other profiles and another predictor from now on."""
        self._catalogue = catalogue
        self._memo.clear()
        self._nodes.clear()

    def decide(
        self, nodes: Sequence[NodeDevices], pods: Sequence[SharePod], reserved: Mapping[str, SharePlacement]
    ) -> list[Decision]:
        """Decide for each pod that waits, the oldest first. reserved: by uid of pods, what was written down for them or
        offered to them. It stands while its device does, also for pods that do not wait here: of a scheduler that has
        not bound them yet."""
        self._memo.limit(MAX_MEMO)
        if self._catalogue.forget():
            self._memo.clear()
            self._nodes.clear()
        gated = [pod for pod in pods if pod.gated and pod.placement is None]
        waiting = sorted((pod for pod in gated if not pod.leaving), key=lambda pod: (pod.created, pod.key))
        if not waiting:
            return []
        kept = {pod.uid: reserved[pod.uid] for pod in waiting if pod.uid in reserved}
        if kept:
            there = {(node.name, device.uuid) for node in nodes for device in node.devices}
            kept = {uid: placement for uid, placement in kept.items() if (placement.node, placement.device) in there}
        undecided = {pod.uid for pod in gated} - kept.keys()
        holding = {uid: placement for uid, placement in reserved.items() if uid not in undecided}
        holding |= {pod.uid: pod.placement for pod in pods if pod.placement is not None}
        devices = self.devices(nodes, holding.values())
        decisions: list[Decision] = []
        for pod in waiting:
            if pod.uid in kept:
                decisions.append(Placed(pod, kept[pod.uid]))
                continue
            decision, changed = self._decide_one(pod, devices)
            decisions.append(decision)
            if changed is not None:
                index, device = changed
                devices[index] = device
        return decisions

    def place(self, pod: SharePod, nodes: Sequence[NodeDevices], holding: Iterable[SharePlacement]) -> Decision:
        """Decide for one pod that is to run on one of these nodes."""
        return self._decide_one(pod, self.devices(nodes, holding))[0]

    def devices(self, nodes: Sequence[NodeDevices], holding: Iterable[SharePlacement]) -> list[ClusterDevice]:
        """Return all devices of known kinds with what is placed on each."""
        placed: dict[str, list[SharePlacement]] = {}
        for each in holding:
            placed.setdefault(each.node, []).append(each)
        before, self._nodes = self._nodes, {}
        for node in sorted(nodes, key=lambda node: node.name):
            here = placed.get(node.name, [])
            known = before.get(node.name)
            if known is None or known[0] is not node or known[1] != here:
                known = node, here, self._devices_of(node, here)
            self._nodes[node.name] = known
        return [device for _, _, devices in self._nodes.values() for device in devices]

    def _devices_of(self, node: NodeDevices, placed: Sequence[SharePlacement]) -> list[ClusterDevice]:
        devices = []
        for report in node.devices:
            kind = self._kind(report)
            if kind is not None:
                here = [each for each in placed if each.device == report.uuid]
                devices.append(self._device(node, report, kind, here))
        return devices

    def _kind(self, report: DeviceReport) -> Kind | None:
        kind = self._catalogue.kinds.get(report.kind)
        if kind is None or kind.memory <= report.memory:
            return kind
        return msgspec.structs.replace(kind, memory=report.memory)

    def _device(
        self, node: NodeDevices, report: DeviceReport, kind: Kind, placed: Sequence[SharePlacement]
    ) -> ClusterDevice:
        rates: dict[int, dict[str, float]] = {}
        shares: dict[int, int] = {}
        fixed = report.mig and not (report.recut and not placed)
        if fixed:
            for slot, instance in enumerate(report.instances):
                shares[slot], rates[slot] = instance.share, {}
        places = {instance.uuid: slot for slot, instance in enumerate(report.instances)}
        lost = False
        for each in placed:
            slot = places.get(each.visible, -1) if report.mig else each.slot
            if slot < 0 or (fixed and slot not in shares):
                lost = True  # its MIG instance is gone, and what became of the pod is not known
                continue
            own = rates.setdefault(slot, {})
            shares.setdefault(slot, each.share)
            alias = self._catalogue.alias(each.model, each.slo)
            own[alias] = own.get(alias, 0.0) + each.rate
        numbers = tuple(sorted(shares))
        draft = DeviceDraft(kind, [PartitionDraft(shares[slot], rates[slot]) for slot in numbers])
        usable = node.open and not lost and (bool(numbers) or not fixed)
        slots = DeviceSlots(draft=draft, open=usable, fixed=fixed, pods=len(placed))
        return ClusterDevice(node=node, report=report, slots=slots, numbers=numbers)

    def _asked(self, pod: SharePod) -> tuple[Instance, Problem | None]:
        instance = Instance(self._catalogue.alias(pod.model, pod.slo), pod.rate)
        return instance, self._catalogue.problem() if self._catalogue.knows(pod.model) else None

    def _decide_one(
        self, pod: SharePod, devices: Sequence[ClusterDevice]
    ) -> tuple[Decision, tuple[int, ClusterDevice] | None]:
        """Decide for one pod. Returns the device that has changed by it, too, with its index."""
        instance, problem = self._asked(pod)
        if problem is None:
            known = ", ".join(sorted({model for model, _ in self._catalogue.profiles}))
            return NoRoom(pod, f"no profile of model {pod.model!r}; available: {known or 'none'}"), None
        slots = _seen_by(pod, devices)
        try:
            choice = self._rule(problem, slots, instance, self._memo)
        except PlanError as error:  # a planner that cannot plan such a problem, or lacks a package
            return NoRoom(pod, str(error)), None
        if choice is None:
            return NoRoom(pod, self._reason(pod, devices, problem, instance)), None
        device = devices[choice.device]
        changed = msgspec.structs.replace(
            device.slots,
            draft=DeviceDraft(device.slots.draft.kind, choice.cuts),
            pods=device.slots.pods + 1,
        )
        fresh = max(device.numbers, default=-1) + 1
        numbers = (*device.numbers, *range(fresh, fresh + len(choice.cuts) - len(device.numbers)))
        if device.report.mig and not device.slots.fixed:
            cuts = _as_instances(choice, device.report)
            if cuts is None:
                closed = msgspec.structs.replace(changed, open=False)
                shares = tuple(cut.share for cut in choice.cuts)
                decision: Decision = Recut(pod, device.node.name, device.report.uuid, shares)
                return decision, (choice.device, msgspec.structs.replace(device, slots=closed, numbers=numbers))
            slot = next(slot for slot, cut in enumerate(cuts) if cut.rates)
            choice = Choice(choice.device, cuts, slot, choice.score)
            draft = DeviceDraft(device.slots.draft.kind, cuts)
            changed = msgspec.structs.replace(changed, draft=draft, fixed=True)
        placement = self._placement(pod, device, choice, numbers[choice.slot], problem, instance)
        return Placed(pod, placement), (
            choice.device,
            msgspec.structs.replace(device, slots=changed, numbers=numbers),
        )

    def _placement(
        self,
        pod: SharePod,
        device: ClusterDevice,
        choice: Choice,
        number: int,
        problem: Problem,
        instance: Instance,
    ) -> SharePlacement:
        report, kind, share = device.report, device.slots.draft.kind, choice.cuts[choice.slot].share
        visible, memory = report.uuid, 0
        if report.mig:
            visible = report.instances[choice.slot].uuid  # which limits memory itself
        else:
            partitions = batched_partitions(problem, kind, choice.cuts)
            assert partitions is not None, "a rule chose partitions that do not fit"
            own = [each for each in partitions[choice.slot].placements if each.model == instance.model]
            memory = footprint(problem, kind.name, instance.model, own[0].batch) or report.memory * share // WHOLE
        return SharePlacement(
            node=device.node.name,
            device=report.uuid,
            visible=visible,
            slot=number,
            share=share,
            memory=memory,
            model=pod.model,
            slo=pod.slo,
            rate=pod.rate,
        )

    def _reason(self, pod: SharePod, devices: Sequence[ClusterDevice], problem: Problem, instance: Instance) -> str:
        """Say what a pod needs, and why there is none. It stands in each pod that waits, so it has no figures that move
        whenever another one comes or goes: all would be written again."""
        asked = f"{pod.model} at {show_rate(pod.rate)} requests/s within {show_seconds(pod.slo)}"
        if not devices:
            return f"{asked}: no node reports a device of a known kind"
        kinds = list(dict.fromkeys(device.slots.draft.kind.name for device in devices))
        if pod.kind and pod.kind not in kinds:
            return f"{asked}: no node reports a device of the kind {pod.kind!r}; available: {', '.join(sorted(kinds))}"
        needs = []
        for name in [pod.kind] if pod.kind else kinds:
            of_kind = [device for device in devices if device.slots.draft.kind.name == name]
            kind = of_kind[0].slots.draft.kind
            share = next(
                (cut for cut in kind.cuts if sustained_rate(problem, instance.model, kind, cut) >= pod.rate), None
            )
            if share is None:
                needs.append(f"no share of one {name} sustains that")
                continue
            able = [slots for slots in _seen_by(pod, of_kind) if slots.open]
            if not able:
                why = "no node takes it"
            elif any(_largest_free(slots) >= share for slots in able):
                why = "where that is free, no partition is within all targets and memory"
            else:
                why = "none has that free"
            needs.append(f"needs {show_share(share)} of one {name}, and {why}")
        return f"{asked}: {'; '.join(needs)}"


def _as_instances(choice: Choice, report: DeviceReport) -> list[PartitionDraft] | None:
    """Return the partitions that a rule wants of an idle GPU, in the order of its MIG instances; None where it is cut
    in another way."""
    wanted = choice.cuts[choice.slot]
    if sorted(cut.share for cut in choice.cuts) != sorted(each.share for each in report.instances):
        return None
    cuts = [PartitionDraft(each.share, {}) for each in report.instances]
    cuts[next(n for n, cut in enumerate(cuts) if cut.share == wanted.share)] = wanted
    return cuts


def _seen_by(pod: SharePod, devices: Sequence[ClusterDevice]) -> list[DeviceSlots]:
    """Return devices as they are for a pod, which may not run on every node, and may want one kind of device."""
    may: dict[str, bool] = {}
    seen = []
    for device in devices:
        name = device.node.name
        if name not in may:
            may[name] = may_run(pod.spec, device.node)
        slots = device.slots
        takes = may[name] and pod.kind in ("", slots.draft.kind.name)
        seen.append(slots if takes or not slots.open else msgspec.structs.replace(slots, open=False))
    return seen


def _largest_free(device: DeviceSlots) -> int:
    """Return the largest share (‰) that a device has for one more pod."""
    if device.fixed:
        return max((cut.share for cut in device.draft.cuts if not cut.rates), default=0)
    return device.draft.free
