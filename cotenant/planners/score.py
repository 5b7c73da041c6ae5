"""Plan by the NTUA thesis' scores (chapter 8): each workload goes to the partition that comes nearest to its objective.

A workload's objective is a throughput. On a partition it is expected to reach what it reaches alone, less what each
co-located one takes. Its error is the distance of that from its objective, relative to it. A partition's score is the
mean of 1 / (1 + (error + 1)²) over workloads below their objectives, and of 1 / (1 + error) over the others, weighted
by the part of all that each are, times the part of the partition that is idle, times 100 (section 8.3.1). So a
partition that just meets an objective scores best. A node's score is that of its best partition; a node that is empty
is cut anew, in the way that scores best. A MIG device is cut into equal instances. On others a workload is limited by
MPS to the smallest of whole, half and quarter that is expected to meet its objective, and all of a device is one
partition.

What a workload reaches alone is the throughput that its profile has within its latency target. What it loses is, to
another in its partition, the time in which that runs; to one in another partition of its device, what the problem's
interference predictor says, which is the thesis' collaborative filter where it is `svd`.

Where the thesis differs:

- workloads come in the order of the problem's models; the thesis breaks ties between nodes at random, here the first
  node has it;
- its scheduler violates objectives where it must; here a workload goes only where all targets are met, and is unserved
  where no node meets them;
- a rate beyond a device is split into equal parts;
- utilisation is the time that planned batches take, not what the driver reports;
- the cluster is given there; see `cluster.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    build_plan,
    latency_curve,
    max_throughput_batch,
)
from cotenant.planners.cluster import fits, instances_for_any_kind, place_on_smallest_cluster
from cotenant.planners.kind_by_kind import Instance, sustained_rate
from cotenant.predictors import Load

MPS_PARTS = (4, 2, 1)  # into which the thesis' characterisation divides a device without MIG


class Pod(msgspec.Struct, frozen=True):
    """Describe a workload on a partition. objective: requests/s; expected: what it is expected to reach of them."""

    objective: float
    expected: float

    @property
    def error(self) -> float:
        return abs(self.objective - self.expected) / self.objective


class Binding(msgspec.Struct, frozen=True):
    """Describe where a workload may go: the partitions of the device as they are then, and the score."""

    cuts: list[PartitionDraft]
    score: float


def plan(problem: Problem) -> Plan:
    """Plan by scores; what no device takes within all targets is unserved."""
    instances = [
        each
        for model, rate in problem.rates.items()
        if rate > 0
        for each in instances_for_any_kind(problem, model, rate, lambda kind: kind.cuts[-1])
    ]

    known: dict[tuple[object, ...], Binding | None] = {}  # of an instance on devices that are alike

    def bind(device: DeviceDraft, instance: Instance) -> Binding | None:
        key = (instance, device.kind.name, *((cut.share, *cut.rates.items()) for cut in device.cuts))
        if key not in known:
            known[key] = node_binding(problem, device, instance)
        return known[key]

    def schedule(cluster: list[DeviceDraft]) -> int:
        placed = 0
        for each in instances:
            bindings = [(device, binding) for device in cluster if (binding := bind(device, each)) is not None]
            if bindings:
                device, binding = max(bindings, key=lambda choice: choice[1].score)
                device.cuts = binding.cuts
                placed += 1
        return placed

    devices = place_on_smallest_cluster(problem.fleet, len(instances), schedule)
    return build_plan(problem, "score", devices)


def violated_score(error: float) -> float:
    """Return score_1 of the thesis: of a workload below its objective, by its relative error."""
    return 1 / (1 + (error + 1) ** 2)


def met_score(error: float) -> float:
    """Return score_2 of the thesis: of a workload that reaches its objective, by its relative error."""
    return 1 / (1 + error)


def partition_score(pods: Sequence[Pod], utilisation: float) -> float:
    """Return the score of a partition with these workloads, from 0 to 100. utilisation: from 0 to 1."""
    violated = [violated_score(pod.error) for pod in pods if pod.expected < pod.objective]
    met = [met_score(pod.error) for pod in pods if pod.expected >= pod.objective]
    # Each mean is weighted by the part of all workloads that it is of, so that their sum is one mean over all.
    return 100 * (1 - utilisation) * (sum(violated) + sum(met)) / len(pods)


def node_binding(problem: Problem, device: DeviceDraft, instance: Instance) -> Binding | None:
    """Return the best place of a workload on a device; None where none meets all targets."""
    bind = _mig_bindings if device.kind.geometry is not None else _mps_bindings
    return max(bind(problem, device, instance), key=lambda binding: binding.score, default=None)


def _mig_bindings(problem: Problem, device: DeviceDraft, instance: Instance) -> list[Binding]:
    """Return a binding to each partition of a device; for an empty one, to one of each way to cut it."""
    layouts = [device.cuts] if device.cuts else [_equal_cuts(problem, device.kind, cut) for cut in device.kind.cuts]
    bindings = []
    for cuts in layouts:
        for slot, cut in enumerate(cuts):
            if instance.model in cut.rates or (slot and not cut.rates and not cuts[slot - 1].rates):
                continue
            busy = sum(busy_parts(problem, device.kind, cut).values())
            after = [
                *cuts[:slot],
                PartitionDraft(cut.share, cut.rates | {instance.model: instance.rate}),
                *cuts[slot + 1 :],
            ]
            if fits(problem, DeviceDraft(device.kind, after)):
                bindings.append(Binding(after, partition_score(_pods(problem, device.kind, after, [slot]), busy)))
    return bindings


def _mps_bindings(problem: Problem, device: DeviceDraft, instance: Instance) -> list[Binding]:
    """Return the binding of a workload on the smallest share that is expected to meet its objective."""
    kind = device.kind
    objective = instance.rate * (1 - ROUNDING_TOLERANCE)
    for share in mps_shares(problem, kind, instance):
        if share > device.free:
            break
        after = [*device.cuts, PartitionDraft(share, {instance.model: instance.rate})]
        if not fits(problem, DeviceDraft(kind, after)):  # what most devices are refused by
            continue
        pods = _pods(problem, kind, after, range(len(after)))
        if pods[-1].expected >= objective:
            busy = sum(cut.share / WHOLE * sum(busy_parts(problem, kind, cut).values()) for cut in device.cuts)
            return [Binding(after, partition_score(pods, busy))]
    return []


def mps_shares(problem: Problem, kind: Kind, instance: Instance) -> list[int]:
    """Return the shares (‰) that MPS would limit a workload to on which it reaches its objective alone, ascending."""
    shares = [max((cut for cut in kind.cuts if cut <= WHOLE // parts), default=kind.cuts[0]) for parts in MPS_PARTS]
    objective = instance.rate * (1 - ROUNDING_TOLERANCE)
    return [
        share for share in dict.fromkeys(shares) if sustained_rate(problem, instance.model, kind, share) >= objective
    ]


def _equal_cuts(problem: Problem, kind: Kind, share: int) -> list[PartitionDraft]:
    cuts: list[PartitionDraft] = []
    while fits(problem, DeviceDraft(kind, [*cuts, PartitionDraft(share, {})])):
        cuts.append(PartitionDraft(share, {}))
    return cuts


def _pods(problem: Problem, kind: Kind, cuts: Sequence[PartitionDraft], slots: Sequence[int]) -> list[Pod]:
    """Return the workloads of these partitions of a device, as expected beside each other."""
    pods = []
    loads = [_loads(problem, kind, cut) for cut in cuts]
    for slot in slots:
        busy = busy_parts(problem, kind, cuts[slot])
        beside = [load for i, own in enumerate(loads) if i != slot for load in own]
        for load in loads[slot]:
            alone = sustained_rate(problem, load.model, kind, load.share)
            lost = sum(part for model, part in busy.items() if model != load.model)
            lost += sum(1 - 1 / problem.interference.slowdown(load, (other,)) for other in beside)
            pods.append(Pod(cuts[slot].rates[load.model], alone * (1 - lost)))
    return pods


def busy_parts(problem: Problem, kind: Kind, cut: PartitionDraft) -> dict[str, float]:
    """Return the part of the time that each model of a partition takes."""
    return {
        model: rate / most if (most := sustained_rate(problem, model, kind, cut.share)) else 1.0
        for model, rate in cut.rates.items()
    }


def _loads(problem: Problem, kind: Kind, cut: PartitionDraft) -> list[Load]:
    """Return the models of a partition, each with the batch that sustains most."""
    batches = {
        model: max_throughput_batch(latency_curve(problem, model, kind.name, cut.share), problem.model(model).slo)[0]
        for model in cut.rates
    }
    return [Load(model, kind.name, max(1, batch), cut.share) for model, batch in batches.items()]
