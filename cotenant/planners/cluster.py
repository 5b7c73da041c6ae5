"""Place instances of models on a cluster of given devices: what schedulers of clusters share, who are given devices.

Such a scheduler spreads over whatever devices there are. Where a problem says only how many there may be, its cluster
is the smallest on which it places everything, of equally many devices of each kind as far as there are as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.planners.capacity import DeviceDraft, fits_device, sorted_by_price
from cotenant.planners.kind_by_kind import Instance, checked_instances, instance_count, sustained_rate
from cotenant.planners.problem import Problem

GROWTH = 1.2  # of a cluster, until everything is placed; the smallest is then found by bisection

# Places instances on the devices of a cluster; returns how many were placed.
Schedule = Callable[[list[DeviceDraft]], int]


def place_on_smallest_cluster(kinds: Sequence[Kind], instances: int, schedule: Schedule) -> list[DeviceDraft]:
    """Return the devices of the smallest cluster on which a scheduler places everything, or as much as on the largest
    where it never does. instances: how many there are to be placed."""
    ordered = sorted_by_price(kinds)
    largest = min(instances, sum(instances if kind.count is None else kind.count for kind in ordered))

    def scheduled(size: int) -> tuple[list[DeviceDraft], int]:
        cluster = [DeviceDraft(kind, []) for kind, count in _dealt(ordered, size) for _ in range(count)]
        count = schedule(cluster)
        for device in cluster:
            device.cuts = [cut for cut in device.cuts if cut.rates]
        return [device for device in cluster if device.cuts], count

    short, size = 0, min(1, largest)
    placed, most = scheduled(size)
    while most < instances and size < largest:
        short, size = size, min(largest, max(size + 1, math.floor(size * GROWTH)))
        placed, most = scheduled(size)
    short = short if most == instances else 0
    while size - short > 1:
        middle = (short + size) // 2
        fewer, count = scheduled(middle)
        if count >= most:
            placed, size = fewer, middle
        else:
            short = middle
    return placed


def _dealt(kinds: Sequence[Kind], size: int) -> list[tuple[Kind, int]]:
    """Return how many devices of each kind a cluster of a size has: equally many, as far as there are."""
    counts = [0] * len(kinds)
    while size:
        open_ = [i for i, kind in enumerate(kinds) if kind.count is None or counts[i] < kind.count]
        for i in open_[:size]:
            counts[i] += 1
        size -= min(size, len(open_))
    return list(zip(kinds, counts, strict=True))


def instances_for_any_kind(problem: Problem, model: str, rate: float, share: Callable[[Kind], int]) -> list[Instance]:
    """Split a model's rate into the fewest equal parts that any kind which serves the model at all sustains on one
    partition of a share (‰); no more than a limited fleet has room for.

    So a scheduler may choose among all kinds. [] where no kind serves the model. Raises PlanError for too many.
    """
    rates = [sustained_rate(problem, model, kind, share(kind)) for kind in problem.fleet if kind.count != 0]
    served = [most for most in rates if most > 0]
    count = instance_count(rate, min(served, default=0.0))
    room = sum(math.inf if kind.count is None else kind.count * (WHOLE // kind.cuts[0]) for kind in problem.fleet)
    return [Instance(model, rate / count)] * checked_instances(model, int(min(count, room))) if count else []


def fits(problem: Problem, device: DeviceDraft) -> bool:
    """Return whether a device's partitions are legal beside each other, fit its memory and meet all targets."""
    most = device.kind.max_partitions
    within = device.free >= 0 and (most is None or len(device.cuts) <= most)
    return within and fits_device(problem, device.kind, device.cuts)


def smallest_chunk(kind: Kind) -> int:
    """Return the smallest share (‰) that the NTUA thesis gives to a workload: the smallest MIG instance, or a quarter
    of a GPU without MIG, below which too many failed for want of memory (section 9.2.1)."""
    if kind.geometry is not None:
        return kind.cuts[0]
    return next((cut for cut in kind.cuts if cut >= WHOLE // 4), kind.cuts[-1])
