"""Decide which model of a lane runs next, and whether a model may run before its turn.

Models take turns: of the queues with waiting requests, the least recently run goes next. So between two batches of a
model every other runs at most one, whatever its rate, and no model waits longer than a round (docs/concepts.md). That
is what a plan counts with. Where batches take longer than planned, a round may be longer than the shortest target of
its models, however short their own batches are. So turns give way to deadlines where somebody would be late by them:
the batch that is due first runs first if then all are in time, as non-idling schedules without preemption cannot do
better (Jeffay, Stanat and Martel, RTSS 1991); and where not all can be, a batch that nobody else is late by.
"""

from __future__ import annotations

import math
from bisect import insort

from cotenant.runtime.admission import finish_time
from cotenant.runtime.batching import held_until, next_batch_size
from cotenant.runtime.lane import Lane, Queue

# The next batch of a queue: the deadline of its earliest request, its seconds, and the queue's place in its lane.
NextBatch = tuple[float, float, int]


def next_queue(lane: Lane, now: float) -> tuple[Queue | None, int, int, float]:
    """Return the queue that a free lane runs next, its requests and rows, and when to check again.

    If only held-back batches are waiting, the queue is None and the time is that of the first of them.
    """
    best: Queue | None = None
    best_count = best_rows = 0
    again = earliest = math.inf
    total = 0.0
    for queue in lane.queue_list:
        if not queue.rows:
            continue
        total += _next_latency(queue)
        earliest = min(earliest, queue.earliest())
        if best is not None and queue.ran > best.ran:
            continue
        count, rows = next_batch_size(queue, now)
        due = held_until(queue, rows)
        if due > now:
            again = min(again, due)
        elif best is None or queue.ran < best.ran or queue.earliest() < best.earliest():
            best, best_count, best_rows = queue, count, rows
    if best is not None and earliest < now + total:  # else all are in time in any order
        urgent = _more_urgent(lane, best, best.expected(best_rows), now)
        if urgent is not None:
            count, rows = next_batch_size(urgent, now)
            return urgent, count, rows, again
    return best, best_count, best_rows, again


def runs_in_time_before_its_turn(own: Queue, rows: int, due: float, now: float) -> bool:
    """Tell whether the first `rows` rows of a queue, of which the last may be about to arrive, finish by `due` if the
    next batches of all models of the lane run in the order of their deadlines, all in time."""
    lane = own.lane
    if rows > own.batch or not own.others:
        return False
    latency = own.latencies[-1] * own.correction  # a full batch: see `finish_time`
    batches = [(queue.earliest(), _next_latency(queue), -1) for queue in own.others if queue.rows]
    batches.append((min(due, own.earliest()), latency, -1))
    batches.sort()
    return _in_time(batches, lane.next_start(now)) and not _delays_last(own, latency, now)


def _more_urgent(lane: Lane, by_turn: Queue, latency: float, now: float) -> Queue | None:
    """Return the queue that runs instead of the one whose turn it is; None if that may run, for `latency` seconds."""
    others: list[NextBatch] = [
        (queue.earliest(), _next_latency(queue), number)
        for number, queue in enumerate(lane.queue_list)
        if queue.rows and queue is not by_turn
    ]
    others.sort()
    if _in_time(others, now + latency):
        return None
    batches = others.copy()
    insort(batches, (by_turn.earliest(), latency, lane.queue_list.index(by_turn)))
    if _in_time(batches, now):
        return lane.queue_list[batches[0][2]]
    for deadline, seconds, number in others:
        if deadline < now + latency + seconds:
            queue = lane.queue_list[number]
            own = queue.expected(next_batch_size(queue, now)[1])
            if now + own <= deadline and not _delays_first(queue, own, now) and not _delays_last(queue, own, now):
                return queue
    return None


def _next_latency(queue: Queue) -> float:
    return queue.expected(queue.rows if queue.rows < queue.batch else queue.batch)


def _in_time(batches: list[NextBatch], start: float) -> bool:
    """Tell whether batches are in time that run one after the other from `start` on."""
    end = start
    for deadline, seconds, _ in batches:
        end += seconds
        if end > deadline:
            return False
    return True


def _delays_first(own: Queue, latency: float, now: float) -> bool:
    """Tell whether the first requests of another queue are in time by turns, and late if `own` runs first."""
    end = now
    for queue in sorted(own.others, key=_last_run):
        if queue.rows:
            end += queue.expected(next_batch_size(queue, end)[1])
            if end <= queue.earliest() < end + latency:
                return True
    return False


def _delays_last(own: Queue, latency: float, now: float) -> bool:
    """Tell whether the last request of another queue, in a later round, is in time by turns, and late if `own` runs
    first."""
    for queue in own.others:
        if queue.rows > queue.batch:
            last = finish_time(queue, queue.rows, now)
            if last <= queue.last_deadline < last + latency:
                return True
    return False


def _last_run(queue: Queue) -> int:
    return queue.ran
