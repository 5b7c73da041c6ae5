"""Plan by iGniter: batch and least share in closed form, then placement where interference takes the least more.

iGniter (TPDS 2022, Algorithms 1 and 2), InSS' third baseline: devices are shared in space only, one model on each
partition. A model that receives R requests/s gathers ⌈R · SLO/2⌉ in half of its target, which is its batch. Its lower
bound of resources is the least share on which that batch takes half of the target alone. Models come in descending
order of that bound. Each goes to the device on which its arrival takes the least share in all: every model there whose
batch then takes more than half of its target gets one step more, until none does. Where no device has that much left,
it gets a new one.

Where the published program differs, or the paper is silent:

- shares are the legal ones of the device, and a step is the next of these; iGniter's unit is 2.5 %;
- the closed form of the lower bound is the inverse of iGniter's latency in the share, and the least legal share for
  which the profile's latency meets the target is the same number: profiles made from iGniter's coefficients give the
  published plan, batch by batch and share by share;
- a profile's latency contains the transfer of its inputs, which iGniter overlaps with the batch before, so that its
  batch is smaller by the factor of 1 + R · transfer, less than 4 % for its models;
- interference is the problem's; it is iGniter's where the problem names that predictor;
- a share must also keep up with the rate, which iGniter's batch implies unless the profile has no batch as large;
- a rate beyond a whole device, at which iGniter stops, is split into equal parts;
- kinds of devices are tried in order of price; what does not fit is unserved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    latency_curve,
    partitions_with_batches,
    slowdown,
)
from cotenant.planners.kind_by_kind import instance_count, most_instances, plan_kind_by_kind
from cotenant.predictors import Load


class Workload(msgspec.Struct, frozen=True):
    """Describe a model on a partition of its own. rate: requests/s; share: ‰."""

    model: str
    rate: float
    batch: int
    share: int


def plan(problem: Problem) -> Plan:
    """Plan by iGniter; what no device takes is unserved."""
    return plan_kind_by_kind(problem, "igniter", lambda kind, rates: _provision(problem, kind, rates))


def _provision(problem: Problem, kind: Kind, rates: Mapping[str, float]) -> list[DeviceDraft]:
    """Place workloads on devices of one kind (Algorithm 1)."""
    workloads = [each for model, rate in rates.items() for each in _workloads(problem, kind, model, rate)]
    devices: list[tuple[Workload, ...]] = []
    for workload in sorted(workloads, key=lambda workload: -workload.share):
        tried: dict[tuple[Workload, ...], tuple[Workload, ...] | None] = {}
        for device in devices:
            if device not in tried:
                tried[device] = _allocate(problem, kind, (*device, workload))
        grown = {device: after for device, after in tried.items() if after is not None}
        if grown:
            best = min(grown, key=lambda device: _total(grown[device]) - _total(device))
            devices[devices.index(best)] = grown[best]
        elif kind.count is None or len(devices) < kind.count:
            alone = _allocate(problem, kind, (workload,))
            devices += [] if alone is None else [alone]
    return [DeviceDraft(kind, [_draft(workload) for workload in device]) for device in devices]


def _workloads(problem: Problem, kind: Kind, model: str, rate: float) -> list[Workload]:
    """Return the fewest equal parts of a rate that have a lower bound of resources; none where no rate has one."""
    slo = problem.model(model).slo
    curve = latency_curve(problem, model, kind.name, kind.cuts[-1])
    largest = bisect_right(curve, slo / 2)  # batch that takes half of the target; longer batches take longer
    if not largest:
        return []
    # Where it is the largest of all, more rows gather than it has, and it need but keep up.
    most = largest / curve[-1] if largest == len(curve) else largest / (slo / 2)
    fewest = instance_count(rate, most)
    for count in (fewest, fewest + 1):  # one more where rounding made the batch too large by one
        part = rate / count
        batch = min(len(curve), math.ceil(part * slo / 2 * (1 - ROUNDING_TOLERANCE)))
        for share in kind.cuts:
            workload = Workload(model, part, batch, share)
            if _keeps(problem, kind, workload, ()):
                return [workload] * most_instances(model, kind, count)
    return []


def _allocate(problem: Problem, kind: Kind, workloads: tuple[Workload, ...]) -> tuple[Workload, ...] | None:
    """Grow the shares on one device until every workload meets its target beside the others (Algorithm 2); None where
    that takes more than the device has."""
    if kind.max_partitions is not None and len(workloads) > kind.max_partitions:
        return None
    while _total(workloads) <= WHOLE:
        late = [not _keeps(problem, kind, each, workloads[:i] + workloads[i + 1 :]) for i, each in enumerate(workloads)]
        if not any(late):
            batches = [[each.batch] for each in workloads]
            fits = partitions_with_batches(problem, kind, [_draft(each) for each in workloads], batches)
            return None if fits is None else workloads
        grown = []
        for workload, is_late in zip(workloads, late, strict=True):
            share = next((cut for cut in kind.cuts if cut > workload.share), None) if is_late else workload.share
            if share is None:
                return None
            grown.append(msgspec.structs.replace(workload, share=share))
        workloads = tuple(grown)
    return None


def _keeps(problem: Problem, kind: Kind, workload: Workload, others: Sequence[Workload]) -> bool:
    """Return whether a batch takes at most half of its target beside others, and keeps up with its rate."""
    curve = latency_curve(problem, workload.model, kind.name, workload.share)
    if workload.batch > len(curve):
        return False
    beside = [[_load(kind, other)] for other in others]
    took = curve[workload.batch - 1] * slowdown(problem, _load(kind, workload), beside)
    keeps_up = workload.batch >= workload.rate * took * (1 - ROUNDING_TOLERANCE)
    return keeps_up and 2 * took <= problem.model(workload.model).slo


def _load(kind: Kind, workload: Workload) -> Load:
    return Load(workload.model, kind.name, workload.batch, workload.share)


def _draft(workload: Workload) -> PartitionDraft:
    return PartitionDraft(workload.share, {workload.model: workload.rate}, batches={workload.model: workload.batch})


def _total(workloads: Sequence[Workload]) -> int:
    return sum(workload.share for workload in workloads)
