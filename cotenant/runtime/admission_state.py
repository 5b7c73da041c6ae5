"""Describe what admission knows at one moment, so that another process can predict what it would decide.

A router before several servers reads it of each (`GET /cotenant/admission`), rebuilds their lanes, and asks the rules
of this package: when a request would finish there, and whether it would be rejected. Times are relative to the moment
at which the state was read, in seconds, since two machines have no common clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from cotenant.core.identity import LaneId
from cotenant.core.request import Request
from cotenant.runtime.events import ApplicationSpec, LaneModel, LaneSpec
from cotenant.runtime.lane import Batch, Lane, Queue

FOREVER = 1e9  # seconds: JSON has no infinity


class WaitingRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request in a queue. due: seconds until its deadline. size: rows."""

    due: float
    size: int = 1
    priority: int = 0


class QueueState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model's queue on a lane. latencies: predicted seconds of 1, 2, … rows, by the plan. correction,
    others_between, stock: see `Queue`. emptied: seconds since `Queue.emptied`; None: it was never in use. turn: the
    number of its last batch; the least is next. waiting: most urgent first."""

    model: str
    latencies: tuple[float, ...]
    correction: float = 1.0
    max_queue_delay: float = 0.0
    others_between: float = 0.0
    emptied: float | None = None
    stock: float = 0.0
    turn: int = 0
    waiting: tuple[WaitingRequest, ...] = ()


class RunningBatch(msgspec.Struct, frozen=True):
    """The batch that a lane runs. rows: of all its requests."""

    model: str
    rows: int


class LaneState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane. free_in: seconds until it can begin a batch: its batch should have ended, or its worker is back; None
    where it takes no requests."""

    id: LaneId
    free_in: float | None
    running: RunningBatch | None = None
    queues: tuple[QueueState, ...]


class ModelTarget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request gets that does not say it itself. timeout: seconds until its deadline. stages: of an application,
    those that begin at once: models, with the seconds of the target that are kept for the stages behind each."""

    timeout: float
    stages: tuple[tuple[str, float], ...] = ()


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's admission knows. accepting: whether it takes requests. models: those that it serves."""

    accepting: bool
    models: dict[str, ModelTarget]
    lanes: tuple[LaneState, ...]


def model_targets(timeouts: Mapping[str, float], applications: Iterable[ApplicationSpec]) -> dict[str, ModelTarget]:
    """Return what requests get, by model. timeouts: seconds, of models and applications."""
    stages = {
        spec.name: tuple((stage.model, stage.downstream) for stage in spec.stages if not stage.after)
        for spec in applications
    }
    return {model: ModelTarget(timeout=timeout, stages=stages.get(model, ())) for model, timeout in timeouts.items()}


def read_lane(lane: Lane, now: float) -> LaneState:
    """Describe a lane."""
    batch = lane.batch
    return LaneState(
        id=lane.id,
        free_in=lane.next_start(now) - now if lane.takes_requests(now) and not lane.draining else None,
        running=None if batch is None else RunningBatch(batch.queue.model, batch.rows),
        queues=tuple(_read_queue(queue, now) for queue in lane.queue_list),
    )


def _read_queue(queue: Queue, now: float) -> QueueState:
    return QueueState(
        model=queue.model,
        latencies=queue.latencies,
        correction=queue.correction,
        max_queue_delay=queue.max_queue_delay,
        others_between=queue.others_between,
        emptied=None if queue.emptied == -math.inf else now - queue.emptied,
        stock=queue.stock,
        turn=queue.ran,
        waiting=tuple(
            WaitingRequest(min(request.deadline - now, FOREVER), request.size, request.priority)
            for request in queue.waiting
        ),
    )


def restore_lane(state: LaneState, now: float) -> Lane:
    """Rebuild a lane that predicts what the described one does. `now` is the moment that the state describes, by any
    clock. Its requests have the id 0."""
    models = tuple(
        LaneModel(model=queue.model, latencies=queue.latencies, max_queue_delay=queue.max_queue_delay)
        for queue in state.queues
    )
    lane = Lane(LaneSpec(id=state.id, models=models))
    for described in state.queues:
        queue = lane.queues[described.model]
        queue.correction = described.correction
        queue.others_between = described.others_between
        queue.ran = described.turn
        for waiting in described.waiting:
            due = now + waiting.due
            request = Request(0, described.model, now, due, waiting.size, waiting.priority)
            queue.push(request, waiting.size, waiting.priority, due)
        queue.emptied = now - (described.emptied or 0.0)
        queue.stock = described.stock
        queue.ended = now  # or before
    if state.free_in is None:
        return lane
    lane.set_state(up=True)
    running = state.running
    queue_of_batch = None if running is None else lane.queues.get(running.model)
    if running is not None and queue_of_batch is not None:
        lane.batch = Batch(queue_of_batch.ran, queue_of_batch, (), min(running.rows, queue_of_batch.batch), now)
        lane.free_at = now + state.free_in
    elif state.free_in > 0:  # its worker comes back, or runs a batch of a model that it no longer serves
        lane.set_state(up=False)
        lane.back_at = now + state.free_in
    return lane
