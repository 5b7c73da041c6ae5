"""Batching of a lane: the Markov chain of one model's queue, looked at whenever its turn comes.

A partition that runs what waits, up to its largest batch b, is a queue with bulk service (Bailey, 1954; M/G^[1,b]/1 in
Kendall's notation, with service L(n) known for every batch n). With q requests waiting when a turn comes, the turn runs
n = min(q, b), and then the other models of the partition run a batch each of what gathered meanwhile; the next turn
comes after T = L(n) + V. From q = 0 it comes after one batch of the others, or, where they are idle too, with the next
arrival.

- Arrivals during T are Poisson, and spread evenly over it. Where p lanes share a model, a lane sees about every p-th
  arrival of all, and counts vary p times less; and it sees them in the last p-th of T.
- A request that arrives at u waits T - u, then for the full batches before its own, then for its own. One that cannot
  make its target is refused on arrival, and does not wait.
- Where batches vary, admission adds the mean deviation that a lane has seen. That some of what is admitted at the last
  moment is late all the same is not counted.

Latencies within one T are uniform between the first and the last arrival of a batch: their distribution is a mixture of
uniforms, weighted with the chain's stationary distribution.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cotenant.planners.forecast.latencies import mass_below
from cotenant.planners.forecast.mean_field import first_crossing, mean_field_of, round_lengths
from cotenant.planners.forecast.poisson_quadrature import poisson_nodes
from cotenant.planners.forecast.queue_batch import Array, Indices, QueueBatch, batch_seconds, interpolation_index

LONGEST = 128  # queue, in requests or groups of them
STATES = 16  # lengths of a queue that are told apart, all of those up to
EXACT = 8
RARE = 1e-7  # what is less likely is left out

STATE = np.arange(STATES)
UNIT = np.eye(STATES)[:, :1]


def _longest(chains: QueueBatch, full: Array) -> Array:
    """The longest queue to tell apart: what a round with a full batch gathers, and what is left of that by such rounds
    before; but no longer than admission lets it grow.

    The states that are told apart are spread over this length, so a bound that is far too long makes them coarse where
    the queue really is: with twice its largest batch's latency as target a lane at capacity was forecast 4.6 points too
    low.
    """
    mean = chains.rate * full
    # Beyond a full batch the queue drifts down by b - mean a round, against a variance of mean.
    drift = np.where(mean < chains.batch, 6 * mean / np.maximum(chains.batch - mean, 1e-9), LONGEST)
    gathers = mean + 4.5 * np.sqrt(mean) + 3 + np.where(mean > chains.batch / 2, drift, 0.0)
    # Of those that still find room behind full batches, the last come so late before the turn that the rest of their
    # target is left for it.
    room = np.maximum(_room(chains), 0.0)
    rounds = np.floor(room / full + 1e-9)
    last = chains.rate * chains.lanes * np.maximum(room - rounds * full, 0.0)
    admitted = chains.batch * np.maximum(rounds, 1.0) + np.minimum(chains.batch, last + 4.5 * np.sqrt(last))
    result: Array = np.ceil(np.maximum(np.minimum(np.minimum(gathers, LONGEST), admitted), 1.0))
    return result


def _room(chains: QueueBatch) -> Array:
    """Seconds that a request may wait for its batch to begin: admission reckons with a full one."""
    result: Array = chains.slo / chains.caution - chains.seconds[np.arange(len(chains.batch)), chains.batch]
    return result


def solve_queues(chains: QueueBatch) -> tuple[Array, Array, Array, Array]:
    """Attainment, seconds of the lane per request, `at_once` and `below` of every chain."""
    batch, rate, slo, seconds = chains.batch, chains.rate, chains.slo, chains.seconds
    count = len(batch)
    every = np.arange(count)
    field = mean_field_of(chains)
    full = interpolation_index(field.tables[0], *first_crossing(field.own, seconds[every, batch][:, None]))[:, 0]
    longest = _longest(chains, full)

    # States: queues of 0 … EXACT requests, then ever further apart.
    sparse = np.maximum(longest - (STATES - 1), 0.0) / (STATES - 1 - EXACT) ** 2
    waiting = STATE + sparse[:, None] * np.maximum(STATE - EXACT, 0) ** 2
    run = np.minimum(waiting, batch[:, None])
    own = batch_seconds(seconds, every[:, None], run)
    time, chance, instant = round_lengths(chains, field, own)
    # An empty queue's turn comes after a batch of the others, or at once with its own next arrival.
    chance[0, :, 0] = 0.0
    chance[:, :, 0] *= (1 - instant) / np.maximum(chance[:, :, 0].sum(axis=0), 1e-300)
    chance *= waiting <= longest[:, None]

    # A turn, of some chain with so much waiting and an atom of time, and arrivals before the next one: a cell each.
    turn = np.flatnonzero(chance > RARE)
    length = time.take(turn)
    state = turn % (count * STATES)
    arrivals, weight = poisson_nodes(rate.take(state // STATES) * length, chains.pool.take(state // STATES))
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
    below = mass_below(
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


def _served(chains: QueueBatch, chain: Indices, rest: Array, length: Array, arrivals: Array, full: Array) -> _Served:
    """Which of the arrivals before the next turn are admitted, for each cell, and when the batches that take them run.

    rest: what still waits, once the turn's batch runs; length: seconds to the next turn. Before them run other batches,
    as far as the target lets any wait. Admission reckons with full ones.
    """
    size = chains.batch.take(chain)
    room = _room(chains).take(chain)
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


def _soonest(chains: QueueBatch, chain: Indices, served: _Served, kept: Indices, full: Array) -> Array:
    """The least latency in each of the entries kept, whose chains are given."""
    # A batch that is not next still gathers.
    more = np.rint((chains.rate * full).take(chain) * served.number.take(kept))
    rows = np.minimum(np.maximum(served.gathered.take(kept) + more, 1.0), chains.batch.take(chain))
    return served.wait.take(kept) + batch_seconds(chains.seconds, chain, rows)
