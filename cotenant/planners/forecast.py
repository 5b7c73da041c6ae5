"""The referee, second half: what a plan will do under Poisson arrivals.

A partition that runs what waits, up to its largest batch b, is a queue with bulk service (Bailey, 1954; M/G^[1,b]/1 in
Kendall's notation, with service L(n) known for every batch n). It is looked at whenever a model's turn comes, with q
requests waiting: that is a Markov chain. From q ≥ 1 the turn runs n = min(q, b), and then the other models of the
partition run a batch each of what gathered meanwhile; the next turn comes after T = L(n) + V. From q = 0 it comes after
one batch of the others, or, where they are idle too, with the next arrival.

- V is not tracked jointly but as a mean field: each other model k finds min(Poisson(λ_k · c), b_k) requests, where c is
  the length of the very round that V belongs to. It is carried as four atoms: nobody waits, or three around the mean.
- Arrivals during T are Poisson, and spread evenly over it. Where p lanes share a model, each request goes to the lane
  that will be done first, so a lane sees about every p-th arrival of all: counts vary p times less.
- A request that arrives at u waits T - u, then for the full batches before its own, then for its own. One that cannot
  make its target is refused on arrival, and does not wait.

Latencies within one T are uniform between the first and the last arrival of a batch: their distribution is a mixture of
uniforms, weighted with the chain's stationary distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.units import show_share
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.capacity import slowdown
from cotenant.predictors import Load

Array = NDArray[np.float64]

LONGEST = 128  # queue, in requests or groups of them
LARGEST = 64  # batch; larger ones are reckoned in groups of requests
BINS = 256  # of a distribution of latencies
POOL = 8  # lanes of a model beyond these change little
_LOG_FACTORIAL = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, 4096)))))


class ModelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """rate: answers within the target, per second. attainment: the part of all requests that these are.

    p50, p99: latency of the requests that are answered, in seconds; inf where none is.
    """

    rate: float
    attainment: float
    p50: float
    p99: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """models: by name, those with a rate. utilisation: the part of its time that a lane (``cpu0/1``) is busy."""

    models: dict[str, ModelForecast]
    utilisation: dict[str, float]


def forecast(plan: Plan, problem: Problem) -> Forecast:
    """What a plan will do at the rates of the problem; under the objective "rate", at the multiple that it serves.

    Raises PlanError for a placement that was not profiled.
    """
    scale = plan.scale if problem.objective == "rate" else 1.0
    offered = {model: rate * scale for model, rate in problem.rates.items() if rate > 0}
    carried = {model: plan.rate(model) for model in offered}
    lanes = {model: sum(p.procs for _, _, p in plan.placements() if p.model == model) for model in offered}
    seen: dict[str, list[tuple[float, _Turns]]] = {model: [] for model in offered}
    utilisation = {}
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            beside = [_loads(other) for i, other in enumerate(device.partitions) if i != slot]
            carriers, queues = [], []
            for placement, load in zip(partition.placements, _loads(partition), strict=True):
                if placement.model in offered and placement.rate > 0:
                    rate = offered[placement.model] * placement.rate / carried[placement.model]
                    slow = slowdown(problem, load, beside)
                    queue = _Queue(
                        curve=tuple(slow * seconds for seconds in _curve(problem, device, partition, placement)),
                        rate=rate / placement.procs,
                        slo=problem.model(placement.model).slo,
                        pool=min(lanes[placement.model], POOL),
                    )
                    carriers.append((placement.model, rate))
                    queues.append(queue)
            busy = 0.0
            for (name, rate), queue, turns in zip(carriers, queues, _lane(tuple(queues)), strict=True):
                seen[name].append((rate, turns))
                busy += queue.rate * turns.attainment * turns.cost
            utilisation[f"{device.kind}{device.id}/{slot}"] = min(busy, 1.0)
    return Forecast(models={model: _join(seen[model], offered[model]) for model in offered}, utilisation=utilisation)


def attains(plan: Plan, problem: Problem) -> bool:
    """Whether every model with a rate will meet its promise, target and fraction."""
    expected = forecast(plan, problem).models
    return all(expected[name].attainment >= problem.model(name).attainment for name in expected)


class _Queue(msgspec.Struct, frozen=True, dict=True):
    """One model on one lane. curve: seconds of batches 1, 2, …; rate: requests/s of one worker; pool: of how many."""

    curve: tuple[float, ...]
    rate: float
    slo: float
    pool: int

    @cached_property
    def moments(self) -> tuple[Array, Array, Array]:
        """For a mean number that waits: E and E² of the seconds that one batch takes, 0 where nothing waits."""
        batch = len(self.curve)
        mean = np.linspace(0.0, batch + 4 * math.sqrt(batch), 65)
        counts = _counts(mean, batch, 1)
        seconds = np.concatenate(([0.0], self.curve))
        return mean, counts @ seconds, counts @ seconds**2


class _Turns(msgspec.Struct, frozen=True):
    """What the chain of one queue says. weight, low, width: the mixture of uniforms, of requests in time.

    cost: seconds of the lane per request.
    """

    attainment: float
    cost: float
    weight: Array
    low: Array
    width: Array


@lru_cache(maxsize=1024)
def _lane(queues: tuple[_Queue, ...]) -> tuple[_Turns, ...]:
    """The chains of one lane. Plans that are compared differ in few lanes, hence the cache."""
    grains = [-(-len(queue.curve) // LARGEST) for queue in queues]
    coarse = [_coarse(queue, grain) for queue, grain in zip(queues, grains, strict=True)]
    turns = [_turns(queue, coarse[:i] + coarse[i + 1 :]) for i, queue in enumerate(coarse)]
    return tuple(msgspec.structs.replace(t, cost=t.cost / grain) for t, grain in zip(turns, grains, strict=True))


def _coarse(queue: _Queue, grain: int) -> _Queue:
    """Very large batches, in groups of `grain` requests."""
    return msgspec.structs.replace(
        queue,
        curve=queue.curve[grain - 1 :: grain],
        rate=queue.rate / grain,
        pool=min(queue.pool * grain, POOL),
    )


def _curve(problem: Problem, device: Device, partition: Partition, placement: Placement) -> tuple[float, ...]:
    profile = problem.profile(placement.model, device.kind)
    curve = () if profile is None else profile.curve(partition.share, placement.procs)[: placement.batch]
    if len(curve) < placement.batch or math.isinf(curve[-1]):
        raise PlanError(
            f"no forecast for {placement.model!r} in batches of {placement.batch} on {show_share(partition.share)} of"
            f" {device.kind!r}: that was not profiled"
        )
    return curve


def _loads(partition: Partition) -> list[Load]:
    return [Load(placement.model, placement.batch, partition.share) for placement in partition.placements]


def _counts(mean: Array, top: int, pool: int) -> Array:
    """P(k arrivals), k = 0 … top on a new last axis, the last with the tail; every `pool`-th of a Poisson stream."""
    k = np.arange(top * pool + pool)
    spread = np.maximum(mean * pool, 1e-300)[..., None]
    pmf = np.exp(k * np.log(spread) - spread - _LOG_FACTORIAL[: len(k)])
    if pool > 1:
        # An arrival is the lane's with a phase that is uniform in 0 … pool - 1.
        cumulated = np.cumsum(pmf, axis=-1)
        below = cumulated.reshape(*mean.shape, top + 1, pool).mean(axis=-1)
        pmf = np.diff(below, axis=-1, prepend=0.0)
    pmf = pmf[..., : top + 1]
    pmf[..., top] = np.maximum(1.0 - pmf[..., :top].sum(axis=-1), 0.0)
    result: Array = pmf
    return result


def _rounds(queue: _Queue, others: Sequence[_Queue]) -> tuple[Array, Array, float]:
    """Seconds from one turn with 0 … b requests run to the next, and their probabilities, an atom or four each.

    Also how likely the lane is idle when the model's turn comes and nothing waits.
    """
    own = np.concatenate(([0.0], queue.curve))
    if not others:
        return own[:, None], np.ones((len(own), 1)), 1.0
    total = sum(other.rate for other in others)
    length = own.copy()
    # With nothing of its own to run, the model sees the others' rounds; the shortest is one request's.
    length[0] = sum(other.rate * other.curve[0] for other in others) / total
    for _ in range(12):
        first = np.array([np.interp(other.rate * length, *other.moments[:2]) for other in others])
        busy = -np.expm1(-total * length)
        length = own + first.sum(axis=0)
        length[0] /= busy[0]
    second = np.array([np.interp(other.rate * length, *other.moments[::2]) for other in others])
    first = np.array([np.interp(other.rate * length, *other.moments[:2]) for other in others])
    busy = -np.expm1(-total * length)
    mean = first.sum(axis=0) / busy
    square = (first.sum(axis=0) ** 2 + (second - first**2).sum(axis=0)) / busy
    # An empty queue waits for one batch of the others, not for a round of them.
    waiting = sum(-math.expm1(-other.rate * length[0]) for other in others)
    mean[0] = first[:, 0].sum() / waiting
    square[0] = second[:, 0].sum() / waiting
    # Gauss and Hermite's three points.
    apart = math.sqrt(3) * np.sqrt(np.maximum(square - mean**2, 0.0))
    time = own[:, None] + np.stack([0 * mean, np.maximum(mean - apart, 0.0), mean, mean + apart], axis=1)
    weight = np.stack([1 - busy, busy / 6, busy * 2 / 3, busy / 6], axis=1)
    return time, weight, float((1 - busy[0]) * queue.rate / (queue.rate + total))


def _turns(queue: _Queue, others: Sequence[_Queue]) -> _Turns:
    batch, curve, slo = len(queue.curve), np.array(queue.curve), queue.slo
    time, chance, instant = _rounds(queue, others)
    full = float((time[batch] * chance[batch]).sum())
    longest = _longest(queue, (time * chance).sum(axis=1))

    # Axes: requests waiting at the turn, atom of the time to the next, arrivals within it.
    waiting = np.arange(longest + 1)
    run = np.minimum(waiting, batch)
    time, chance = time[run], chance[run]
    # An empty queue's turn comes after a batch of the others, or at once with its own next arrival.
    chance[0, 0] = 0.0
    chance[0] *= (1 - instant) / max(chance[0].sum(), 1e-300)
    mean = queue.rate * float(time.max())
    # What comes beyond the longest queue and a batch is refused, however much it is.
    top = min(math.ceil(mean + 6 * math.sqrt(mean) + 4), longest + batch)
    weight = chance[..., None] * _counts(queue.rate * time, top, queue.pool)
    arrivals = np.arange(top + 1)
    rest = waiting - run

    # Before them the batches that will run next, as far as the target lets any wait: how many of the arrivals each
    # takes, between which of the waits, and how many of those are admitted. Admission reckons with full batches.
    number = rest[:, None] // batch + np.arange(top // batch + 2)[:, None, None]
    first = np.minimum(np.maximum(number * batch - rest[:, None], 0), arrivals)
    last = np.minimum(np.maximum((number + 1) * batch - rest[:, None], 0), arrivals)
    gap = time[..., None] / np.maximum(arrivals, 1)
    wait = (number * full)[..., None] + gap * (arrivals - last)[:, :, None]
    width = gap * (last - first)[:, :, None]
    within = np.minimum(np.maximum(slo - curve[-1] - wait, 0.0) / np.maximum(width, 1e-12), 1.0)
    taken = within * (last - first)[:, :, None]
    # A batch that is not next still gathers.
    size = rest[:, None] + arrivals - number * batch + np.rint(queue.rate * full * number).astype(np.int64)
    low = wait + curve[np.minimum(np.maximum(size, 1), batch) - 1][:, :, None]
    admitted = taken.sum(axis=0)

    after = np.minimum(rest[:, None, None] + admitted, longest)
    floor = after.astype(np.int64)
    up = after - floor
    origin = waiting[:, None, None] * (longest + 1)
    moves = np.bincount((origin + floor).ravel(), (weight * (1 - up)).ravel(), (longest + 1) ** 2)
    moves += np.bincount((origin + np.minimum(floor + 1, longest)).ravel(), (weight * up).ravel(), (longest + 1) ** 2)
    matrix = moves.reshape(longest + 1, longest + 1)
    matrix[0, 1] += instant
    balance = matrix.T - np.eye(longest + 1)
    balance[-1] = 1.0
    stationary = np.linalg.solve(balance, np.eye(longest + 1)[-1])

    weight *= stationary[:, None, None]
    at_once = float(stationary[0]) * instant
    asked = queue.rate * float(stationary @ (chance * time).sum(axis=1)) + at_once
    mass = np.append((weight * taken).ravel(), at_once if curve[0] <= slo else 0.0) / asked
    kept = mass > 1e-7
    edges, below = _distribution(
        mass[kept], np.append(low.ravel(), curve[0])[kept], np.append((width * within).ravel(), 0.0)[kept]
    )
    return _Turns(
        attainment=float(mass.sum()),
        cost=float(stationary[1:] @ curve[run[1:] - 1] / (stationary[1:] @ run[1:])),
        weight=np.diff(below),
        low=edges[:-1],
        width=np.diff(edges),
    )


def _longest(queue: _Queue, rounds: Array) -> int:
    """The longest queue to tell apart: what rounds gather, and admission lets none grow beyond the target."""
    usual = 1
    for _ in range(8):
        mean = queue.rate * rounds[min(usual, len(queue.curve))]
        usual, before = math.ceil(mean + 6 * math.sqrt(mean) + 4), usual
        if usual <= before:
            break
    mean = queue.rate * float(rounds[-1])
    if usual > len(queue.curve):
        # Beyond a full batch the queue drifts down by b - mean a round, against a variance of mean.
        usual += LONGEST if mean >= len(queue.curve) else min(LONGEST, math.ceil(6 * mean / (len(queue.curve) - mean)))
    return max(1, min(usual, LONGEST, int(len(queue.curve) * (queue.slo // rounds[-1] + 1))))


def _join(seen: Sequence[tuple[float, _Turns]], offered: float) -> ModelForecast:
    """One model over all its lanes. What no lane takes is not answered."""
    rate = sum(rate * turns.attainment for rate, turns in seen)
    if rate == 0:
        return ModelForecast(rate=0.0, attainment=0.0, p50=math.inf, p99=math.inf)
    weight = np.concatenate([rate * turns.weight for rate, turns in seen])
    low = np.concatenate([turns.low for _, turns in seen])
    width = np.concatenate([turns.width for _, turns in seen])
    edges, below = _distribution(weight, low, width)
    p50, p99 = (float(np.interp(part * below[-1], below, edges)) for part in (0.5, 0.99))
    return ModelForecast(rate=rate, attainment=min(rate / offered, 1.0), p50=p50, p99=p99)


def _distribution(weight: Array, low: Array, width: Array) -> tuple[Array, Array]:
    """A mixture of uniforms: how much lies below each of the edges of BINS equal bins, exactly."""
    if not len(low):
        return np.zeros(2), np.zeros(2)
    high = low + np.maximum(width, 1e-9)
    slope = weight / (high - low)
    start, end = float(low.min()), float(high.max())
    edges = np.linspace(start, end, BINS + 1)
    below = np.zeros(BINS + 1)
    for sign, corner in ((1.0, low), (-1.0, high)):
        index = np.minimum(((corner - start) * (BINS / (end - start))).astype(np.int64), BINS - 1) + 1
        slopes = np.cumsum(np.bincount(index, slope, BINS + 1))
        below += sign * (slopes * edges - np.cumsum(np.bincount(index, slope * corner, BINS + 1)))
    return edges, np.maximum.accumulate(np.maximum(below, 0.0))
