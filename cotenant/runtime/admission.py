"""When a request would be done if a lane took it now: what admission and routing go by."""

from __future__ import annotations

from cotenant.core.request import Request
from cotenant.runtime.lane import Lane


def finish_time(lane: Lane, request: Request, now: float) -> float:
    """When `request` is expected to be done on `lane`, which has its model and room for its rows in one batch.

    What runs must end first. Then come rounds: in each, the model has one batch, and so has every other model of the
    lane that has something waiting (`batching.next_batch`). So with the own batch in round k, any other queue runs at
    most k batches before it. What arrives later is not foreseen; a round is short against the deadlines it delays.
    """
    start = lane.free_at if lane.batch is not None and lane.free_at > now else now
    own = lane.queues[request.model]
    size = request.size
    total = own.ahead(request.priority, request.deadline) + size if own.waiting else size
    batch = own.batch
    if total <= batch:
        rounds = 1
        start += own.latencies[total - 1] * own.pace
    else:
        rounds = -(-total // batch)
        start += ((rounds - 1) * own.latencies[-1] + own.latencies[total - (rounds - 1) * batch - 1]) * own.pace
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
