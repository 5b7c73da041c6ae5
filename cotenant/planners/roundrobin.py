"""Plan by the NTUA thesis' round robin (section 9.2.3): workloads go to the smallest partitions in turn, and share.

All devices are cut into the smallest chunks: MIG instances, or quarters of a device without MIG. Workloads go to one
chunk after the other, whatever is there already.

The thesis limits each of n workloads in a chunk to 1/n of it by MPS; here they take turns, each for a batch. It knows
no interference and lets objectives be violated; here a chunk that cannot take a workload within all targets is passed
over, and a workload that none takes is unserved. A rate beyond a chunk is split into equal parts. The thesis' cluster
is given; see `cluster.py`.
"""

from __future__ import annotations

from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, build_plan
from cotenant.planners.cluster import fits, instances_for_any_kind, place_on_smallest_cluster, smallest_chunk
from cotenant.planners.kind_by_kind import Instance


def plan(problem: Problem) -> Plan:
    """Plan workloads on the smallest partitions in turn."""
    instances = [
        each
        for model, rate in problem.rates.items()
        if rate > 0
        for each in instances_for_any_kind(problem, model, rate, smallest_chunk)
    ]

    def schedule(cluster: list[DeviceDraft]) -> int:
        chunks = [(device, slot) for device in cluster for slot in range(_chunks(problem, device))]
        turn = placed = 0
        full: set[tuple[int, Instance]] = set()  # chunks that did not take such an instance, nor will with more in them
        for each in instances:
            for step in range(len(chunks)):
                chunk = (turn + step) % len(chunks)
                if (chunk, each) not in full and _put(problem, *chunks[chunk], each):
                    turn, placed = chunk + 1, placed + 1
                    break
                full.add((chunk, each))
        return placed

    return build_plan(problem, "roundrobin", place_on_smallest_cluster(problem.fleet, len(instances), schedule))


def _chunks(problem: Problem, device: DeviceDraft) -> int:
    """Cut an empty device into the smallest chunks; return how many."""
    share = smallest_chunk(device.kind)
    while fits(problem, cut := DeviceDraft(device.kind, [*device.cuts, PartitionDraft(share, {})])):
        device.cuts = cut.cuts
    return len(device.cuts)


def _put(problem: Problem, device: DeviceDraft, slot: int, instance: Instance) -> bool:
    """Put an instance into a chunk, where that meets all targets; return whether it did."""
    before = device.cuts[slot]
    rates = {**before.rates, instance.model: before.rates.get(instance.model, 0.0) + instance.rate}
    device.cuts[slot] = PartitionDraft(before.share, rates)
    if fits(problem, device):
        return True
    device.cuts[slot] = before
    return False
