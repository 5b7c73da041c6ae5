"""When a request would be done if a lane took it now: what admission and routing go by."""

from __future__ import annotations

from cotenant.runtime.lane import Queue


def finish_time(own: Queue, rows: int, now: float) -> float:
    """When the first so many rows of a queue are expected to be done; the last of them may be about to arrive.

    What runs must end first. Then come rounds: in each, the model has one batch, and so has every other model of the
    lane that has something waiting (`batching.next_queue`). So with the own batch in round k, any other queue runs at
    most k batches before it, and one less if it is the one that runs now.

    Own batches count as full ones, since what arrives while the lane is busy fills them up. The plan has room for that
    (docs/concepts.md: D + L(b) ≤ target); without it a request that was taken at the last moment would be late as soon
    as others joined its batch.

    Over several rounds others will come that are not there yet: after the first turn with what waits now, they are
    reckoned to run as long as they were seen to (`Queue.between`). A backlog that is promised all of its lane's time is
    taken in, draws ever more requests to the lane, and expires.
    """
    lane = own.lane
    batch = lane.batch
    rounds = -(-rows // own.batch)
    if batch is None:
        start = now
        start += own.latencies[rows - 1] * own.pace if rounds == 1 else rounds * own.latencies[-1] * own.pace
    else:
        start = lane.free_at if lane.free_at > now else now
        start += rounds * own.latencies[-1] * own.pace
    turns = 0  # of others between own batches, where there are several
    if rounds > 1:
        turns = rounds if batch is not None and batch.queue is own else rounds - 1
    there = first = 0.0
    for queue in own.others:
        if queue.rows:
            most = rounds - 1 if batch is not None and queue is batch.queue else rounds
            whole = queue.rows // queue.batch
            rest = queue.rows % queue.batch
            if whole >= most:
                there += most * queue.expected(queue.batch)
            else:
                there += whole * queue.expected(queue.batch) + (queue.expected(rest) if rest else 0.0)
            if turns > 1:
                first += queue.expected(queue.batch if whole else rest)
    if turns > 1:
        seen = first + (turns - 1) * own.between
        if seen > there:
            there = seen
    return start + there
