"""Solve the queues of lanes, many in one computation, and cache them: plans that are compared differ in few lanes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from cotenant.core.profile import Profile
from cotenant.planners.forecast.bulk_queue import solve_queues
from cotenant.planners.forecast.poisson_quadrature import MAX_STRIDE
from cotenant.planners.forecast.queue_batch import Array, QueueBatch

MAX_BATCH_STATES = 64  # rows of a batch; beyond, groups of requests count as one
CACHED_LANES = 4096  # lanes whose solutions are cached
MAX_LANES_TOGETHER = 32  # lanes solved in one computation
DEVIATION = 0.8  # mean over standard deviation, of a normal distribution


class LaneQueue(msgspec.Struct, frozen=True):
    """Describe one model on one lane.

    rate: requests/s of one worker; workers: of the model on all lanes; variation: standard deviation of a batch's
    latency over its median.
    """

    model: str
    profile: Profile
    share: int
    procs: int
    batch: int
    slowdown: float
    rate: float
    slo: float
    workers: int
    variation: float

    @property
    def busy(self) -> float:
        """Return the fraction of its time that a worker would need for the rate in full batches."""
        return self.rate * self.batch_seconds(self.batch) / self.batch

    def batch_seconds(self, rows: float) -> float:
        """Return the mean seconds of a batch of `rows` on average, up to the largest; below one row, of none or one."""
        curve = self.profile.curve(self.share, self.procs)
        if rows >= self.batch:
            return self.slowdown * curve[self.batch - 1]
        whole = int(rows)
        low = curve[whole - 1] if whole else 0.0
        return self.slowdown * (low + (rows - whole) * (curve[whole] - low))


class QueueSolution(msgspec.Struct, frozen=True):
    """Hold the stationary behaviour of one queue. cost: seconds of the lane per request.

    immediate: the fraction of requests that find the lane idle and take `solo_latency` seconds. below: the fraction of
    requests that are answered otherwise, within each of BELOW (as fractions of the target).
    """

    attainment: float
    cost: float
    immediate: float
    solo_latency: float
    below: Array


_cache: dict[tuple[LaneQueue, ...], tuple[QueueSolution, ...]] = {}


def queue_solutions(lanes: Sequence[tuple[LaneQueue, ...]]) -> list[tuple[QueueSolution, ...]]:
    """Return the solutions of every lane's queues; those not in the cache are computed together."""
    solutions = {lane: _cache.get(lane) for lane in lanes}
    missing = [lane for lane, solution in solutions.items() if solution is None and lane]
    if len(_cache) + len(missing) > CACHED_LANES:
        _cache.clear()
    for start in range(0, len(missing), MAX_LANES_TOGETHER):
        together = missing[start : start + MAX_LANES_TOGETHER]
        solved = iter(_solved(together))
        for lane in together:
            solutions[lane] = _cache[lane] = tuple(next(solved) for _ in lane)
    return [solutions[lane] or () for lane in lanes]


def _solved(lanes: Sequence[tuple[LaneQueue, ...]]) -> list[QueueSolution]:
    queues = [queue for lane in lanes for queue in lane]
    group_sizes = [-(-queue.batch // MAX_BATCH_STATES) for queue in queues]
    curves = [
        queue.profile.curve(queue.share, queue.procs)[: queue.batch][g - 1 :: g]
        for queue, g in zip(queues, group_sizes, strict=True)
    ]
    batch = np.array([len(curve) for curve in curves])
    seconds = np.zeros((len(queues), int(batch.max()) + 2))
    for row, curve in zip(seconds, curves, strict=True):
        row[1 : len(curve) + 1] = curve
        row[len(curve) + 1 :] = curve[-1]
    seconds *= np.array([queue.slowdown for queue in queues])[:, None]
    queue_batch = QueueBatch(
        lane=np.repeat(np.arange(len(lanes)), [len(lane) for lane in lanes]),
        batch=batch,
        rate=np.array([queue.rate / g for queue, g in zip(queues, group_sizes, strict=True)]),
        slo=np.array([queue.slo for queue in queues]),
        lanes=np.array([float(queue.workers) for queue in queues]),
        stride=np.array([min(queue.workers * g, MAX_STRIDE) for queue, g in zip(queues, group_sizes, strict=True)]),
        seconds=seconds,
        caution=1 + DEVIATION * np.array([queue.variation for queue in queues]),
    )
    attainment, cost, immediate, below = solve_queues(queue_batch)
    figures = (column.tolist() for column in (attainment, cost, immediate, seconds[:, 1]))
    return [QueueSolution(a, c / g, p, s, row) for a, c, p, s, g, row in zip(*figures, group_sizes, below, strict=True)]
