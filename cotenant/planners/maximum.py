"""Plan by the NTUA thesis' Max (section 9.2.2): each workload has a device to itself, as with NVIDIA's device plugin.

No device is cut and nothing is shared. A rate beyond a device is split into equal parts. Kinds of devices are tried in
order of price; workloads for which no device is left would wait, and are unserved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, fits_device
from cotenant.planners.kind_by_kind import instance_count, plan_kind_by_kind, sustained_rate

MAX_DEVICES = 100_000  # of one model: a plan lists each


def plan(problem: Problem) -> Plan:
    """Plan a device for each workload."""
    return plan_kind_by_kind(problem, "max", lambda kind, rates: _place(problem, kind, rates))


def _place(problem: Problem, kind: Kind, rates: Mapping[str, float]) -> list[DeviceDraft]:
    whole = kind.cuts[-1]
    placed, left = [], math.inf if kind.count is None else kind.count
    for model, rate in rates.items():
        count = instance_count(rate, sustained_rate(problem, model, kind, whole))
        if not count or not left:
            continue
        if min(count, left) > MAX_DEVICES:
            raise PlanError(
                f"model {model!r}: its rate takes {count} devices, more than the {MAX_DEVICES} that a plan of 'max' may"
                " have of a model; lower the rate, or the count of devices"
            )
        cuts = [PartitionDraft(whole, {model: rate / count})]
        if fits_device(problem, kind, cuts):
            placed.append(DeviceDraft(kind, cuts, int(min(count, left))))
            left -= placed[-1].count
    return placed
