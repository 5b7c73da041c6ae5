"""The models of a lane, and what their chains say.

Those of many lanes are one computation, and each lane is reckoned once: plans that are compared differ in few.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from cotenant.core.profile import Profile
from cotenant.planners.forecast.bulk_queue import solve_queues
from cotenant.planners.forecast.poisson_quadrature import POOL
from cotenant.planners.forecast.queue_batch import Array, QueueBatch

LARGEST = 64  # batch; larger ones are reckoned in groups of requests
KNOWN = 4096  # lanes that are remembered
TOGETHER = 32  # lanes in one computation
DEVIATION = 0.8  # mean over standard deviation, of a normal distribution


class LaneQueue(msgspec.Struct, frozen=True):
    """One model on one lane. slow: how many times longer a batch takes than alone on the device. rate: requests/s of
    one worker. pool: of how many on all lanes. varies: standard deviation of a batch over its median."""

    model: str
    profile: Profile
    share: int
    procs: int
    batch: int
    slow: float
    rate: float
    slo: float
    pool: int
    varies: float

    @property
    def busy(self) -> float:
        """The part of its time that a worker would need for such a rate in full batches."""
        return self.rate * self.takes(self.batch) / self.batch

    def takes(self, rows: float) -> float:
        """Seconds of a batch of so many rows on average, up to the largest: of less than one, now and then."""
        curve = self.profile.curve(self.share, self.procs)
        if rows >= self.batch:
            return self.slow * curve[self.batch - 1]
        whole = int(rows)
        low = curve[whole - 1] if whole else 0.0
        return self.slow * (low + (rows - whole) * (curve[whole] - low))


class QueueSolution(msgspec.Struct, frozen=True):
    """What the chain of one queue says. cost: seconds of the lane per request.

    at_once: the part of the requests that find all idle, and are answered after `single` seconds. below: the part of
    the others that is answered within each of BELOW, as parts of the target.
    """

    attainment: float
    cost: float
    at_once: float
    single: float
    below: Array


_known: dict[tuple[LaneQueue, ...], tuple[QueueSolution, ...]] = {}


def queue_solutions(lanes: Sequence[tuple[LaneQueue, ...]]) -> list[tuple[QueueSolution, ...]]:
    """The chains of every lane; those that are not known yet in one computation."""
    answers = {lane: _known.get(lane) for lane in lanes}
    fresh = [lane for lane, answer in answers.items() if answer is None and lane]
    if len(_known) + len(fresh) > KNOWN:
        _known.clear()
    for start in range(0, len(fresh), TOGETHER):
        some = fresh[start : start + TOGETHER]
        turns = iter(_solved(some))
        for lane in some:
            answers[lane] = _known[lane] = tuple(next(turns) for _ in lane)
    return [answers[lane] or () for lane in lanes]


def _solved(lanes: Sequence[tuple[LaneQueue, ...]]) -> list[QueueSolution]:
    queues = [queue for lane in lanes for queue in lane]
    grain = [-(-queue.batch // LARGEST) for queue in queues]
    curves = [
        queue.profile.curve(queue.share, queue.procs)[: queue.batch][g - 1 :: g]
        for queue, g in zip(queues, grain, strict=True)
    ]
    batch = np.array([len(curve) for curve in curves])
    seconds = np.zeros((len(queues), int(batch.max()) + 2))
    for row, curve in zip(seconds, curves, strict=True):
        row[1 : len(curve) + 1] = curve
        row[len(curve) + 1 :] = curve[-1]
    seconds *= np.array([queue.slow for queue in queues])[:, None]
    chains = QueueBatch(
        lane=np.repeat(np.arange(len(lanes)), [len(lane) for lane in lanes]),
        batch=batch,
        rate=np.array([queue.rate / g for queue, g in zip(queues, grain, strict=True)]),
        slo=np.array([queue.slo for queue in queues]),
        lanes=np.array([float(queue.pool) for queue in queues]),
        pool=np.array([min(queue.pool * g, POOL) for queue, g in zip(queues, grain, strict=True)]),
        seconds=seconds,
        caution=1 + DEVIATION * np.array([queue.varies for queue in queues]),
    )
    attainment, cost, at_once, below = solve_queues(chains)
    figures = (it.tolist() for it in (attainment, cost, at_once, seconds[:, 1]))
    return [QueueSolution(a, c / g, p, s, row) for a, c, p, s, g, row in zip(*figures, grain, below, strict=True)]
