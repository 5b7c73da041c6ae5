"""When a queue becomes a batch, and whose turn it is."""

from __future__ import annotations

import math

from cotenant.core.request import Request
from cotenant.runtime.lane import Lane, Queue


def drop_requests(queue: Queue, now: float) -> list[Request]:
    """Take out what is not worth running."""
    dropped = _drop_hopeless(queue, now)
    if queue.rows >= queue.batch and not queue.unordered:
        dropped += _drop_for_throughput(queue, now)
    return dropped


def _drop_hopeless(queue: Queue, now: float) -> list[Request]:
    """Take out those at the head that would end late even if they ran alone now. Running them helps nobody."""
    count = rows = 0
    for request in queue.waiting:
        if request.deadline >= now + queue.expected(request.size):
            break
        count += 1
        rows += request.size
    return queue.take(count, rows) if count else []


def next_batch_size(queue: Queue, now: float) -> tuple[int, int]:
    """How many requests at the head make the next batch, and their rows.

    As many as the largest batch takes, but no more than let the earliest deadline among them be met: rows that come
    later wait for the next round rather than make the first ones late.
    """
    waiting = queue.waiting
    if queue.rows <= queue.batch and not queue.unordered and waiting[0].deadline >= now + queue.expected(queue.rows):
        return len(waiting), queue.rows
    count = rows = 0
    earliest = math.inf
    for request in waiting:
        earliest = min(earliest, request.deadline)
        larger = rows + request.size
        if larger > queue.batch or (count and earliest < now + queue.expected(larger)):
            break
        count += 1
        rows = larger
    return count, rows


def _drop_for_throughput(queue: Queue, now: float) -> list[Request]:
    """With a full batch waiting, take out heads that would force a small one, where that loses fewer answers.

    A batch of n rows keeps the lane from serving full ones for L(n): that costs L(n) · b / L(b) answers and brings n.
    Under overload every head is short of time, and batches that shrink to save each of them would end with a lane
    that serves one row at a time (Nexus' early drop, SOSP 2019, section 4.3, is the same remedy).
    """
    limit = now + queue.expected(queue.batch)
    heads = lost = 0
    for request in queue.waiting:
        if request.deadline >= limit or queue.rows - lost - request.size < queue.batch:
            break
        heads += 1
        lost += request.size
    if not lost:
        return []
    _, rows = next_batch_size(queue, now)
    if lost >= queue.latencies[rows - 1] / queue.latencies[-1] * queue.batch - rows:
        return []
    return queue.take(heads, lost)


def held_until(queue: Queue, rows: int) -> float:
    """Until when a batch of so many rows may wait for more: as long as `max_queue_delay` and the earliest deadline
    allow."""
    if queue.max_queue_delay <= 0 or rows >= queue.batch:
        return -math.inf
    latest = queue.earliest() - queue.expected(min(queue.batch, rows + 1))
    return min(queue.waiting[0].arrived + queue.max_queue_delay, latest)


def next_queue(lane: Lane, now: float) -> tuple[Queue | None, int, int, float]:
    """Whose batch a free lane runs next: (queue, requests, rows, look again at).

    The models take turns: of those that have something waiting, the one whose last batch is longest ago. So between two
    batches of a model every other has at most one, however much it is asked for, and nobody waits longer than a round
    (docs/concepts.md). Where only held-back batches wait, the queue is None and the time says when the first of them is
    due.
    """
    best: Queue | None = None
    best_count = best_rows = 0
    again = math.inf
    for queue in lane.each:
        if not queue.rows or (best is not None and queue.ran > best.ran):
            continue
        count, rows = next_batch_size(queue, now)
        due = held_until(queue, rows)
        if due > now:
            again = min(again, due)
        elif best is None or queue.ran < best.ran or queue.earliest() < best.earliest():
            best, best_count, best_rows = queue, count, rows
    return best, best_count, best_rows, again
