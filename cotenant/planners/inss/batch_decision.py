"""Decide on batches as InSS does: equation 2, and Algorithm 1 (BDA) with the flag as the text describes it.

In Algorithm 1 as printed, a model counts as served once some batch violated a constraint. The text says the opposite,
"all constraints are satisfied, the algorithm … updates flag_i to true", and so does the published program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from cotenant.planners.inss.cluster import MAX_BATCH, Cluster, Provisioning
from cotenant.predictors.analytic import task_latency

# Of models that none was found for, and of co-located ones during the search: as in the published program.
DEFAULT_BATCH = 4


class BatchDecision(msgspec.Struct, frozen=True):
    """Hold batches by model, and whether each meets all constraints."""

    batches: tuple[int, ...]
    feasible: tuple[bool, ...]


def longest_latency(batch: int, seconds: float, rate: float, queued: float) -> float:
    """Return the longest latency of a request by equation 2, in seconds.

    seconds: of a batch; rate: requests/s, evenly spaced; queued: requests that wait already. The batch in flight is
    taken to have just begun. Of an empty queue the first request waits longest, for its batch to fill.
    """
    longest = task_latency(1 if rate else batch, batch, rate, seconds, seconds)
    if queued + 1 >= batch:
        longest = max(longest, task_latency(queued + 1, batch, rate, seconds, seconds))
    return longest


def search_batch(seconds: Callable[[int], float], slo: float, rate: float, queued: float) -> int:
    """Return the largest batch that Algorithm 1 finds for one model, by a binary search; 0 where it finds none.

    seconds: of a batch, infinite for one that is not possible; rate: requests/s; queued: requests that wait already.
    The search stops where a batch meets the target and sustains too little, as printed, even where a larger one would
    do (line 10).
    """
    low, high, best = 1, MAX_BATCH, 0
    while low <= high:
        middle = (low + high) // 2
        took = seconds(middle)
        if longest_latency(middle, took, rate, queued) > slo:
            high = middle - 1
        elif middle >= rate * took:
            best, low = middle, middle + 1
        else:
            break
    return best


def decide_batches(
    cluster: Cluster, where: Provisioning, rates: Sequence[float], queued: Sequence[float]
) -> BatchDecision:
    """Return the largest batches that Algorithm 1 finds. rates, queued: by model."""
    batches = [DEFAULT_BATCH] * len(cluster.models)
    feasible = [False] * len(cluster.models)
    for i, (device, share) in enumerate(zip(where.devices, where.shares, strict=True)):
        if not share:
            continue
        curve = cluster.curve(i, device, share)

        def seconds(batch: int, i: int = i, curve: Sequence[float] = curve) -> float:
            if batch > len(curve) or not _fits(cluster, where, batches, i, batch):
                return math.inf
            return curve[batch - 1] * cluster.slowdown(i, batch, where, [DEFAULT_BATCH] * len(batches))

        best = search_batch(seconds, float(cluster.slos[i]), rates[i], queued[i])
        feasible[i] = best > 0
        batches[i] = best or max(1, min(DEFAULT_BATCH, len(curve)))
    return BatchDecision(tuple(batches), tuple(feasible))


def _fits(cluster: Cluster, where: Provisioning, batches: Sequence[int], model: int, batch: int) -> bool:
    """Tell whether a device's models fit with this batch of one of them (constraint 4a)."""
    device = where.devices[model]
    models = where.on(device)
    chosen = [batch if i == model else batches[i] for i in models]
    return cluster.fits(device, models, [where.shares[i] for i in models], chosen)
