"""Split a request over several batches and lanes; it ends once, with the last of its parts or the first that fails.

A request has parts where no lane can answer it in one batch. A part is a request to the lanes: it waits, runs, is
retried and moves like any other. It may be split again: to fill up a batch, or for a lane whose batches are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heapreplace
from typing import Final

from cotenant.core.request import Request
from cotenant.runtime.admission import finish_time
from cotenant.runtime.lane import Queue

FIRST_PART: Final = -(1 << 52)  # ids of parts go down from here, far below those of requests of stages


class SplitRequest:
    """Track a request that was split. parts: those that have not ended, by id. started: when its first batch began."""

    __slots__ = ("parts", "request", "started")

    def __init__(self, request: Request) -> None:
        self.request: Final = request
        self.parts: dict[int, Request] = {}
        self.started = math.inf


class SplitRequests:
    """Track all requests that were split and have not ended. by_part: by the id of each part that has not ended."""

    __slots__ = ("_next", "by_part", "by_request")

    def __init__(self) -> None:
        self.by_request: dict[int, SplitRequest] = {}
        self.by_part: dict[int, SplitRequest] = {}
        self._next = FIRST_PART

    def split(self, request: Request, sizes: Iterable[int]) -> list[Request]:
        """Replace a request, or a part of one, by parts of these numbers of rows."""
        whole = self.by_part.pop(request.id, None)
        if whole is None:
            whole = self.by_request[request.id] = SplitRequest(request)
        else:
            del whole.parts[request.id]
        parts = []
        for size in sizes:
            part = Request(self._next, request.model, request.arrived, request.deadline, size, request.priority)
            self._next -= 1
            whole.parts[part.id] = part
            self.by_part[part.id] = whole
            parts.append(part)
        return parts

    def served(self, part: int, started: float) -> SplitRequest | None:
        """Note that a part was served by a batch that began then; return its request if that was the last part."""
        whole = self.by_part.pop(part)
        del whole.parts[part]
        whole.started = min(whole.started, started)
        if whole.parts:
            return None
        del self.by_request[whole.request.id]
        return whole

    def end(self, whole: SplitRequest) -> None:
        """Forget a request, which has ended, and its parts."""
        del self.by_request[whole.request.id]
        for part in whole.parts:
            del self.by_part[part]

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self.by_part == {part: whole for whole in self.by_request.values() for part in whole.parts}
        for request_id, whole in self.by_request.items():
            assert whole.request.id == request_id
            assert whole.parts, request_id  # otherwise nothing would ever end it
            assert sum(part.size for part in whole.parts.values()) <= whole.request.size, request_id


def places_for_parts(
    queues: Iterable[Queue], size: int, priority: int, deadline: float, now: float
) -> tuple[list[tuple[Queue, int]], float]:
    """Return which queue of a model takes how many rows of a request, in order, and when the last of them finish.

    Each part is as large as a batch of its lane, or what is left, and goes where it finishes first. No queue takes any
    where a part would finish after the deadline (the time is that part's), or no lane is available or will be soon
    (infinity).
    """
    first = [
        (finish_time(queue, ahead + min(size, queue.batch), now), queue.number, ahead, queue)
        for queue in queues
        if queue.lane.takes_requests(now)
        for ahead in (queue.ahead(priority, deadline),)
    ]
    if not first:
        return [], math.inf
    heapify(first)
    places: list[tuple[Queue, int]] = []
    latest = now
    left = size
    while left:
        _, number, ahead, queue = first[0]
        rows = min(left, queue.batch)
        finish = finish_time(queue, ahead + rows, now)
        if finish > deadline:
            return [], finish
        places.append((queue, rows))
        latest = max(latest, finish)
        left -= rows
        ahead += rows
        heapreplace(first, (finish_time(queue, ahead + queue.batch, now), number, ahead, queue))
    return places, latest


def rows_to_fill(queue: Queue, count: int, rows: int, now: float) -> int:
    """Return how many rows of the request behind the first `count`, which have `rows` rows, fill up their batch without
    making any of them late; fewer than it has."""
    head = queue.waiting[count]
    earliest = head.deadline
    for request in queue.waiting[:count]:
        earliest = min(earliest, request.deadline)
    fill = min(queue.batch - rows, head.size - 1)
    while fill > 0 and earliest < now + queue.expected(rows + fill):
        fill -= 1
    return fill
