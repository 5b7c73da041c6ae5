"""A lane and its queues: what waits on one partition, and what runs there."""

from __future__ import annotations

import math
from typing import Final

from cotenant.core.request import Request
from cotenant.runtime.events import LaneModel, LaneSpec

# How fast a queue's idea of its batch latencies follows what it sees: TCP's gains for a round-trip time and its
# deviation (RFC 6298, section 2.3).
GAIN: Final = 1 / 8
DEVIATION_GAIN: Final = 1 / 4

# A plan gives every batch twice its latency (docs/concepts.md). Believing in more than that, a lane could refuse
# everything, run nothing, and never learn better.
SLOWEST: Final = 2.0


# When a lane would be done at the earliest, the number of its queue among the model's, and that queue.
Entry = tuple[float, int, "Queue"]


class Queue:
    """One model's requests on one lane, the most urgent first: by priority, then deadline, then arrival.

    `pace` corrects the predicted latencies by what was observed here: neighbours, overheads, an old profile. `between`
    is how long others were seen to run between two of its batches where it had more waiting, smoothed.
    `number` and `entry` are for `routing.Routes`.
    """

    __slots__ = (
        "batch",
        "between",
        "deviation",
        "ended",
        "entry",
        "idle",
        "lane",
        "last_deadline",
        "last_priority",
        "latencies",
        "max_queue_delay",
        "model",
        "number",
        "others",
        "pace",
        "ran",
        "ratio",
        "rows",
        "unordered",
        "waiting",
    )

    def __init__(self, spec: LaneModel, lane: Lane) -> None:
        self.model = spec.model
        self.lane = lane
        self.others: list[Queue] = []  # of the lane
        self.number = 0  # among the model's lanes
        self.entry: Entry | None = None  # where it stands among them
        self.idle = False  # whether that is among those of idle lanes
        self.waiting: list[Request] = []  # no deque: mypyc knows lists, and what is taken out is a batch at a time
        self.last_priority = 0  # of the last that waits, as long as any does
        self.last_deadline = 0.0
        self.rows = 0  # of all that wait: 0 where nothing does
        self.ran = 0  # the number of its last batch: who ran longest ago is next
        self.unordered = False  # whether some request may have an earlier deadline than the first
        self.ratio = 1.0  # observed over predicted latency, smoothed
        self.deviation = 0.0  # and how far it strays
        self.pace = 1.0
        self.ended = -math.inf  # when its last batch did
        self.between = 0.0
        self.update(spec)

    def update(self, spec: LaneModel) -> None:
        self.latencies = spec.latencies
        self.batch = len(spec.latencies)
        self.max_queue_delay = spec.max_queue_delay

    def expected(self, rows: int) -> float:
        """Seconds that a batch of so many rows is expected to take."""
        return self.latencies[rows - 1] * self.pace

    def observe(self, rows: int, seconds: float) -> None:
        if rows > self.batch:
            return  # it began under a plan with larger batches, and nobody says any more how long it was to take
        error = min(seconds / self.latencies[rows - 1], SLOWEST) - self.ratio
        self.ratio += GAIN * error
        self.deviation += DEVIATION_GAIN * (abs(error) - self.deviation)
        self.pace = min(self.ratio + self.deviation, SLOWEST)

    def waited(self, seconds: float) -> None:
        """A batch begins so long after the last one, with a head that waited already then: others had their turns.

        They have a batch each at most; else the worker was down, or the batch held back.
        """
        most = 0.0
        for other in self.others:
            most += other.latencies[-1] * other.pace
        self.between += GAIN * ((seconds if seconds < most else most) - self.between)

    def push(self, request: Request, size: int, priority: int, deadline: float) -> None:
        """Take a request in; these are its own, which the caller has looked up already."""
        waiting = self.waiting
        if not self.rows:
            self.unordered = False
        elif priority != self.last_priority or deadline < self.last_deadline:
            self._insert(request, size, priority, deadline)
            return
        waiting.append(request)
        self.rows += size
        self.last_priority = priority
        self.last_deadline = deadline

    def _insert(self, request: Request, size: int, priority: int, deadline: float) -> None:
        waiting = self.waiting
        if priority != self.last_priority:
            self.unordered = True
        position = len(waiting)
        urgency = (priority, deadline)
        while position and urgency < (waiting[position - 1].priority, waiting[position - 1].deadline):
            position -= 1
        waiting.insert(position, request)
        self.rows += size
        self._see_last()

    def take(self, count: int, rows: int) -> list[Request]:
        """Take out the first so many, which have so many rows together."""
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
        """Of those that wait, only these go on doing so."""
        self.waiting = waiting
        self.rows = sum([request.size for request in waiting])
        if waiting:
            self._see_last()

    def _see_last(self) -> None:
        last = self.waiting[-1]
        self.last_priority = last.priority
        self.last_deadline = last.deadline

    def earliest(self) -> float:
        """The first deadline of all that wait; infinity where nothing does."""
        if not self.rows:
            return math.inf
        if self.unordered:
            return min(request.deadline for request in self.waiting)
        return self.waiting[0].deadline

    def ahead(self, priority: int, deadline: float) -> int:
        """Rows that would run before a request of that urgency."""
        waiting = self.waiting
        if not self.rows:
            return 0
        if priority == self.last_priority and deadline >= self.last_deadline:
            return self.rows
        urgency = (priority, deadline)
        return sum(request.size for request in waiting if (request.priority, request.deadline) <= urgency)


class Batch:
    """What runs on a lane. whole: whether none of its requests has ended yet."""

    __slots__ = ("id", "queue", "requests", "rows", "started", "whole")

    def __init__(self, id: int, queue: Queue, requests: tuple[Request, ...], rows: int, started: float) -> None:
        self.id = id
        self.queue = queue
        self.requests = requests
        self.rows = rows
        self.started = started
        self.whole = True


class Lane:
    """A partition at run time: a queue for each of its models, and at most one batch in flight."""

    __slots__ = ("batch", "draining", "each", "free_at", "id", "queues", "routed", "up", "wake")

    def __init__(self, spec: LaneSpec) -> None:
        self.id = spec.id
        self.queues: dict[str, Queue] = {}
        self.each: list[Queue] = []  # of the queues
        self.routed: list[Queue] = []  # those that stand in an order among their model's (`routing.Routes`)
        self.batch: Batch | None = None
        self.free_at = 0.0  # when the batch in flight is expected to end
        self.up = False
        self.draining = False
        self.wake = math.inf  # the earliest time at which a Woke is due
        self.hold(spec)

    def hold(self, spec: LaneSpec) -> list[Request]:
        """Take these models, with these batches, in place of those of before; answers whose place is lost."""
        homeless: list[Request] = []
        kept = {model.model: model for model in spec.models}
        for name, queue in list(self.queues.items()):
            model = kept.get(name)
            if model is None:
                homeless.extend(queue.waiting)
                del self.queues[name]
                continue
            queue.update(model)
            if large := [request for request in queue.waiting if request.size > queue.batch]:
                queue.keep([request for request in queue.waiting if request.size <= queue.batch])
                homeless += large
        for name, model in kept.items():
            if name not in self.queues:
                self.queues[name] = Queue(model, self)
        self.each = list(self.queues.values())
        for queue in self.each:
            queue.others = [other for other in self.each if other is not queue]
        return homeless

    def earliest(self) -> float:
        """The first deadline of all that wait on the lane; infinity where nothing does."""
        first = math.inf
        for queue in self.each:
            if queue.rows:
                first = min(first, queue.earliest())
        return first
