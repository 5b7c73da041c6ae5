"""Lanes and queues without a dispatcher, for tests of single rules."""

from __future__ import annotations

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Request
from cotenant.runtime.events import LaneModel, LaneSpec
from cotenant.runtime.lane import Lane, Queue

LATENCIES = tuple(0.010 + 0.001 * rows for rows in range(1, 9))  # seconds: 11 ms for one row, 18 ms for eight


def lane_of(*models: str, max_queue_delay: float = 0.0) -> Lane:
    return Lane(
        LaneSpec(
            id=LaneId(DeviceId("cpu"), 0),
            models=tuple(
                LaneModel(model=model, latencies=LATENCIES, max_queue_delay=max_queue_delay) for model in models
            ),
        )
    )


def push(queue: Queue, *requests: Request) -> Queue:
    for request in requests:
        queue.push(request, request.size, request.priority, request.deadline)
    return queue


def request(id: int, deadline: float, *, model: str = "m", size: int = 1, priority: int = 0) -> Request:
    return Request(id, model, 0.0, deadline, size, priority)
