"""Tell a queue that stands from one that a burst has left, and how much of it keeps its lane busy.

Under persistent overload a queue that takes whatever makes its deadline is always as long as deadlines allow. That
gives every answer the same delay and adds none: with enough waiting for the next batch, a lane answers as many. What it
costs is time that is not seen here: a caller that waited for a connection, a network, a socket that was not read yet.
With these, all answers are late.

CoDel tells the two kinds of queues apart by whether the delay was ever short within an interval (RFC 8289), Facebook's
servers by whether the queue was ever empty (Maurer, Fail at Scale, ACM Queue 2015). So it is here: while the queues of
a model stand, they take no more than `enough`; once one of them has emptied, whatever makes its deadline. A burst can
be told from an overload only by how long it lasts, and what it has left is answered within the time that a request has.
So an interval is ten times that: at most a tenth of what is answered in it can be lost where it ends all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from cotenant.core.request import Request
from cotenant.runtime.lane import Queue

INTERVAL: Final = 0.1  # seconds without an empty queue after which it may be said to stand: CoDel's interval
STANDING: Final = 10.0  # the same in times of what a request has until its deadline
EMPTY: Final = 3  # batches in a row that leave nothing, after which a queue that stood does no more: one is chance
LATER: Final = 2.0  # times of what a request has, from which on one with more is of another kind
RAISE: Final = 1 / 8  # of a batch, by which the stock rises with each batch that should have found more waiting
DECAY: Final = 1 / 512  # of the stock, by which it falls with each other
GAP: Final = 0.0005  # seconds in which nothing may arrive though much is offered: a busy event loop reads in turns


def standing_after(left: float) -> float:
    """Return for how many seconds a queue has not emptied that stands for requests with `left` seconds."""
    interval = STANDING * left
    return interval if interval > INTERVAL else INTERVAL


def stand(queues: Iterable[Queue], left: float, now: float) -> bool:
    """Tell whether a model's queues stand for requests with `left` seconds.

    So must all queues of their lanes: behind a long queue, whose requests are urgent, others wait for more of theirs,
    and run in fewer and larger batches.
    """
    interval = standing_after(left)
    for queue in queues:
        for each in queue.lane.queue_list:
            if now - each.emptied <= interval:
                return False
    return True


def enough(queue: Queue) -> float:
    """Return how many rows before a request are enough where the queue stands, to keep its lane busy with full batches.

    Those of the next batch, and a safety stock for what arrives meanwhile: half the square root of a batch, or as much
    as batches that were not full, or began late, have shown to be needed. Where models share the lane, another batch:
    turns give way to deadlines (`turns.next_queue`), so that a model may run twice in a round.
    """
    batch = queue.batch
    least = max(math.sqrt(batch) / 2, batch * GAP / queue.expected(batch))
    return batch + (queue.stock if queue.stock > least else least) + (batch if queue.others else 0)


def note_batch(queue: Queue, head: Request, rows: int, now: float) -> None:
    """Note that a batch of a queue begins, of so many rows with this request first, and what it leaves waiting."""
    allowed = head.deadline - head.arrived
    stood = now - queue.emptied > standing_after(allowed)
    if stood:
        late = now > queue.ended and not queue.others
        starved = not queue.rows and (rows < queue.batch or late)
        queue.stock += max(1.0, queue.batch * RAISE) if starved else -queue.stock * DECAY
    if queue.rows and not _is_other(queue.waiting[0], head, allowed, now):
        queue.empty = 0
        return
    queue.empty += 1
    if queue.empty >= EMPTY or not stood:
        queue.emptied = now


def _is_other(request: Request, head: Request, allowed: float, now: float) -> bool:
    """Tell whether a request that waits on is less urgent than the head of the batch, or due so much later, that others
    like the head do not wait for it."""
    return request.priority > head.priority or request.deadline - now > LATER * allowed
