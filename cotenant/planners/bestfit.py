"""Plan by greedy best fit: devices are shared in space only, one model on each partition.

gpulet paper, section 2.3, its spatial baseline after GSLICE: a model gets the smallest share that sustains its rate
within its target, on the device where that leaves the least free. A rate beyond every share saturates partitions of the
share of highest throughput, and takes the smallest share for the rest. The paper leaves the order open: here the
largest shares go first, as in best-fit decreasing. Where interference slows a partition too much for its share, it
takes the next larger one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    fits_device,
    latency_curve,
    max_throughput_batch,
)
from cotenant.planners.kind_by_kind import plan_kind_by_kind


class _Item(msgspec.Struct, frozen=True):
    """Describe a partition to be placed. share: ‰; rate: requests/s."""

    model: str
    share: int
    rate: float


def plan(problem: Problem) -> Plan:
    """Plan by best-fit decreasing, on the cheapest kind first."""
    return plan_kind_by_kind(problem, "bestfit", lambda kind, rates: _pack(problem, kind, rates))


def _pack(problem: Problem, kind: Kind, rates: Mapping[str, float]) -> list[DeviceDraft]:
    devices: list[DeviceDraft] = []
    items = [item for model, rate in rates.items() for item in _items(problem, kind, model, rate)]
    for item in sorted(items, key=lambda item: -item.share):
        _place(problem, kind, devices, item)
    return devices


def _items(problem: Problem, kind: Kind, model: str, rate: float) -> list[_Item]:
    """Return the partitions that a model needs on a kind; none where no share serves it within its target."""
    slo = problem.model(model).slo
    max_rates = {cut: max_throughput_batch(latency_curve(problem, model, kind.name, cut), slo)[1] for cut in kind.cuts}
    largest = max(max_rates, key=lambda cut: (max_rates[cut], -cut))
    if max_rates[largest] == 0 or not fits_device(
        problem, kind, [PartitionDraft(largest, {model: max_rates[largest]})]
    ):
        return []
    saturated = math.floor(rate / max_rates[largest] * (1 + ROUNDING_TOLERANCE))
    if kind.count is not None:  # More than these could not be placed.
        saturated = min(saturated, kind.count * (WHOLE // kind.cuts[0]))
    items = [_Item(model, largest, max_rates[largest])] * saturated
    residual = rate - saturated * max_rates[largest]
    if ROUNDING_TOLERANCE * rate < residual <= max_rates[largest]:
        items.append(_Item(model, next(cut for cut in kind.cuts if max_rates[cut] >= residual), residual))
    return items


def _place(problem: Problem, kind: Kind, devices: list[DeviceDraft], item: _Item) -> None:
    candidates = [device for device in devices if kind.max_partitions is None or len(device.cuts) < kind.max_partitions]
    candidates.sort(key=lambda device: device.free)
    if kind.count is None or len(devices) < kind.count:
        candidates.append(DeviceDraft(kind, []))
    for device in candidates:
        for share in kind.cuts:
            if item.share <= share <= device.free:
                cut = PartitionDraft(share, {item.model: item.rate})
                if fits_device(problem, kind, [*device.cuts, cut]):
                    if not device.cuts:
                        devices.append(device)
                    device.cuts.append(cut)
                    return
