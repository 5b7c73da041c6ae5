"""The referee, second half: what a plan will do under Poisson arrivals.

A partition that runs what waits, up to its largest batch b, is a queue with bulk service (Bailey, 1954; M/G^[1,b]/1 in
Kendall's notation, with service L(n) known for every batch n). It is looked at whenever a model's turn comes, with q
requests waiting: that is a Markov chain. From q ≥ 1 the turn runs n = min(q, b), and then the other models of the
partition run a batch each of what gathered meanwhile; the next turn comes after T = L(n) + V. From q = 0 it comes after
one batch of the others, or, where they are idle too, with the next arrival.

- V is not tracked jointly but as a mean field: each other model k finds min(Poisson(λ_k · c), b_k) requests, where c is
  the length of the very round that V belongs to. It is carried as three atoms: nobody else waits, and mean ± deviation.
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

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Partition, Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import slowdown
from cotenant.predictors import Load

Array = NDArray[np.float64]

LONGEST = 256  # queue lengths that are told apart at most
POOL = 8  # lanes of a model beyond these change little
_LOG_FACTORIAL = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, POOL * (2 * LONGEST + 2))))))


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
    """What a plan will do at the rates of the problem; under the objective "rate", at the multiple that it serves."""
    scale = plan.scale if problem.objective == "rate" else 1.0
    offered = {model: rate * scale for model, rate in problem.rates.items() if rate > 0}
    carried = {model: plan.rate(model) for model in offered}
    lanes = {model: sum(p.procs for _, _, p in plan.placements() if p.model == model) for model in offered}
    seen: dict[str, list[tuple[float, _Turns]]] = {model: [] for model in offered}
    utilisation = {}
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            beside = [_loads(other) for i, other in enumerate(device.partitions) if i != slot]
            queues = []
            for placement, load in zip(partition.placements, _loads(partition), strict=True):
                if not carried.get(placement.model):
                    continue
                profile = problem.profiles[placement.model, device.kind]
                alone = profile.curve(partition.share, placement.procs)[: placement.batch]
                rate = offered[placement.model] * placement.rate / carried[placement.model] / placement.procs
                slow = slowdown(problem, load, beside)
                slo = problem.model(placement.model).slo
                queues.append(_Queue(placement.model, np.array(alone) * slow, rate, slo, lanes[placement.model]))
            busy = 0.0
            for queue in queues:
                turns = _turns(queue, [other for other in queues if other is not queue])
                seen[queue.model].append((queue.rate, turns))
                busy += queue.rate * turns.attainment * turns.cost
            utilisation[f"{device.kind}{device.id}/{slot}"] = min(busy, 1.0)
    return Forecast(
        models={model: _join(seen[model], offered[model]) for model in offered}, utilisation=utilisation
    )


def attains(plan: Plan, problem: Problem) -> bool:
    """Whether every model with a rate will meet its promise, target and fraction."""
    expected = forecast(plan, problem).models
    return all(expected[name].attainment >= problem.model(name).attainment for name in expected)


class _Queue:
    """One model on one lane. curve[n - 1]: seconds of n rows; rate: requests/s of one worker; pool: workers of all."""

    def __init__(self, model: str, curve: Array, rate: float, slo: float, pool: int) -> None:
        self.model, self.curve, self.rate, self.slo = model, curve, rate, slo
        self.pool = min(max(pool, 1), POOL)
        self.batch = len(curve)
        # Moments of one batch's time over the mean number that waits, for the rounds of others.
        self.means = np.linspace(0.0, self.batch + 4 * math.sqrt(self.batch), 65)
        runs = np.concatenate(([0.0], curve))
        counts = _counts(self.means, self.batch, 1)
        self.first = counts @ runs
        self.second = counts @ runs**2


class _Turns(msgspec.Struct, frozen=True):
    """What the chain of one queue says. weight, low, width: the mixture of uniforms, of requests in time.

    cost: seconds of the lane per request.
    """

    attainment: float
    cost: float
    weight: Array
    low: Array
    width: Array


def _loads(partition: Partition) -> list[Load]:
    return [Load(placement.model, placement.batch, partition.share) for placement in partition.placements]


def _counts(mean: Array, top: int, pool: int) -> Array:
    """P(k arrivals), k = 0 … top on a new last axis, the last one with the tail; every `pool`-th of a Poisson stream."""
    k = np.arange(top * pool + pool)
    with np.errstate(divide="ignore"):
        logs = np.log(mean * pool)[..., None]
    pmf = np.exp(np.where(k == 0, 0.0, k * logs) - (mean * pool)[..., None] - _LOG_FACTORIAL[: len(k)])
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
    """Seconds from one turn with 0 … b requests run to the next, and their probabilities, three atoms each.

    Also how likely the lane is idle when the model's turn comes and nothing waits.
    """
    own = np.concatenate(([0.0], queue.curve))
    time = np.repeat(own[:, None], 3, axis=1)
    weight = np.zeros_like(time)
    weight[:, 0] = 1.0
    if not others:
        return time, weight, 1.0
    total = sum(other.rate for other in others)
    length = own.copy()
    # With nothing of its own to run, the model sees the others' rounds; the shortest is one request's.
    length[0] = sum(other.rate * other.curve[0] for other in others) / total
    first = second = np.zeros_like(own)
    for _ in range(12):
        firsts = [np.interp(other.rate * length, other.means, other.first) for other in others]
        first = sum(firsts, np.zeros_like(own))
        empty = np.exp(-total * length)
        length = own + first
        length[0] /= 1 - empty[0]
    empty = np.exp(-total * length)
    seconds = [np.interp(other.rate * length, other.means, other.second) for other in others]
    firsts = [np.interp(other.rate * length, other.means, other.first) for other in others]
    first = sum(firsts, np.zeros_like(own))
    second = first**2 + sum((b - a**2 for a, b in zip(firsts, seconds, strict=True)), np.zeros_like(own))
    mean, square = first / (1 - empty), second / (1 - empty)
    # An empty queue waits for one batch of the others, not for a round of them.
    waiting = np.array([1 - math.exp(-other.rate * length[0]) for other in others])
    mean[0] = sum(a[0] for a in firsts) / waiting.sum()
    square[0] = sum(b[0] for b in seconds) / waiting.sum()
    spread = np.sqrt(np.maximum(square - mean**2, 0.0))
    time[:, 1] += np.maximum(mean - spread, 0.0)
    time[:, 2] += mean + spread
    weight[:, 0] = empty
    weight[:, 1] = weight[:, 2] = (1 - empty) / 2
    return time, weight, float(empty[0] * queue.rate / (queue.rate + total))


def _turns(queue: _Queue, others: Sequence[_Queue]) -> _Turns:
    batch, curve, slo = queue.batch, queue.curve, queue.slo
    time, chance, instant = _rounds(queue, others)
    full = float((time[batch] * chance[batch]).sum())
    longest = _longest(queue, full)

    # Axes: requests waiting at the turn, atom of its length, arrivals until the next.
    waiting = np.arange(longest + 1)
    run = np.minimum(waiting, batch)
    time, chance = time[run], chance[run]
    chance[0, 0], chance[0, 1:] = 0.0, chance[0, 1:] / max(chance[0, 1:].sum(), 1e-300) * (1 - instant)
    mean = queue.rate * float(time.max())
    top = min(2 * LONGEST, math.ceil(mean + 6 * math.sqrt(mean) + 4))
    weight = chance[..., None] * _counts(queue.rate * time, top, queue.pool)
    arrivals = np.arange(top + 1)
    rest = (waiting - run)[:, None]
    total = rest + arrivals

    # Batch by batch of those that will run next: how many of the arrivals are in it, and when they will be answered.
    step = time[..., None] / np.maximum(arrivals, 1)
    parts = []
    for turn in range(-(-(longest + top) // batch)):
        first = np.clip(turn * batch - rest, 0, arrivals)
        last = np.clip((turn + 1) * batch - rest, 0, arrivals)
        # A batch that is not next still gathers.
        more = round(queue.rate * turn * full)
        size = np.clip(total - turn * batch + more, 1, batch)
        done = turn * full + curve[size - 1]
        low = done[:, None, :] + step * (arrivals - last)[:, None, :]
        width = step * (last - first)[:, None, :]
        if low.min() > slo:
            break
        within = np.clip((slo - low) / np.maximum(width, 1e-12), 0.0, 1.0)
        parts.append((low, width * within, within * (last - first)[:, None, :]))
    admitted = sum((part[2] for part in parts), np.zeros_like(weight))

    after = np.minimum(rest[..., None] + admitted, longest)
    floor = after.astype(np.int64)
    up = after - floor
    origin = waiting[:, None, None] * (longest + 1)
    size = (longest + 1) ** 2
    moves = np.bincount((origin + floor).ravel(), (weight * (1 - up)).ravel(), size)
    moves += np.bincount((origin + np.minimum(floor + 1, longest)).ravel(), (weight * up).ravel(), size)
    matrix = moves.reshape(longest + 1, longest + 1)
    matrix[0, 1] += instant
    balance = matrix.T - np.eye(longest + 1)
    balance[-1] = 1.0
    stationary = np.linalg.solve(balance, np.eye(longest + 1)[-1])

    weight *= stationary[:, None, None]
    at_once = float(stationary[0]) * instant
    asked = float((weight * arrivals).sum()) + at_once
    low = np.concatenate([part[0][part[2] > 0] for part in parts] + [curve[:1]])
    width = np.concatenate([part[1][part[2] > 0] for part in parts] + [[0.0]])
    mass = np.concatenate([(weight * part[2])[part[2] > 0] for part in parts] + [[at_once * (curve[0] <= slo)]])
    kept = mass > 1e-7 * asked
    return _Turns(
        attainment=float(mass.sum()) / asked,
        cost=float(stationary[1:] @ curve[run[1:] - 1] / (stationary[1:] @ run[1:])),
        weight=mass[kept] / asked,
        low=low[kept],
        width=width[kept],
    )


def _longest(queue: _Queue, full: float) -> int:
    """The longest queue to tell apart: admission lets none grow beyond the target, and few come near that."""
    mean = queue.rate * full
    usual = math.inf
    if mean < queue.batch:
        usual = max(queue.batch, mean + 6 * math.sqrt(mean)) + 6 * mean / (queue.batch - mean) + 4
    return max(1, int(min(queue.batch * (queue.slo // full + 1), usual, LONGEST)))


def _join(seen: Sequence[tuple[float, _Turns]], offered: float) -> ModelForecast:
    """One model over all its lanes. What no lane takes is not answered."""
    rate = sum(rate * turns.attainment for rate, turns in seen)
    if rate == 0:
        return ModelForecast(rate=0.0, attainment=0.0, p50=math.inf, p99=math.inf)
    weight = np.concatenate([rate * turns.weight for rate, turns in seen])
    low = np.concatenate([turns.low for _, turns in seen])
    width = np.concatenate([turns.width for _, turns in seen])
    return ModelForecast(
        rate=rate,
        attainment=min(rate / offered, 1.0),
        p50=_quantile(weight, low, width, 0.5),
        p99=_quantile(weight, low, width, 0.99),
    )


def _quantile(weight: Array, low: Array, width: Array, part: float) -> float:
    """The value below which `part` of a mixture of uniforms lies."""
    wanted = part * float(weight.sum())
    slope = weight / np.maximum(width, 1e-12)
    left, right = float(low.min()), float((low + width).max())
    for _ in range(16):
        middle = (left + right) / 2
        below = float(np.minimum(np.maximum(middle - low, 0.0) * slope, weight).sum())
        left, right = (middle, right) if below < wanted else (left, middle)
    return right
