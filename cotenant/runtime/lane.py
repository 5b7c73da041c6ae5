"""Hold a lane and its queues: what is waiting on one partition and what is running there."""

from __future__ import annotations

import math
from typing import Final

from cotenant.core.request import Request
from cotenant.runtime.events import LaneModel, LaneSpec

# Smoothing gains for observed over predicted latency and its deviation: TCP's for round-trip times (RFC 6298, 2.3).
GAIN: Final = 1 / 8
DEVIATION_GAIN: Final = 1 / 4

# A plan gives every batch twice its latency (docs/concepts.md). A lane that assumed more could reject everything,
# run nothing, and never observe that it is faster.
MAX_CORRECTION: Final = 2.0

SAME: Final = 1e-9  # relative difference of predictions that are the same: they may be computed differently

MIN_GRACE: Final = 1.0  # seconds after its deadline before a running request expires; longer for a slow batch


# Lower bound of the finish time, index of the queue among those of its model, and the queue.
Entry = tuple[float, int, "Queue"]


class Queue:
    """Hold one model's requests on one lane, most urgent first: by priority, then deadline, then arrival.

    `correction` scales the predicted latencies by what was observed: interference, overheads, a stale profile. Time
    that was lent counts as if it had been spent, since it may not be there the next time.
    `others_between` is the smoothed time that other models run between two of its batches while it has more waiting.
    `emptied` is when it last left nothing that a new request would have waited for; minus infinity: never. It belongs
    to `standing`, as do `empty`, the number of batches in a row that left nothing, and `stock`, in rows.
    `number`, `entry` and `idle` belong to `routing.ModelRoutes`.
    """

    __slots__ = (
        "batch",
        "correction",
        "deviation",
        "emptied",
        "empty",
        "ended",
        "entry",
        "idle",
        "lane",
        "last_deadline",
        "last_priority",
        "latencies",
        "lent",
        "max_queue_delay",
        "model",
        "number",
        "others",
        "others_between",
        "ran",
        "ratio",
        "rows",
        "stock",
        "unordered",
        "waiting",
    )

    def __init__(self, spec: LaneModel, lane: Lane) -> None:
        self.model = spec.model
        self.lane = lane
        self.others: list[Queue] = []  # of the lane
        self.number = 0  # among the queues of its model
        self.entry: Entry | None = None  # its place in the order of ModelRoutes
        self.idle = False  # whether that order is the one of idle lanes
        self.waiting: list[Request] = []  # a list: mypyc optimises lists, and requests leave a batch at a time
        self.last_priority = 0  # of the last waiting request, while there is any
        self.last_deadline = 0.0
        self.rows = 0  # waiting
        self.ran = 0  # number of its last batch: the queue that ran longest ago is next
        self.unordered = False  # whether a request may have an earlier deadline than the first
        self.ratio = 1.0  # observed over predicted latency, smoothed
        self.deviation = 0.0  # of that ratio, smoothed
        self.correction = 1.0
        self.ended = -math.inf  # end of its last batch, in seconds
        self.lent = 0.0  # what the lane had been lent by then
        self.others_between = 0.0  # seconds
        self.emptied = -math.inf  # in seconds
        self.empty = 0
        self.stock = 0.0
        self.update(spec)

    def update(self, spec: LaneModel) -> None:
        """Take over the latencies, largest batch and queue delay of a plan."""
        self.latencies = spec.latencies
        self.batch = len(spec.latencies)
        self.max_queue_delay = spec.max_queue_delay

    def learn_from(self, other: Queue) -> None:
        """Take over what was observed of the same model by another lane, if it predicts the same of a batch: with a
        smaller share, or a plan that counts with a slowdown, its ratio would say something else."""
        if abs(self.latencies[0] - other.latencies[0]) <= SAME * self.latencies[0]:
            self.ratio = other.ratio
            self.deviation = other.deviation
            self.correction = other.correction

    def expected(self, rows: int) -> float:
        """Return the corrected latency of a batch in seconds."""
        return self.latencies[rows - 1] * self.correction

    def observe(self, predicted: float, seconds: float) -> None:
        """Update the correction with a batch latency, and what was predicted for it when it began."""
        error = min(seconds / predicted, MAX_CORRECTION) - self.ratio
        self.ratio += GAIN * error
        self.deviation += DEVIATION_GAIN * (abs(error) - self.deviation)
        self.correction = min(self.ratio + self.deviation, MAX_CORRECTION)

    def waited(self, seconds: float) -> None:
        """Note that a batch begins `seconds` after the last one ended, with a head that was waiting by then.

        The others run at most one batch each meanwhile; if it took longer, the worker was down or the batch held back.
        """
        limit = 0.0
        for other in self.others:
            limit += other.latencies[-1] * other.correction
        self.others_between += GAIN * ((seconds if seconds < limit else limit) - self.others_between)

    def push(self, request: Request, size: int, priority: int, deadline: float) -> None:
        """Insert a request. size, priority and deadline are its own, which the caller has looked up already."""
        waiting = self.waiting
        if not self.rows:
            self.unordered = False
            if request.arrived - self.ended > self.latencies[-1] and request.arrived > self.emptied:
                self.emptied = request.arrived  # its lane had nothing of it for longer than a batch takes
        elif priority != self.last_priority or deadline < self.last_deadline:
            self._insert(request, size, priority, deadline)
            return
        waiting.append(request)
        self.rows += size
        self.last_priority = priority
        self.last_deadline = deadline

    def _insert(self, request: Request, size: int, priority: int, deadline: float) -> None:
        if priority != self.last_priority:
            self.unordered = True
        self.waiting.insert(self._position(priority, deadline), request)
        self.rows += size
        self._update_last()

    def take(self, count: int, rows: int) -> list[Request]:
        """Remove and return the first `count` requests, which have `rows` rows in total."""
        waiting = self.waiting
        if count == len(waiting):
            self.waiting = []
            self.rows = 0
            return waiting
        taken = waiting[:count]
        del waiting[:count]
        self.rows -= rows
        return taken

    def keep(self, waiting: list[Request]) -> None:
        """Replace the waiting requests by a subset of them, in the same order."""
        self.waiting = waiting
        self.rows = sum([request.size for request in waiting])
        if waiting:
            self._update_last()

    def _update_last(self) -> None:
        last = self.waiting[-1]
        self.last_priority = last.priority
        self.last_deadline = last.deadline

    def earliest(self) -> float:
        """Return the earliest deadline of the waiting requests; infinity if there are none."""
        if not self.rows:
            return math.inf
        if self.unordered:
            return min(request.deadline for request in self.waiting)
        return self.waiting[0].deadline

    def ahead(self, priority: int, deadline: float) -> int:
        """Return the rows that would run before a request of that urgency."""
        waiting = self.waiting
        if not self.rows:
            return 0
        if priority == self.last_priority and deadline >= self.last_deadline:
            return self.rows
        position = self._position(priority, deadline)
        if self.rows == len(waiting):
            return position
        return sum([request.size for request in waiting[:position]])

    def _position(self, priority: int, deadline: float) -> int:
        """Return how many of the waiting requests, which are in order, run before a request of that urgency."""
        waiting = self.waiting
        low, high = 0, len(waiting)
        while low < high:
            middle = (low + high) // 2
            other = waiting[middle]
            if priority < other.priority or (priority == other.priority and deadline < other.deadline):
                high = middle
            else:
                low = middle + 1
        return low


class Batch:
    """Track a batch in flight. predicted: its latency by the plan when it began. intact: none of its requests has
    ended yet. grace: seconds after its deadline within which a request is still worth a late answer. overdue: when the
    first of the requests that have not ended is past that."""

    __slots__ = ("grace", "id", "intact", "overdue", "predicted", "queue", "requests", "rows", "started")

    def __init__(self, id: int, queue: Queue, requests: tuple[Request, ...], rows: int, started: float) -> None:
        self.id = id
        self.queue = queue
        self.requests = requests
        self.rows = rows
        self.started = started
        self.predicted = queue.latencies[rows - 1]
        self.intact = True
        self.grace = max(MIN_GRACE, queue.expected(rows))
        self.overdue = self.earliest() + self.grace

    def earliest(self) -> float:
        """Return the earliest deadline of its requests."""
        earliest = math.inf
        for request in self.requests:
            deadline = request.deadline
            if deadline < earliest:
                earliest = deadline
        return earliest


class Lane:
    """Hold a worker of a partition at run time: a queue for each of its models, and at most one batch in flight.

    up: its worker is ready. stalled: it has not answered a batch for so long that requests of it expired; nothing more
    is sent to it until it does. available: up, and not stalled. back_at: when its worker is expected to be ready again;
    minus infinity where it is up, or nobody knows.
    """

    __slots__ = (
        "available",
        "back_at",
        "batch",
        "draining",
        "free_at",
        "id",
        "lent",
        "queue_list",
        "queues",
        "routed",
        "stalled",
        "up",
        "wake",
    )

    def __init__(self, spec: LaneSpec) -> None:
        self.id = spec.id
        self.queues: dict[str, Queue] = {}
        self.queue_list: list[Queue] = []  # the values of `queues`
        self.routed: list[Queue] = []  # those that `routing.ModelRoutes` keeps in order
        self.batch: Batch | None = None
        self.free_at = 0.0  # predicted end of the batch in flight
        self.lent = 0.0  # seconds, in all its batches
        self.up = False
        self.stalled = False
        self.available = False
        self.back_at = -math.inf
        self.draining = False
        self.wake = math.inf  # earliest time of a pending Woke
        self.update(spec)

    def update(self, spec: LaneSpec) -> list[Request]:
        """Serve these models with these batches from now on; return the waiting requests that no longer fit."""
        displaced: list[Request] = []
        kept = {model.model: model for model in spec.models}
        for name, queue in list(self.queues.items()):
            model = kept.get(name)
            if model is None:
                displaced.extend(queue.waiting)
                del self.queues[name]
                continue
            queue.update(model)
            if large := [request for request in queue.waiting if request.size > queue.batch]:
                queue.keep([request for request in queue.waiting if request.size <= queue.batch])
                displaced += large
        for name, model in kept.items():
            if name not in self.queues:
                self.queues[name] = Queue(model, self)
        self.queue_list = list(self.queues.values())
        for queue in self.queue_list:
            queue.others = [other for other in self.queue_list if other is not queue]
        return displaced

    def take_all(self) -> list[Request]:
        """Remove the requests that wait, and return them."""
        taken = [request for queue in self.queue_list for request in queue.waiting]
        for queue in self.queue_list:
            queue.keep([])
        return taken

    def set_state(self, *, up: bool, stalled: bool = False) -> None:
        """Set whether its worker is ready, and whether it has stalled."""
        self.up = up
        self.back_at = -math.inf
        self.stalled = stalled
        self.available = up and not stalled

    def is_expected(self) -> bool:
        """Return whether it is available, or was to be back at a known time."""
        return self.available or self.back_at > -math.inf

    def takes_requests(self, now: float) -> bool:
        """Return whether it is available, or is expected to be."""
        return self.available or self.back_at >= now

    def next_start(self, now: float) -> float:
        """Return when it can begin a batch: once the running one should have ended, or its worker is back."""
        start = self.back_at if self.batch is None else self.free_at
        return start if start > now else now

    def earliest(self) -> float:
        """Return the earliest deadline of all requests waiting on the lane; infinity if there are none."""
        first = math.inf
        for queue in self.queue_list:
            if queue.rows:
                first = min(first, queue.earliest())
        return first

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        for queue in self.queues.values():
            assert queue.rows == sum(request.size for request in queue.waiting), self.id
            urgency = [(request.priority, request.deadline) for request in queue.waiting]
            assert urgency == sorted(urgency), self.id
            for request in queue.waiting:
                assert request.size <= queue.batch, request
        if self.batch is not None:
            assert self.up, self.id
            assert self.batch.overdue >= self.wake, self.id
            assert self.available != self.stalled, self.id
            assert sum(request.size for request in self.batch.requests) == self.batch.rows
        else:
            assert not self.stalled and self.available == self.up, self.id
        assert self.earliest() >= self.wake, self.id
        assert not (self.draining and (self.batch is None or self.earliest() < math.inf)), self.id
