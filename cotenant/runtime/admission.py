"""When a request would be done if a lane took it now: what admission and routing go by."""

from __future__ import annotations

from cotenant.core.request import Request
from cotenant.runtime.lane import Lane


def finish_time(lane: Lane, request: Request, now: float) -> float:
    """When `request` is expected to be done on `lane`, which has its model and room for its rows in one batch.

    What runs must end first. Then come rounds: in each, the model has one batch, and so has every other model of the
    lane that has something waiting (`batching.next_queue`). So with the own batch in round k, any other queue runs at
    most k batches before it. Own batches count as full ones, since what arrives while the lane is busy fills them up;
    the plan has room for that (DESIGN.md, the referee: D + L(b) ≤ SLO), and without it a request that was taken at the
    last moment would be late as soon as others joined its batch.
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
        for queue in lane.queues.values():
            if queue is own or not queue.waiting:
                continue
            whole, rest = divmod(queue.rows, queue.batch)
            if whole >= rounds:
                start += rounds * queue.expected(queue.batch)
            else:
                start += whole * queue.expected(queue.batch) if whole else 0.0
                start += queue.expected(rest) if rest else 0.0
    return start
