"""Plan by HetSev: which kind of device each instance gets, by price, and co-location of instances of unlike models.

HetSev (Electronics 2023), section 4. An instance is a model on a fixed part of a device: half of it, as in the pairs
that section 3 studies, or the smallest larger part that meets its target. The number of a model's instances on each
kind is what its rate takes, of the kind that costs least for it (section 4.1, the selection policy). Then Algorithm 1:

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

from collections import Counter
from collections.abc import Sequence
from functools import partial
from statistics import median

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    DeviceDraft,
    PartitionDraft,
    build_plan,
    footprint,
    latency_curve,
    max_throughput_batch,
    sorted_by_price,
)
from cotenant.planners.cluster import fits, place_on_smallest_cluster
from cotenant.planners.kind_by_kind import instance_count

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
    """Describe a model's instances on a kind. capacity: requests/s of one; batch: its largest."""

    kind: Kind
    share: int
    capacity: float
    batch: int

    def cost(self, rate: float) -> float:
        """Return what the instances for a rate cost: by price and share, or by share where devices have no price."""
        return instance_count(rate, self.capacity) * self.share * (self.kind.price or 1.0)


def plan(problem: Problem) -> Plan:
    """Plan by HetSev; what no device takes is unserved."""
    pending: dict[str, list[Pending]] = {kind.name: [] for kind in problem.fleet}
    for model, rate in problem.rates.items():
        for name, instances in _instances(problem, model, rate).items():
            pending[name] += instances
    devices: list[DeviceDraft] = []
    for kind in sorted_by_price(problem.fleet):
        waiting = pending[kind.name]
        devices += place_on_smallest_cluster([kind], len(waiting), partial(schedule, problem, waiting))
    return build_plan(problem, "hetsev", devices)


def _instances(problem: Problem, model: str, rate: float) -> dict[str, list[Pending]]:
    """Return a model's instances by kind: of the cheapest kind for its rate, and of the next for what that lacks
    devices for."""
    types = [made for kind in problem.fleet if (made := _instance_type(problem, model, kind)) is not None]
    instances = {}
    while rate > 0 and types:
        cheapest = min(types, key=lambda each: (each.cost(rate), -each.capacity))
        types.remove(cheapest)
        needed = instance_count(rate, cheapest.capacity)
        # No device has two of one model.
        count = needed if cheapest.kind.count is None else min(needed, cheapest.kind.count)
        if count:
            memory = footprint(problem, cheapest.kind.name, model, cheapest.batch)
            one = min(cheapest.capacity, rate / needed)
            one = one if count == needed else cheapest.capacity
            instances[cheapest.kind.name] = [Pending(model, cheapest.share, memory, one)] * count
            rate = 0.0 if count == needed else rate - one * count
    return instances


def _instance_type(problem: Problem, model: str, kind: Kind) -> InstanceType | None:
    """Return what an instance of a model is on a kind; None where no part of a device meets its target."""
    half = max((cut for cut in kind.cuts if cut <= WHOLE // 2), default=kind.cuts[0])
    for share in kind.cuts:
        batch, capacity = max_throughput_batch(
            latency_curve(problem, model, kind.name, share), problem.model(model).slo
        )
        if share >= half and batch:
            return InstanceType(kind, share, capacity, batch)
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
