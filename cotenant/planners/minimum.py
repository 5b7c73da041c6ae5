"""Plan by the NTUA thesis' Min (section 9.2.1): each workload gets the least that a device can be cut into.

Devices with MIG are cut into as many instances as possible, each for one workload. NVIDIA's device plugin hands out a
device without MIG as a whole, so that a workload limited to a quarter of it by MPS leaves the rest idle.

The thesis has a workload violate its objective on a partition that is too small; here its rate is split into equal
parts that such partitions serve, and a model whose target none meets is unserved, as are workloads that would wait.
Kinds of devices are tried in order of price.
"""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft, PartitionDraft
from cotenant.planners.cluster import fits, smallest_chunk
from cotenant.planners.kind_by_kind import plan_kind_by_kind, split_into_instances


def plan(problem: Problem) -> Plan:
    """Plan the smallest partition for each workload."""
    return plan_kind_by_kind(problem, "min", lambda kind, rates: _place(problem, kind, rates))


def _place(problem: Problem, kind: Kind, rates: Mapping[str, float]) -> list[DeviceDraft]:
    share = smallest_chunk(kind)
    devices: list[DeviceDraft] = []
    for model, rate in rates.items():
        for each in split_into_instances(problem, kind, model, rate, share):
            cut = PartitionDraft(share, {each.model: each.rate})
            if kind.geometry is not None and devices:
                larger = DeviceDraft(kind, [*devices[-1].cuts, cut])
                if fits(problem, larger):
                    devices[-1] = larger
                    continue
            alone = DeviceDraft(kind, [cut])
            if (kind.count is None or len(devices) < kind.count) and fits(problem, alone):
                devices.append(alone)
    return devices
