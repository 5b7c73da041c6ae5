"""Form batches: which requests to drop, how large a batch is, and how long it is held back."""

from __future__ import annotations

import math

from cotenant.core.request import Request
from cotenant.runtime.lane import Queue


def drop_requests(queue: Queue, now: float) -> list[Request]:
    """Remove and return the requests that are not worth running."""
    dropped = _drop_hopeless(queue, now)
    if queue.rows >= queue.batch and not queue.unordered:
        dropped += _drop_for_throughput(queue, now)
    return dropped


def _drop_hopeless(queue: Queue, now: float) -> list[Request]:
    """Remove the requests at the head that would miss their deadlines even if they ran alone now."""
    count = rows = 0
    for request in queue.waiting:
        if request.deadline >= now + queue.expected(request.size):
            break
        count += 1
        rows += request.size
    return queue.take(count, rows) if count else []


def next_batch_size(queue: Queue, now: float) -> tuple[int, int]:
    """Return how many requests at the head make the next batch, and their rows.

    As many as the largest batch takes, but no more than allow the earliest deadline among them to be met: later
    requests wait for the next round rather than delay the first ones beyond their deadlines.
    """
    waiting = queue.waiting
    if not queue.unordered:  # the first is due first
        if queue.rows <= queue.batch:
            if waiting[0].deadline >= now + queue.expected(queue.rows):
                return len(waiting), queue.rows
        elif queue.rows == len(waiting) and waiting[0].deadline >= now + queue.expected(queue.batch):
            return queue.batch, queue.batch
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
    """With a full batch waiting, drop heads that would force a small one, if that costs fewer answers.

    A batch of n rows keeps the lane from running full ones for L(n), which costs L(n) · b / L(b) answers and yields n.
    Under overload every head is short of time; shrinking batches to save each of them would end in batches of one row.
    Nexus' early drop is the same remedy (SOSP 2019, section 4.3).
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
    """Return until when a batch may wait for more rows, as `max_queue_delay` and the earliest deadline allow.

    Minus infinity if it does not wait.
    """
    if queue.max_queue_delay <= 0 or queue.rows >= queue.batch:
        return -math.inf
    latest = queue.earliest() - queue.expected(min(queue.batch, rows + 1))
    return min(queue.waiting[0].arrived + queue.max_queue_delay, latest)
