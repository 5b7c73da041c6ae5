"""When a request would be done if a lane took it now: what admission and routing go by."""

from __future__ import annotations

from cotenant.core.request import Request
from cotenant.runtime.lane import Lane


def finish_time(lane: Lane, request: Request, now: float) -> float:
    """When `request` is expected to be done on `lane`, which has its model and room for its rows in one batch.

    What runs must end first. Then come rounds: in each, the model has one batch, and so has every other model of the
    lane that has something waiting (`batching.next_queue`). So with the own batch in round k, any other queue runs at
    most k batches before it, and one less if it is the one that runs now.

    Own batches count as full ones, since what arrives while the lane is busy fills them up. The plan has room for that
    (DESIGN.md, the referee: D + L(b) ≤ SLO); without it a request that was taken at the last moment would be late as
    soon as others joined its batch.
    """
    start = lane.free_at if lane.batch is not None and lane.free_at > now else now
    own = lane.queues[request.model]
    size = request.size
    total = own.ahead(request.priority, request.deadline) + size if own.waiting else size
    batch = own.batch
    rounds = -(-total // batch)
    if lane.batch is None and rounds == 1:
        start += own.latencies[total - 1] * own.pace
    else:
        start += rounds * own.latencies[-1] * own.pace
    if len(lane.queues) > 1:
        running = lane.batch.queue if lane.batch is not None else None
        for queue in lane.queues.values():
            if queue is own or not queue.waiting:
                continue
            turns = rounds - 1 if queue is running else rounds
            whole, rest = divmod(queue.rows, queue.batch)
            if whole >= turns:
                start += turns * queue.expected(queue.batch)
            else:
                start += whole * queue.expected(queue.batch) + (queue.expected(rest) if rest else 0.0)
    return start
