"""A lane and its queues: what waits on one partition, and what runs there."""

from __future__ import annotations

import math
from collections import deque

from cotenant.core.request import Request
from cotenant.runtime.events import LaneModel, LaneSpec

# How fast a queue's idea of its batch latencies follows what it sees: TCP's gains for a round-trip time and its
# deviation (RFC 6298, section 2.3).
GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4

# A plan gives every batch twice its latency (DESIGN.md, the referee). Believing in more than that, a lane could refuse
# everything, run nothing, and never learn better.
SLOWEST = 2.0


class Queue:
    """One model's requests on one lane, the most urgent first: by priority, then deadline, then arrival.

    `pace` corrects the predicted latencies by what was observed here: neighbours, overheads, an old profile.
    """

    __slots__ = (
        "batch",
        "deviation",
        "latencies",
        "linger",
        "model",
        "pace",
        "ran",
        "ratio",
        "rows",
        "unordered",
        "waiting",
    )

    def __init__(self, spec: LaneModel) -> None:
        self.model = spec.model
        self.waiting: deque[Request] = deque()
        self.rows = 0  # of all that wait
        self.ran = 0  # the number of its last batch: who ran longest ago is next
        self.unordered = False  # whether some request may have an earlier deadline than the first
        self.ratio = 1.0  # observed over predicted latency, smoothed
        self.deviation = 0.0  # and how far it strays
        self.pace = 1.0
        self.update(spec)

    def update(self, spec: LaneModel) -> None:
        self.latencies = spec.latencies
        self.batch = len(spec.latencies)
        self.linger = spec.linger

    def expected(self, rows: int) -> float:
        """Seconds that a batch of so many rows is expected to take."""
        return self.latencies[rows - 1] * self.pace

    def observe(self, rows: int, seconds: float) -> None:
        error = min(seconds / self.latencies[rows - 1], SLOWEST) - self.ratio
        self.ratio += GAIN * error
        self.deviation += DEVIATION_GAIN * (abs(error) - self.deviation)
        self.pace = min(self.ratio + self.deviation, SLOWEST)

    def push(self, request: Request) -> None:
        waiting = self.waiting
        self.rows += request.size
        if not waiting:
            self.unordered = False
            waiting.append(request)
            return
        last = waiting[-1]
        if last.priority == request.priority:
            if last.deadline <= request.deadline:
                waiting.append(request)
                return
        else:
            self.unordered = True
        position = len(waiting)
        urgency = (request.priority, request.deadline)
        while position and urgency < (waiting[position - 1].priority, waiting[position - 1].deadline):
            position -= 1
        waiting.insert(position, request)

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        self.rows -= request.size

    def earliest(self) -> float:
        """The first deadline of all that wait; infinity where nothing does."""
        if not self.waiting:
            return math.inf
        if self.unordered:
            return min(request.deadline for request in self.waiting)
        return self.waiting[0].deadline

    def ahead(self, priority: int, deadline: float) -> int:
        """Rows that would run before a request of that urgency."""
        waiting = self.waiting
        if not waiting:
            return 0
        last = waiting[-1]
        if last.priority == priority and last.deadline <= deadline:
            return self.rows
        urgency = (priority, deadline)
        return sum(request.size for request in waiting if (request.priority, request.deadline) <= urgency)


class Batch:
    """What runs on a lane."""

    __slots__ = ("id", "queue", "requests", "rows", "started")

    def __init__(self, id: int, queue: Queue, requests: tuple[Request, ...], rows: int, started: float) -> None:
        self.id = id
        self.queue = queue
        self.requests = requests
        self.rows = rows
        self.started = started


class Lane:
    """A partition at run time: a queue for each of its models, and at most one batch in flight."""

    __slots__ = ("batch", "draining", "free_at", "id", "queues", "up", "wake")

    def __init__(self, spec: LaneSpec) -> None:
        self.id = spec.id
        self.queues = {model.model: Queue(model) for model in spec.models}
        self.batch: Batch | None = None
        self.free_at = 0.0  # when the batch in flight is expected to end
        self.up = False
        self.draining = False
        self.wake = math.inf  # the earliest time at which a Woke is due

    def earliest(self) -> float:
        return min([queue.earliest() for queue in self.queues.values()], default=math.inf)
