"""The referee, second half: what a plan will do under Poisson arrivals.

A partition that runs what waits, up to its largest batch b, is a queue with bulk service (Bailey, 1954; M/G^[1,b]/1 in
Kendall's notation, with service L(n) known for every batch n). It is looked at whenever a model's turn comes, with q
requests waiting: that is a Markov chain. From q ≥ 1 the turn runs n = min(q, b), and then the other models of the
partition run a batch each of what gathered meanwhile; the next turn comes after T = L(n) + V. From q = 0 it comes after
one batch of the others, or, where they are idle too, with the next arrival.

- V is not tracked jointly but as a mean field: each other model k finds min(Poisson(λ_k · c), b_k) requests, where c is
  the length of the very round that V belongs to. It is carried as four atoms: nobody waits, or three around the mean.
- Arrivals during T are Poisson, and spread evenly over it. Where p lanes share a model, each request goes to the lane
  that will be done first. So lanes get as much as they have room for, whatever the plan says; a lane sees about every
  p-th arrival of all, and counts vary p times less; and it sees them in the last p-th of T.
- A request that arrives at u waits T - u, then for the full batches before its own, then for its own. One that cannot
  make its target is refused on arrival, and does not wait.
- Where batches vary, admission adds the mean deviation that a lane has seen. That some of what is admitted at the last
  moment is late all the same is not counted.

Latencies within one T are uniform between the first and the last arrival of a batch: their distribution is a mixture of
uniforms, weighted with the chain's stationary distribution.

Plans are compared by the hundred, so the chains of a whole plan are one computation, and small: a distribution of
counts is a dozen points (`_nodes`), and of long queues not every length is a state. Both are made so that means are
exact; what lies between two states goes to both.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Profile
from cotenant.core.units import show_share
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.applications import plain
from cotenant.planners.capacity import slowdown
from cotenant.predictors import Load

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

LONGEST = 128  # queue, in requests or groups of them
LARGEST = 64  # batch; larger ones are reckoned in groups of requests
STATES = 16  # lengths of a queue that are told apart, all of those up to
EXACT = 8
LENGTHS = 12  # of rounds, at which the mean field is reckoned
BINS = 96  # of a distribution of latencies
POOL = 8  # lanes of a model beyond these change little
LEAST_ROOM = 0.05  # that a lane is taken to have, of its time, however busy others keep it
KNOWN = 4096  # lanes that are remembered
TOGETHER = 32  # lanes in one computation
DEVIATION = 0.8  # mean over standard deviation, of a normal distribution

NODES = 10  # of a distribution of counts
RARE = 1e-7  # what is less likely is left out
TAIL = 1e-4  # what the first and the last of them stand for
STEPS = 16  # rows of the table of nodes for each unit of √mean
ROWS = 14 * STEPS  # where that ends, queues do

STATE = np.arange(STATES)
RAMP = (np.arange(LENGTHS + 1) / LENGTHS) ** 1.5
UNIT = np.eye(STATES)[:, :1]
BELOW = (np.arange(BINS + 1) / BINS) ** 2
EDGES: list[float] = BELOW.tolist()


class ModelForecast(msgspec.Struct, frozen=True, kw_only=True):
    """rate: answers within the target, per second. attainment: the part of all requests that these are.

    p50, p99: latency of the requests that are answered, in seconds; inf where none is.
    """

    rate: float
    attainment: float
    p50: float
    p99: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """models: by name, those with a rate. utilisation: the part of its time that a lane (``cpu0/1``) is busy.

    applications: by name, those with a rate.
    """

    models: dict[str, ModelForecast]
    utilisation: dict[str, float]
    applications: dict[str, ModelForecast] = {}


def forecast(plan: Plan, problem: Problem) -> Forecast:
    """What a plan will do at the rates of the problem; under the objective "rate", at the multiple that it serves.

    Raises PlanError for a placement that was not profiled.
    """
    if problem.applications:
        found = forecast(plan, plain(problem, plan.split))
        return msgspec.structs.replace(found, applications=_whole(found, plan, problem))
    scale = plan.scale if problem.objective == "rate" else 1.0
    offered = {model: rate * scale for model, rate in problem.rates.items() if rate > 0}
    carried = dict.fromkeys(offered, 0.0)
    workers = dict.fromkeys(offered, 0)
    for _, _, placement in plan.placements():
        if placement.model in offered:
            carried[placement.model] += placement.rate
            workers[placement.model] += placement.procs
    slos = {model.name: model.slo for model in problem.models}
    names: list[str] = []
    lanes: list[list[_Queue]] = []
    for device in plan.devices:
        loads = [_loads(partition, device.kind) for partition in device.partitions]
        for slot, partition in enumerate(device.partitions):
            beside = loads[:slot] + loads[slot + 1 :]
            lane = []
            for placement, load in zip(partition.placements, loads[slot], strict=True):
                model = placement.model
                if model in offered and placement.rate > 0:
                    profile = _profile(problem, device, partition, placement)
                    lane.append(
                        _Queue(
                            model,
                            profile,
                            partition.share,
                            placement.procs,
                            placement.batch,
                            slowdown(problem, load, beside),
                            offered[model] * placement.rate / carried[model] / placement.procs,
                            slos[model],
                            min(workers[model], POOL),
                            _varies(profile, placement.batch, partition.share),
                        )
                    )
            names.append(f"{device.name}/{slot}")
            lanes.append(lane)
    _route(lanes)
    answers = _lanes([tuple(lane) for lane in lanes])
    utilisation = {}
    seen: dict[str, list[tuple[float, _Turns]]] = {model: [] for model in offered}
    for name, lane, turns in zip(names, lanes, answers, strict=True):
        busy = 0.0
        for queue, turn in zip(lane, turns, strict=True):
            busy += queue.rate * turn.attainment * turn.cost
            seen[queue.model].append((queue.rate * queue.procs, turn))
        utilisation[name] = min(busy, 1.0)
    models = {model: _join(seen[model], rate, slos[model]) for model, rate in offered.items()}
    return Forecast(models=models, utilisation=utilisation)


def _whole(found: Forecast, plan: Plan, problem: Problem) -> dict[str, ModelForecast]:
    """Applications from end to end: all requests of all stages must end early enough for what comes after them, each
    independently of the others. A stage begins when those before it end, taken to be as slow as one in a hundred, or as
    they may be; so what they leave of their time is counted. Of requests that are made together the one in the middle
    stands for all. Of latencies the longest way through the stages is told, where all are as slow as that."""
    scale = plan.scale if problem.objective == "rate" else 1.0
    late = _behind(plan, problem, found.utilisation)
    asked = plain(problem, plan.split)
    rooms = {model.name: math.inf for model in asked.models}
    applications = [it for it in problem.applications if problem.rates.get(it.name)]
    for application in applications:
        split = plan.split[application.name]
        rest = application.remainder(split)
        took = {it.name: min(found.models[it.model].p99 + late[it.model], split[it.name]) for it in application.stages}
        ends = application.ends(took)
        for stage in application.stages:
            room = application.slo - rest[stage.name] - (ends[stage.name] - took[stage.name]) - late[stage.model] / 2
            rooms[stage.model] = min(rooms[stage.model], max(room, LEAST_ROOM * application.slo))
    models = tuple(
        msgspec.structs.replace(model, slo=rooms[model.name]) if rooms[model.name] < math.inf else model
        for model in asked.models
    )
    last = forecast(plan, msgspec.structs.replace(asked, models=models)).models
    wholes = {}
    for application in applications:
        attainment = application.success({name: last[name].attainment for name in application.models()})
        stages = {stage.name: stage.model for stage in application.stages}
        wholes[application.name] = ModelForecast(
            rate=problem.rates[application.name] * scale * attainment,
            attainment=attainment,
            p50=application.length({stage: found.models[model].p50 + late[model] for stage, model in stages.items()}),
            p99=application.length({stage: found.models[model].p99 + late[model] for stage, model in stages.items()}),
        )
    return wholes


def _behind(plan: Plan, problem: Problem, utilisation: Mapping[str, float]) -> dict[str, float]:
    """How much longer than one that comes alone the last of requests takes that are made together, in seconds: the
    first runs at once, and the rest wait for it, and for others that are at work on the same partition."""
    late = dict.fromkeys((model.name for model in problem.models), 0.0)
    applications = [it for it in problem.applications if problem.rates.get(it.name)]
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            busy = utilisation[f"{device.name}/{slot}"]
            for placement in partition.placements:
                name, most = placement.model, placement.batch * placement.procs
                behind = math.ceil(max((it.burst(name) for it in applications), default=0.0)) - 1
                if behind > 0:
                    profile = _profile(problem, device, partition, placement)
                    rows = min(behind, placement.batch)
                    alone = profile.latency(placement.batch, partition.share, placement.procs)
                    takes = profile.latency(rows, partition.share, placement.procs) * placement.latency / alone
                    others = busy * (placement.duty - placement.latency)
                    late[name] = max(late[name], math.ceil(behind / most) * (takes + others))
    return late


def attains(plan: Plan, problem: Problem) -> bool:
    """Whether every model with a rate will meet its promise, target and fraction."""
    problem = plain(problem, plan.split)
    expected = forecast(plan, problem).models
    return all(expected[name].attainment >= problem.model(name).attainment for name in expected)


class _Queue(msgspec.Struct, frozen=True):
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
        return self.rate * self.slow * self.profile.latency(self.batch, self.share, self.procs) / self.batch


class _Turns(msgspec.Struct, frozen=True):
    """What the chain of one queue says. cost: seconds of the lane per request.

    at_once: the part of the requests that find all idle, and are answered after `single` seconds. below: the part of
    the others that is answered within each of BELOW, as parts of the target.
    """

    attainment: float
    cost: float
    at_once: float
    single: float
    below: Array


def _profile(problem: Problem, device: Device, partition: Partition, placement: Placement) -> Profile:
    profile = problem.profile(placement.model, device.kind)
    if profile is None or math.isinf(profile.latency(placement.batch, partition.share, placement.procs)):
        raise PlanError(
            f"no forecast for {placement.model!r} in batches of {placement.batch} on {show_share(partition.share)} of"
            f" {device.kind!r}: that was not profiled"
        )
    return profile


def _loads(partition: Partition, kind: str) -> list[Load]:
    return [Load(placement.model, kind, placement.batch, partition.share) for placement in partition.placements]


def _route(lanes: Sequence[list[_Queue]]) -> None:
    """Requests go where they will be done first, whatever rates the plan has for the lanes of a model: each gets a part
    as large as what the other models on it leave room for."""
    places: dict[str, list[tuple[list[_Queue], int]]] = {}
    for lane in lanes:
        for i, queue in enumerate(lane):
            places.setdefault(queue.model, []).append((lane, i))
    for several in places.values():
        if len(several) > 1:
            queues = [lane[i] for lane, i in several]
            rooms = [
                queue.procs * queue.rate / queue.busy * max(1 - sum(q.busy for q in lane) + queue.busy, LEAST_ROOM)
                for queue, (lane, _) in zip(queues, several, strict=True)
            ]
            rate = sum(queue.rate * queue.procs for queue in queues) / sum(rooms)
            for queue, room, (lane, i) in zip(queues, rooms, several, strict=True):
                lane[i] = msgspec.structs.replace(queue, rate=rate * room / queue.procs)


# Plans that are compared differ in few lanes.
_known: dict[tuple[_Queue, ...], tuple[_Turns, ...]] = {}


def _lanes(lanes: Sequence[tuple[_Queue, ...]]) -> list[tuple[_Turns, ...]]:
    """The chains of every lane; those that are not known yet in one computation."""
    answers = {lane: _known.get(lane) for lane in lanes}
    fresh = [lane for lane, answer in answers.items() if answer is None and lane]
    if len(_known) + len(fresh) > KNOWN:
        _known.clear()
    for start in range(0, len(fresh), TOGETHER):
        some = fresh[start : start + TOGETHER]
        turns = iter(_turns(some))
        for lane in some:
            answers[lane] = _known[lane] = tuple(next(turns) for _ in lane)
    return [answers[lane] or () for lane in lanes]


@lru_cache(KNOWN)
def _varies(profile: Profile, batch: int, share: int) -> float:
    """As the nearest point was measured to (feature ``cv_pct``)."""
    return profile.nearest(batch, share).features.get("cv_pct", 0.0) / 100


@cache
def _table() -> Array:
    """How often every p-th of a Poisson stream comes, p = 1 … POOL, counts in at most NODES runs of whole numbers.

    For means from (r / STEPS)² to ((r + 1) / STEPS)²: how likely each run is and its part of the mean, both at the
    lower end, and by how much each grows to the upper one (4 · NODES, p and r).
    """
    mean = (np.arange(ROWS + 1) / STEPS)[:, None] ** 2
    top = math.ceil(mean[-1, 0] + 7 * math.sqrt(mean[-1, 0]))
    every = np.arange(POOL * (top + 1))
    factorial = np.concatenate(([0.0], np.cumsum(np.log(every[1:]))))
    count = np.arange(top + 1)
    table = np.empty((4, NODES, POOL, ROWS))
    for pool in range(1, POOL + 1):
        k = every[: pool * (top + 1)]
        spread = np.maximum(mean * pool, 1e-300)
        cumulated = np.cumsum(np.exp(k * np.log(spread) - spread - factorial[: len(k)]), axis=-1)
        # An arrival is the lane's with a phase that is uniform in 0 … pool - 1.
        below = cumulated.reshape(ROWS + 1, top + 1, pool).mean(axis=-1)
        below[:, -1] = 1.0
        chance = np.diff(below, axis=-1, prepend=0.0)
        chance[:, -1] = 0.0
        moment = np.cumsum(chance * count, axis=-1)
        # The tail makes the mean exact.
        moment[:, -1] = mean[:, 0]
        low = (below[1:] < TAIL).sum(axis=-1)
        high = np.minimum((below[1:] < 1 - TAIL).sum(axis=-1), top - 1)
        width = np.maximum((high - low) / (NODES - 1), 1.0)
        ends = low[:, None] + np.ceil(width[:, None] * np.arange(NODES)).astype(np.int64)
        ends = np.minimum(ends, top)
        ends[:, -1] = top
        for part, source in enumerate((below, moment)):
            now, then = (np.take_along_axis(rows, ends, axis=1) for rows in (source[:-1], source[1:]))
            now, then = (np.diff(rows, axis=1, prepend=0.0).T for rows in (now, then))
            table[part, :, pool - 1] = now
            table[2 + part, :, pool - 1] = then - now
    return table.reshape(4 * NODES, POOL * ROWS)


def _nodes(mean: Array, pool: Indices | int) -> tuple[Array, Array]:
    """Counts of arrivals with such a mean, and how likely each is, on a new first axis."""
    mean = np.minimum(mean, (ROWS / STEPS) ** 2)
    row = np.minimum(np.sqrt(mean) * STEPS, ROWS - 1).astype(np.int64)
    part = (mean * STEPS**2 - row * row) / (2 * row + 1)
    found = _table().take(row + (pool - 1) * ROWS, axis=1)
    found = found[: 2 * NODES] + part * found[2 * NODES :]
    chance = found[:NODES]
    return found[NODES:] / np.maximum(chance, 1e-9), chance


class _Chains(msgspec.Struct):
    """The queues of some lanes, an entry each. seconds: of batches 0, 1, …, the last repeated; where batches are very
    large, a group of requests counts as one. lanes: of the model; pool: as many times less do its arrivals vary.
    caution: by how much all is taken to last longer when requests are admitted."""

    lane: Indices
    batch: Indices
    rate: Array
    slo: Array
    pool: Indices
    lanes: Array
    seconds: Array
    caution: Array


def _turns(lanes: Sequence[tuple[_Queue, ...]]) -> list[_Turns]:
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
    chains = _Chains(
        lane=np.repeat(np.arange(len(lanes)), [len(lane) for lane in lanes]),
        batch=batch,
        rate=np.array([queue.rate / g for queue, g in zip(queues, grain, strict=True)]),
        slo=np.array([queue.slo for queue in queues]),
        lanes=np.array([float(queue.pool) for queue in queues]),
        pool=np.array([min(queue.pool * g, POOL) for queue, g in zip(queues, grain, strict=True)]),
        seconds=seconds,
        caution=1 + DEVIATION * np.array([queue.varies for queue in queues]),
    )
    attainment, cost, at_once, below = _solved(chains)
    figures = (it.tolist() for it in (attainment, cost, at_once, seconds[:, 1]))
    return [_Turns(a, c / g, p, s, row) for a, c, p, s, g, row in zip(*figures, grain, below, strict=True)]


def _between(table: Array, index: Indices, part: Array) -> Array:
    """Entries of a table, by their index in it flat, and how far on the way to the next one."""
    low = table.take(index)
    result: Array = low + part * (table.take(index + 1) - low)
    return result


def _seconds(seconds: Array, chain: Indices, rows: Array) -> Array:
    """Of batches of the chains given, linear between whole numbers of rows."""
    whole = rows.astype(np.int64)
    return _between(seconds, whole + chain * seconds.shape[1], rows - whole)


class _Field(msgspec.Struct):
    """What the other models of its lane do in a round of each chain, by the length of the round (chain, length).

    tables, flat: that length in seconds; E of the seconds that they run, the sum of each one's E², and the variance
    of all together; how many have something to run, and how likely any has. own: what the chain itself ran in a round
    that is of that length on average. empty: below 0 as long as one without it would be longer. total: requests/s.
    """

    tables: Array
    own: Array
    empty: Array
    total: Array


def _crossing(table: Array, value: Array) -> tuple[Indices, Array]:
    """Where rows that ascend first reach the values (row, any): see `_between`."""
    steps = table.shape[1] - 1
    at = (table.T[1:, :, None] < value).sum(axis=0)
    index = np.minimum(at, steps - 1) + np.arange(len(table))[:, None] * (steps + 1)
    low = table.take(index)
    part = (value - low) / np.maximum(table.take(index + 1) - low, 1e-300)
    return index, np.minimum(part, 1.0)


def _field(chains: _Chains) -> _Field:
    lane, rate, batch, seconds = chains.lane, chains.rate, chains.batch, chains.seconds
    every = np.arange(len(lane))
    same = (lane[:, None] == lane).astype(np.float64)
    others = same - np.eye(len(lane))
    # No round is longer than one of full batches.
    length = (same @ seconds[every, batch])[:, None] * RAMP
    mean = rate[:, None] * length
    counts, chance = _nodes(mean, 1)
    rows = np.minimum(counts, batch[:, None])
    first = (chance * _seconds(seconds, every[:, None], rows)).sum(axis=0)
    second = (chance * _seconds(seconds * seconds, every[:, None], rows)).sum(axis=0)
    total = others @ rate
    tables = np.empty((6, *length.shape))
    tables[0] = length
    np.matmul(others, np.stack((first, second, second - first * first, -np.expm1(-mean))), out=tables[1:5])
    tables[5] = -np.expm1(-total[:, None] * length)
    # A round lasts own + first(round), and with nothing of its own the model sees the others' alone: the least such.
    empty = length - tables[1] / np.maximum(tables[5], 1e-300)
    empty[:, 0] = -(others @ (rate * seconds[:, 1])) / np.maximum(total, 1e-300)
    return _Field(
        tables=tables.reshape(6, -1),
        own=np.maximum.accumulate(length - tables[1], axis=1),
        empty=np.maximum.accumulate(empty, axis=1),
        total=total,
    )


def _rounds(chains: _Chains, field: _Field, own: Array) -> tuple[Array, Array, Array]:
    """Seconds from one turn to the next where the model runs for `own` (chain, any; 0 first), and their probabilities,
    on a new first axis: an atom alone, or four.

    Also how likely the lane is idle when the model's turn comes and nothing waits.
    """
    index, part = _crossing(field.own, own)
    index[:, :1], part[:, :1] = _crossing(field.empty, np.zeros((len(own), 1)))
    low = field.tables.take(index, axis=1)
    step = field.tables.take(index + 1, axis=1) - low
    _, first, second, variance, some, busy = low + part * step
    # A long round makes the next one longer, by a part g: to first order in g that adds from nothing (rounds that
    # follow one another) to 2 g (their sum) to the variance. The simulator finds the middle.
    grows = np.minimum(step[1] / np.maximum(step[0], 1e-300), 1.0)
    square = first * first + variance * (1 + grows)
    # An empty queue waits for one batch of the others, not for a round of them.
    square[:, 0] = second[:, 0]
    likely = busy.copy()
    likely[:, 0] = some[:, 0]
    likely = np.maximum(likely, 1e-300)
    mean = first / likely
    # Gauss and Hermite's three points.
    apart = np.sqrt(np.maximum(3 * (square / likely - mean * mean), 0.0))
    time = np.stack((0 * own, np.maximum(mean - apart, 0.0), mean, mean + apart)) + own
    chance = np.stack((1 - busy, busy * (1 / 6), busy * (2 / 3), busy * (1 / 6)))
    return time, chance, (1 - busy[:, 0]) * chains.rate / (chains.rate + field.total)


def _longest(chains: _Chains, full: Array) -> Array:
    """The longest queue to tell apart: what a round with a full batch gathers, and what is left of that by such rounds
    before; but admission lets none grow beyond the target."""
    mean = chains.rate * full
    # Beyond a full batch the queue drifts down by b - mean a round, against a variance of mean.
    drift = np.where(mean < chains.batch, 6 * mean / np.maximum(chains.batch - mean, 1e-9), LONGEST)
    gathers = mean + 4.5 * np.sqrt(mean) + 3 + np.where(mean > chains.batch / 2, drift, 0.0)
    longest = np.minimum(np.minimum(gathers, LONGEST), chains.batch * (chains.slo // full + 1))
    result: Array = np.ceil(np.maximum(longest, 1.0))
    return result


def _solved(chains: _Chains) -> tuple[Array, Array, Array, Array]:
    """Attainment, seconds of the lane per request, `at_once` and `below` of every chain."""
    batch, rate, slo, seconds = chains.batch, chains.rate, chains.slo, chains.seconds
    count = len(batch)
    every = np.arange(count)
    field = _field(chains)
    full = _between(field.tables[0], *_crossing(field.own, seconds[every, batch][:, None]))[:, 0]
    longest = _longest(chains, full)

    # States: queues of 0 … EXACT requests, then ever further apart.
    sparse = np.maximum(longest - (STATES - 1), 0.0) / (STATES - 1 - EXACT) ** 2
    waiting = STATE + sparse[:, None] * np.maximum(STATE - EXACT, 0) ** 2
    run = np.minimum(waiting, batch[:, None])
    own = _seconds(seconds, every[:, None], run)
    time, chance, instant = _rounds(chains, field, own)
    # An empty queue's turn comes after a batch of the others, or at once with its own next arrival.
    chance[0, :, 0] = 0.0
    chance[:, :, 0] *= (1 - instant) / np.maximum(chance[:, :, 0].sum(axis=0), 1e-300)
    chance *= waiting <= longest[:, None]

    # A turn, of some chain with so much waiting and an atom of time, and arrivals before the next one: a cell each.
    turn = np.flatnonzero(chance > RARE)
    length = time.take(turn)
    state = turn % (count * STATES)
    arrivals, weight = _nodes(rate.take(state // STATES) * length, chains.pool.take(state // STATES))
    weight *= chance.take(turn)
    cells = np.flatnonzero(weight > RARE)
    weight, arrivals = weight.take(cells), arrivals.take(cells)
    cells %= len(turn)
    length, state = length.take(cells), state.take(cells)
    chain = state // STATES
    rest = (waiting - run).take(state)
    served = _served(chains, chain, rest, length, arrivals, full)
    taken = np.bincount(served.cell, served.count, len(cells))

    after = np.minimum(rest + taken, longest.take(chain))
    above = np.maximum(after - EXACT, 0.0)
    to = after - above + 2 * above / (1 + np.sqrt(1 + 4 * sparse.take(chain) * above)) + 1e-9
    to = np.minimum(to.astype(np.int64), STATES - 2)
    at = to + chain * STATES
    start = waiting.take(at)
    up = weight * ((after - start) / (waiting.take(at + 1) - start))
    at = to + state * STATES
    moves = np.bincount(at, weight - up, count * STATES**2)
    moves[1:] += np.bincount(at, up, len(moves))[:-1]
    balance = moves.reshape(count, STATES, STATES).astype(np.float64)
    balance[:, 0, 1] += instant
    balance[:, STATE, STATE] -= 1.0
    # In place of the balance of state 0: probabilities add up to 1.
    balance[:, :, 0] = 1.0
    stationary = np.linalg.solve(balance.transpose(0, 2, 1), UNIT)[..., 0]

    at_once = stationary[:, 0] * instant
    asked = rate * (stationary * (chance * time).sum(axis=0)).sum(axis=1) + at_once
    mass = served.count * (weight * (stationary / asked[:, None]).take(state)).take(served.cell)
    owner = chain.take(served.cell)
    answered = np.bincount(owner, mass, count)
    # What is admitted to a queue longer than is told apart is lost to the chain. No more are answered than can run.
    possible = 1 / np.maximum(answered * rate * full / batch, 1.0)
    single = seconds[:, 1]
    at_once = np.where(single <= slo, at_once / asked, 0.0)
    kept = np.flatnonzero(mass > 1e-5)
    owner = owner.take(kept)
    below = _below(
        owner,
        mass.take(kept) * possible.take(owner),
        _soonest(chains, owner, served, kept, full),
        served.width.take(kept),
        slo,
    )
    # Where hardly anything comes, each request is a batch.
    spent, done = ((stationary * it)[:, 1:].sum(axis=1) for it in (own, run))
    cost = (spent + 1e-300 * single) / (done + 1e-300)
    return answered * possible + at_once, cost, at_once, below


class _Served(msgspec.Struct):
    """Parts of the arrivals before a next turn, an entry for each batch that takes some of them.

    cell: whose arrivals. number: batches that run before. count: how many are admitted. wait: seconds from the last of
    them to where that batch begins; width: from the first to the last. gathered: in that batch, of what has come.
    """

    cell: Indices
    number: Array
    count: Array
    wait: Array
    width: Array
    gathered: Array


def _served(chains: _Chains, chain: Indices, rest: Array, length: Array, arrivals: Array, full: Array) -> _Served:
    """Which of the arrivals before the next turn are admitted, for each cell, and when the batches that take them run.

    rest: what still waits, once the turn's batch runs; length: seconds to the next turn. Before them run other batches,
    as far as the target lets any wait. Admission reckons with full ones.
    """
    size = chains.batch.take(chain)
    room = (chains.slo / chains.caution - chains.seconds[np.arange(len(full)), chains.batch]).take(chain)
    full = full.take(chain)
    ahead = np.floor(rest / size)
    last = np.minimum(np.ceil((arrivals + rest) / size), np.ceil(room / full))
    parts = np.maximum(last - ahead, 1.0).astype(np.int64)
    cell = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(cell)) + (ahead - (parts.cumsum() - parts)).take(cell)
    # Of p lanes the one whose turn comes next gets what arrives: its requests come in the last p-th of the time.
    gap = length / (np.maximum(arrivals, 1e-12) * chains.lanes.take(chain))
    gap, arrivals, full, size = gap.take(cell), arrivals.take(cell), full.take(cell), size.take(cell)
    start = number * size - rest.take(cell)
    end = np.minimum(start + size, arrivals)
    count = end - np.maximum(start, 0.0)
    wait = number * full + gap * (arrivals - end)
    width = gap * count
    within = np.minimum(np.maximum(room.take(cell) - wait, 0.0) / np.maximum(width, 1e-12), 1.0)
    return _Served(cell, number, within * count, wait, width * within, arrivals - start)


def _soonest(chains: _Chains, chain: Indices, served: _Served, kept: Indices, full: Array) -> Array:
    """The least latency in each of the entries kept, whose chains are given."""
    # A batch that is not next still gathers.
    more = np.rint((chains.rate * full).take(chain) * served.number.take(kept))
    rows = np.minimum(np.maximum(served.gathered.take(kept) + more, 1.0), chains.batch.take(chain))
    return served.wait.take(kept) + _seconds(chains.seconds, chain, rows)


def _below(owner: Indices, weight: Array, low: Array, width: Array, slo: Array) -> Array:
    """Mixtures of uniforms, one for each target: how much lies below each of its edges, exactly."""
    width = np.maximum(width, 1e-9)
    slope = weight / width
    corner = np.concatenate((low, low + width))
    slope = np.concatenate((slope, -slope))
    owner = np.concatenate((owner, owner))
    place = np.minimum(np.sqrt(corner / slo.take(owner)) * BINS, BINS - 1).astype(np.int64) + owner * (BINS + 1) + 1
    shape = (len(slo), BINS + 1)
    slopes = np.bincount(place, slope, len(slo) * (BINS + 1)).reshape(shape).cumsum(axis=1)
    offset = np.bincount(place, slope * corner, len(slo) * (BINS + 1)).reshape(shape).cumsum(axis=1)
    result: Array = np.maximum.accumulate(np.maximum(slopes * slo[:, None] * BELOW - offset, 0.0), axis=1)
    return result


def _join(seen: Sequence[tuple[float, _Turns]], offered: float, slo: float) -> ModelForecast:
    """One model over all its lanes. What no lane takes is not answered."""
    rate = sum(rate * turns.attainment for rate, turns in seen)
    if rate == 0:
        return ModelForecast(rate=0.0, attainment=0.0, p50=math.inf, p99=math.inf)
    below = seen[0][0] * seen[0][1].below
    for of, turns in seen[1:]:
        below += of * turns.below
    at_once: defaultdict[float, float] = defaultdict(float)
    for of, turns in seen:
        at_once[turns.single / slo] += of * turns.at_once
    p50, p99 = _quantiles(below.tolist(), sorted(at_once.items()), (0.5, 0.99))
    return ModelForecast(rate=rate, attainment=min(rate / offered, 1.0), p50=slo * p50, p99=slo * p99)


def _quantiles(below: list[float], atoms: Sequence[tuple[float, float]], parts: Sequence[float]) -> list[float]:
    """Of what lies below EDGES, and in some atoms, by where they are."""
    total = below[-1] + sum([weight for _, weight in atoms])
    found = []
    for part in parts:
        wanted = part * total
        exact = None
        for place, weight in atoms:
            reached = _line(EDGES, below, place)
            if reached < wanted <= reached + weight:
                exact = place
                break
            if reached < wanted:
                wanted -= weight
        found.append(_line(below, EDGES, wanted) if exact is None else exact)
    return found


def _line(x: list[float], y: list[float], at: float) -> float:
    """Between points that ascend, and beyond them as at the last; as `np.interp`, without an array for a number."""
    i = bisect_left(x, at)
    if i == 0 or i == len(x):
        return y[min(i, len(x) - 1)]
    return y[i] - (y[i] - y[i - 1]) * (x[i] - at) / (x[i] - x[i - 1])
