"""Solve the bulk-service queue of one model on a lane: its Markov chain, embedded at the model's turns.

A partition that runs what waits, up to its largest batch b, is a queue with bulk service (Bailey, 1954; M/G^[1,b]/1 in
Kendall's notation, with service time L(n) known for every batch n). With q requests waiting at a turn, the turn runs
n = min(q, b), and then the other models of the partition run a batch each of what gathered meanwhile; the next turn
comes after T = L(n) + V. From q = 0 it comes after one batch of the others, or, if they are idle too, with the next
arrival.

- Arrivals during T are Poisson, and spread evenly over it. Where p lanes hold a model, a lane gets about every p-th
  arrival, so that the variance of counts is p times smaller; and it gets them in the last p-th of T.
- A request that arrives at u waits T - u, then for the full batches before its own, then for its own. One that cannot
  meet its target is rejected on arrival, and does not wait.
- Where batch latencies vary, admission adds the mean deviation that a lane has observed. That some requests admitted at
  the last moment are late nevertheless is not modelled.

Latencies within one T are uniform between the first and the last arrival of a batch: their distribution is a mixture of
uniforms, weighted with the chain's stationary distribution.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cotenant.planners.forecast.latencies import mass_below
from cotenant.planners.forecast.mean_field import first_crossing, mean_field_of, round_lengths
from cotenant.planners.forecast.poisson_quadrature import poisson_nodes
from cotenant.planners.forecast.queue_batch import Array, Indices, QueueBatch, batch_seconds, interpolate

MAX_QUEUE = 128  # requests, or groups of them
QUEUE_STATES = 16  # distinct queue lengths
EXACT_STATES = 8  # queue lengths up to which each is a state of its own
MIN_PROBABILITY = 1e-7  # less likely transitions are dropped

STATE = np.arange(QUEUE_STATES)
UNIT = np.eye(QUEUE_STATES)[:, :1]


def _longest_queue(queues: QueueBatch, full_round: Array) -> Array:
    """Return the longest queue to represent: the arrivals of a full round and the backlog of those before it, but no
    longer than admission lets it grow.

    The states are spread over this length, so a bound that is far too long makes them coarse where the queue really
    is: with twice its largest batch's latency as target a lane at capacity was forecast 4.6 points too low.
    """
    mean = queues.rate * full_round
    # Beyond a full batch the queue drifts down by b - mean a round, against a variance of mean.
    drift = np.where(mean < queues.batch, 6 * mean / np.maximum(queues.batch - mean, 1e-9), MAX_QUEUE)
    gathered = mean + 4.5 * np.sqrt(mean) + 3 + np.where(mean > queues.batch / 2, drift, 0.0)
    # The last requests admitted behind full batches arrive so late before the turn that the rest of their target
    # suffices to wait for it.
    time_limit = np.maximum(_time_limit(queues), 0.0)
    rounds = np.floor(time_limit / full_round + 1e-9)
    last = queues.rate * queues.lanes * np.maximum(time_limit - rounds * full_round, 0.0)
    admitted = queues.batch * np.maximum(rounds, 1.0) + np.minimum(queues.batch, last + 4.5 * np.sqrt(last))
    result: Array = np.ceil(np.maximum(np.minimum(np.minimum(gathered, MAX_QUEUE), admitted), 1.0))
    return result


def _time_limit(queues: QueueBatch) -> Array:
    """Return the seconds that a request may wait for its batch to start: admission assumes a full one."""
    result: Array = queues.slo / queues.caution - queues.seconds[np.arange(len(queues.batch)), queues.batch]
    return result


def solve_queues(queues: QueueBatch) -> tuple[Array, Array, Array, Array]:
    """Solve every queue's chain; return attainment, seconds of the lane per request, `immediate` and `below`.

    See `QueueSolution` for the latter two.
    """
    batch, rate, slo, seconds = queues.batch, queues.rate, queues.slo, queues.seconds
    count = len(batch)
    index = np.arange(count)
    field = mean_field_of(queues)
    full_round = interpolate(field.tables[0], *first_crossing(field.own, seconds[index, batch][:, None]))[:, 0]
    longest = _longest_queue(queues, full_round)

    # States: queues of 0 … EXACT requests, then ever further apart.
    sparse = np.maximum(longest - (QUEUE_STATES - 1), 0.0) / (QUEUE_STATES - 1 - EXACT_STATES) ** 2
    waiting = STATE + sparse[:, None] * np.maximum(STATE - EXACT_STATES, 0) ** 2
    run = np.minimum(waiting, batch[:, None])
    own = batch_seconds(seconds, index[:, None], run)
    time, probability, instant = round_lengths(queues, field, own)
    # An empty queue's turn comes after a batch of the others, or at once with its own next arrival.
    probability[0, :, 0] = 0.0
    probability[:, :, 0] *= (1 - instant) / np.maximum(probability[:, :, 0].sum(axis=0), 1e-300)
    probability *= waiting <= longest[:, None]

    # A turn is a queue with a state and an atom of the time to the next; a cell is a turn with a node of its arrivals.
    turn = np.flatnonzero(probability > MIN_PROBABILITY)
    length = time.take(turn)
    state = turn % (count * QUEUE_STATES)
    arrivals, weight = poisson_nodes(
        rate.take(state // QUEUE_STATES) * length, queues.stride.take(state // QUEUE_STATES)
    )
    weight *= probability.take(turn)
    cells = np.flatnonzero(weight > MIN_PROBABILITY)
    weight, arrivals = weight.take(cells), arrivals.take(cells)
    cells %= len(turn)
    length, state = length.take(cells), state.take(cells)
    queue = state // QUEUE_STATES
    rest = (waiting - run).take(state)
    admitted = _admitted(queues, queue, rest, length, arrivals, full_round)
    taken = np.bincount(admitted.cell, admitted.count, len(cells))

    after = np.minimum(rest + taken, longest.take(queue))
    above = np.maximum(after - EXACT_STATES, 0.0)
    lower_state = after - above + 2 * above / (1 + np.sqrt(1 + 4 * sparse.take(queue) * above)) + 1e-9
    lower_state = np.minimum(lower_state.astype(np.int64), QUEUE_STATES - 2)
    at = lower_state + queue * QUEUE_STATES
    start = waiting.take(at)
    up = weight * ((after - start) / (waiting.take(at + 1) - start))
    at = lower_state + state * QUEUE_STATES
    moves = np.bincount(at, weight - up, count * QUEUE_STATES**2)
    moves[1:] += np.bincount(at, up, len(moves))[:-1]
    balance = moves.reshape(count, QUEUE_STATES, QUEUE_STATES).astype(np.float64)
    balance[:, 0, 1] += instant
    balance[:, STATE, STATE] -= 1.0
    # The balance of state 0 is redundant: replace it by the normalisation.
    balance[:, :, 0] = 1.0
    stationary = np.linalg.solve(balance.transpose(0, 2, 1), UNIT)[..., 0]

    immediate = stationary[:, 0] * instant
    arrivals_per_turn = rate * (stationary * (probability * time).sum(axis=0)).sum(axis=1) + immediate
    mass = admitted.count * (weight * (stationary / arrivals_per_turn[:, None]).take(state)).take(admitted.cell)
    owner = queue.take(admitted.cell)
    answered = np.bincount(owner, mass, count)
    # The chain loses requests admitted to queues beyond the longest: cap the answers at the lane's capacity.
    possible = 1 / np.maximum(answered * rate * full_round / batch, 1.0)
    solo_latency = seconds[:, 1]
    immediate = np.where(solo_latency <= slo, immediate / arrivals_per_turn, 0.0)
    significant = np.flatnonzero(mass > 1e-5)
    owner = owner.take(significant)
    below = mass_below(
        owner,
        mass.take(significant) * possible.take(owner),
        _least_latency(queues, owner, admitted, significant, full_round),
        admitted.width.take(significant),
        slo,
    )
    # At vanishing rates each request is a batch of its own.
    seconds_spent, requests_done = ((stationary * each)[:, 1:].sum(axis=1) for each in (own, run))
    cost = (seconds_spent + 1e-300 * solo_latency) / (requests_done + 1e-300)
    return answered * possible + immediate, cost, immediate, below


class _Admitted(msgspec.Struct):
    """Group arrivals before the next turn by the batch that takes them, one entry for each group.

    cell: whose arrivals. number: batches that run before. count: admitted requests. wait: seconds from the last of them
    to the start of that batch; width: from the first to the last. gathered: requests of that batch that have arrived.
    """

    cell: Indices
    number: Array
    count: Array
    wait: Array
    width: Array
    gathered: Array


def _admitted(
    queues: QueueBatch, queue: Indices, rest: Array, length: Array, arrivals: Array, full_round: Array
) -> _Admitted:
    """Return which arrivals before the next turn are admitted, for each cell, and when their batches run.

    rest: requests still waiting once the turn's batch runs; length: seconds to the next turn. Requests may wait behind
    other batches, which admission assumes to be full, as far as their target allows.
    """
    size = queues.batch.take(queue)
    time_limit = _time_limit(queues).take(queue)
    full_round = full_round.take(queue)
    ahead = np.floor(rest / size)
    last = np.minimum(np.ceil((arrivals + rest) / size), np.ceil(time_limit / full_round))
    parts = np.maximum(last - ahead, 1.0).astype(np.int64)
    cell = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(cell)) + (ahead - (parts.cumsum() - parts)).take(cell)
    # Of p lanes the one whose turn is next gets the arrivals: a lane's requests come in the last p-th of the time.
    gap = length / (np.maximum(arrivals, 1e-12) * queues.lanes.take(queue))
    gap, arrivals, full_round, size = gap.take(cell), arrivals.take(cell), full_round.take(cell), size.take(cell)
    start = number * size - rest.take(cell)
    end = np.minimum(start + size, arrivals)
    count = end - np.maximum(start, 0.0)
    wait = number * full_round + gap * (arrivals - end)
    width = gap * count
    within = np.minimum(np.maximum(time_limit.take(cell) - wait, 0.0) / np.maximum(width, 1e-12), 1.0)
    return _Admitted(cell, number, within * count, wait, width * within, arrivals - start)


def _least_latency(
    queues: QueueBatch, queue: Indices, admitted: _Admitted, significant: Indices, full_round: Array
) -> Array:
    """Return the least latency of each significant entry; `queue`: that of each."""
    # A batch that is not next is still filling.
    more = np.rint((queues.rate * full_round).take(queue) * admitted.number.take(significant))
    rows = np.minimum(np.maximum(admitted.gathered.take(significant) + more, 1.0), queues.batch.take(queue))
    return admitted.wait.take(significant) + batch_seconds(queues.seconds, queue, rows)
