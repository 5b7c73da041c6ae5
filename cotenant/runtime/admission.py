"""Predict when a request would finish if a lane took it now; admission and routing use it."""

from __future__ import annotations

from cotenant.runtime.lane import Queue


def finish_time(own: Queue, rows: int, now: float) -> float:
    """Predict when the first `rows` rows of a queue finish, in seconds; the last of them may be about to arrive.

    The running batch ends first, or the worker comes back first. Then come rounds: in each, the model runs one batch,
    and so does every other model of the lane that has requests waiting (`turns.next_queue`). With its own batch in
    round k, any other queue runs at most k batches before it, and one less if it is running now.

    Own batches count as full, since arrivals fill them up while the lane is busy. The plan has room for that
    (docs/concepts.md: D + L(b) ≤ target); without it a request admitted at the last moment would be late as soon as
    others joined its batch.

    Over several rounds requests of other models arrive that are not waiting yet: after the first round, the others are
    assumed to run as long as observed (`Queue.others_between`). A backlog that counts on all of its lane's time is
    admitted, attracts ever more requests to the lane, and expires.
    """
    lane = own.lane
    batch = lane.batch
    rounds = -(-rows // own.batch)
    latency = own.latencies[rows - 1] if rounds == 1 and batch is None else rounds * own.latencies[-1]
    start = lane.next_start(now) + latency * own.correction
    turns = 0  # of the others between own batches, if there are several
    if rounds > 1:
        turns = rounds if batch is not None and batch.queue is own else rounds - 1
    waiting = first = 0.0
    for queue in own.others:
        if queue.rows:
            limit = rounds - 1 if batch is not None and queue is batch.queue else rounds
            whole = queue.rows // queue.batch
            rest = queue.rows % queue.batch
            if whole >= limit:
                waiting += limit * queue.expected(queue.batch)
            else:
                waiting += whole * queue.expected(queue.batch) + (queue.expected(rest) if rest else 0.0)
            if turns > 1:
                first += queue.expected(queue.batch if whole else rest)
    if turns > 1:
        observed = first + (turns - 1) * own.others_between
        if observed > waiting:
            waiting = observed
    return start + waiting
