"""Plan by HetSev: which kind of device each instance gets, by price, and co-location of instances of unlike models.

HetSev (Electronics 2023), section 4. An instance is a model on a fixed part of a device: half of it, as in the pairs
that section 3 studies, or the smallest larger part that meets its target. The number of a model's instances on each
kind is what its rate takes, of the kind that costs least for it (section 4.1, the selection policy), and what finds no
device there chooses again among the other kinds, for the paper chooses among available ones. Then Algorithm 1:

1. instances are put into queues by k-means, by L1 distance in memory and model;
2. in each round some are picked from the queues, in proportion to a queue's length times its median waiting time;
3. each goes to a device that has the capacity and no instance of its model (anti-affinity), and of these to the one
   with the most left (worst fit).

Where the paper is silent, or a plan needs more:

- neither the number of queues nor that of instances in a round is given: `QUEUES` and `ROUND`;
- all instances ask at once, so that those of every queue have waited for as many rounds;
- a plan is for given rates: scaling, with launch times, is `control/scaling/hetsev.py`'s, and its threshold of 80 %,
  room for random arrivals, is left to the pipeline as for every planner;
- capacity is the share of the device, its memory, and the targets of all there; a problem has no processors of hosts;
- what no device takes is unserved, where the paper's waits;
- HetSev's cluster is given; see `cluster.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

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
    footprint,
    latency_curve,
    max_throughput_batch,
    sorted_by_price,
)
from cotenant.planners.cluster import fits, place_on_smallest_cluster
from cotenant.planners.kind_by_kind import checked_instances, instance_count

QUEUES = 3  # k
ROUND = 4  # β, instances in the scheduling buffer
MAX_ITERATIONS = 100  # of k-means; it converges within a few


class Pending(msgspec.Struct, frozen=True):
    """Describe an instance that is to be placed. share: ‰; memory: bytes; rate: requests/s."""

    model: str
    share: int
    memory: int
    rate: float


class InstanceType(msgspec.Struct, frozen=True):
    """Describe a model's instances on a kind. capacity: requests/s of one; batch: its largest; price: of a device."""

    kind: Kind
    share: int
    capacity: float
    batch: int
    price: float

    def cost(self, rate: float) -> float:
        """Return what the instances for a rate cost, by price and share."""
        return instance_count(rate, self.capacity) * self.share * self.price


def plan(problem: Problem) -> Plan:
    """Plan by HetSev; what no device takes is unserved. Raises PlanError for more instances than it places."""
    types = {model: _instance_types(problem, model) for model in problem.rates}
    left = {model: rate for model, rate in problem.rates.items() if rate > 0}
    devices: dict[str, list[DeviceDraft]] = {kind.name: [] for kind in problem.fleet}
    while chosen := _chosen(problem, types, left):
        for kind in sorted_by_price(problem.fleet):
            waiting = chosen.get(kind.name, [])
            before = _served(devices[kind.name])
            devices[kind.name] = _with_instances(problem, kind, devices[kind.name], waiting)
            served = _served(devices[kind.name])
            for model in {each.model for each in waiting}:
                left[model] -= served[model] - before[model]
        left = {model: rate for model, rate in left.items() if rate > ROUNDING_TOLERANCE * problem.rates[model]}
    return build_plan(
        problem, "hetsev", [device for kind in sorted_by_price(problem.fleet) for device in devices[kind.name]]
    )


def _chosen(
    problem: Problem, types: Mapping[str, list[InstanceType]], left: Mapping[str, float]
) -> dict[str, list[Pending]]:
    """Return the instances for what is left of the rates, by the kind that costs each model least; it is taken from the
    model's types, so that what finds no device there chooses among the others."""
    chosen: dict[str, list[Pending]] = {}
    for model, rate in left.items():
        if not types[model]:
            continue
        cheapest = min(types[model], key=lambda each: (each.cost(rate), -each.capacity))
        types[model].remove(cheapest)
        needed = instance_count(rate, cheapest.capacity)
        # No device has two of one model.
        count = needed if cheapest.kind.count is None else min(needed, cheapest.kind.count)
        memory = footprint(problem, cheapest.kind.name, model, cheapest.batch)
        one = rate / needed if count == needed else cheapest.capacity
        pending = [Pending(model, cheapest.share, memory, one)] * checked_instances(model, count)
        chosen.setdefault(cheapest.kind.name, []).extend(pending)
    return chosen


def _with_instances(
    problem: Problem, kind: Kind, devices: Sequence[DeviceDraft], instances: Sequence[Pending]
) -> list[DeviceDraft]:
    """Return the devices of a kind with further instances on them, and as few new ones as that takes."""
    if not instances:
        return list(devices)
    there = sum(len(device.cuts) for device in devices)

    def schedule_beside(cluster: list[DeviceDraft]) -> int:
        if len(cluster) < len(devices):
            return 0
        for device, before in zip(cluster, devices, strict=False):
            device.cuts = list(before.cuts)
        return there + schedule(problem, instances, cluster)

    return place_on_smallest_cluster([kind], there + len(instances), schedule_beside)


def _served(devices: Sequence[DeviceDraft]) -> dict[str, float]:
    """Return the requests/s that devices serve, by model; 0 for others."""
    served: dict[str, float] = defaultdict(float)
    for device in devices:
        for cut in device.cuts:
            for model, rate in cut.rates.items():
                served[model] += rate
    return served


def _instance_types(problem: Problem, model: str) -> list[InstanceType]:
    """Return what an instance of a model is on each kind that has devices and a part of one that meets its target."""
    return [
        made for kind in problem.fleet if kind.count != 0 and (made := instance_type(problem, model, kind)) is not None
    ]


def instance_type(problem: Problem, model: str, kind: Kind) -> InstanceType | None:
    """Return what an instance of a model is on a kind; None where no part of a device meets its target.

    Where no kind has a price, all cost alike; else one without a price costs the most, as in `sorted_by_price`.
    """
    price = kind.price
    if price is None:
        price = 1.0 if all(each.price is None for each in problem.fleet) else math.inf
    half = max((cut for cut in kind.cuts if cut <= WHOLE // 2), default=kind.cuts[0])
    for share in kind.cuts:
        batch, capacity = max_throughput_batch(
            latency_curve(problem, model, kind.name, share), problem.model(model).slo
        )
        if share >= half and batch:
            return InstanceType(kind, share, capacity, batch, price)
    return None


def schedule(problem: Problem, instances: Sequence[Pending], cluster: Sequence[DeviceDraft]) -> int:
    """Place instances on the devices of a cluster (Algorithm 1); return how many were placed."""
    queues = queue_by_similarity(instances, QUEUES)
    rounds = placed = 0
    while any(queues):
        rounds += 1
        for instance in pick_fairly(queues, [[float(rounds)] * len(queue) for queue in queues], ROUND):
            placed += _place(problem, cluster, instance)
    return placed


def queue_by_similarity(instances: Sequence[Pending], count: int) -> list[list[Pending]]:
    """Put instances into at most `count` queues by k-means in L1 distance: of memory, over the most that any needs, and
    of models, 1 between two of them.

    Centres begin at the first instance and those farthest from the ones before. A centre is the median memory and the
    most frequent model, which minimise the distances of its queue.
    """
    if not instances:
        return []
    largest = max(each.memory for each in instances) or 1

    def distance(each: Pending, centre: tuple[str, float]) -> float:
        return abs(each.memory - centre[1]) / largest + (each.model != centre[0])

    centres = [(instances[0].model, float(instances[0].memory))]
    while len(centres) < count:
        farthest = max(instances, key=lambda each: min(distance(each, centre) for centre in centres))
        if min(distance(farthest, centre) for centre in centres) == 0:
            break
        centres.append((farthest.model, float(farthest.memory)))
    queues: list[list[Pending]] = []
    for _ in range(MAX_ITERATIONS):
        before, queues = queues, [[] for _ in centres]
        for each in instances:
            queues[min(range(len(centres)), key=lambda i: distance(each, centres[i]))].append(each)
        if queues == before:
            break
        centres = [_centre(queue) if queue else centre for queue, centre in zip(queues, centres, strict=True)]
    return queues


def _centre(queue: Sequence[Pending]) -> tuple[str, float]:
    models = Counter(each.model for each in queue)
    return max(models, key=lambda model: models[model]), median(each.memory for each in queue)


def pick_fairly(queues: list[list[Pending]], waited: Sequence[Sequence[float]], count: int) -> list[Pending]:
    """Take up to `count` instances from the heads of queues, in proportion to length times median waiting time.

    The queue with the largest weight for each that is taken is next, as in highest averages; the instances are in order
    of their queues' weights. waited: rounds, for each instance of each queue.
    """
    weights = [len(queue) * median(times) if queue else 0.0 for queue, times in zip(queues, waited, strict=True)]
    order = sorted(range(len(queues)), key=lambda i: -weights[i])
    taken = [0] * len(queues)
    for _ in range(min(count, sum(map(len, queues)))):
        open_ = [i for i in order if taken[i] < len(queues[i])]
        taken[max(open_, key=lambda i: weights[i] / (taken[i] + 1))] += 1
    picked = [each for i in order for each in queues[i][: taken[i]]]
    for i, number in enumerate(taken):
        del queues[i][:number]
    return picked


def _place(problem: Problem, cluster: Sequence[DeviceDraft], instance: Pending) -> bool:
    """Place an instance by capacity, anti-affinity and worst fit; return whether a device took it."""
    cut = PartitionDraft(instance.share, {instance.model: instance.rate})
    for device in sorted(cluster, key=lambda device: -device.free):
        if any(instance.model in other.rates for other in device.cuts):
            continue
        if fits(problem, DeviceDraft(device.kind, [*device.cuts, cut])):
            device.cuts.append(cut)
            return True
    return False
