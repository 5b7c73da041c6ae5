"""Route a request to the lane that would finish it first."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import Final

from cotenant.core.request import Request
from cotenant.runtime.admission import finish_time
from cotenant.runtime.lane import Entry, Queue
from cotenant.runtime.splitting import places_for_parts
from cotenant.runtime.standing import STANDING, enough, stand
from cotenant.runtime.turns import runs_in_time_before_its_turn

LINEAR_SCAN: Final = 6  # number of lanes up to which evaluating all is faster than keeping them in order

MANY: Final = 1 << 60  # rows

# Relative slack of a busy lane's bound: it is summed in another order than a finish time, and rounding differs.
ROUNDING: Final = 1e-12


class ModelRoutes:
    """Keep the queues of one model, in the order of the plan. Ties go to the first.

    Many queues are kept in the order of a lower bound on the finish time of any request that would be last in the
    queue, and are evaluated in that order only until the next bound exceeds the best finish time. The bound of an idle
    lane is its shortest batch; that of a busy lane, its finish time with one more row. Between two calls of `place` a
    queue can only grow, which keeps the bound valid.
    """

    __slots__ = ("_busy", "_idle", "_latest", "_lowest", "many", "queues")

    def __init__(self, queues: list[Queue]) -> None:
        self.queues = queues
        self.many = len(queues) > LINEAR_SCAN
        self._idle: list[Entry] = []
        self._busy: list[Entry] = []
        # Of all requests pushed: the latest deadline and the least urgent priority.
        self._latest = -math.inf
        self._lowest = 0
        for number, queue in enumerate(queues):
            queue.number = number
            queue.entry = None
            if self.many:
                queue.lane.routed.append(queue)
                for request in queue.waiting:
                    self._note(request.priority, request.deadline)
                self.place(queue)

    def first(self, size: int, priority: int, deadline: float, now: float) -> tuple[Queue | None, float]:
        """Return the queue where a request would finish first, and when; None if no lane that is available, or will be
        soon, can take it."""
        best: Queue | None = None
        best_finish = math.inf
        if not self.many or deadline < self._latest or priority < self._lowest:
            for queue in self.queues:
                if size <= queue.batch and queue.lane.takes_requests(now):
                    at = finish_time(queue, queue.ahead(priority, deadline) + size, now)
                    if best is None or at < best_finish:
                        best, best_finish = queue, at
            return best, best_finish
        for entries, start in ((self._idle, now), (self._busy, 0.0)):
            for bound, number, queue in entries:
                least = start + bound
                if best is not None and (least > best_finish or (least == best_finish and number > best.number)):
                    break
                if size <= queue.batch and queue.lane.takes_requests(now):
                    at = finish_time(queue, queue.rows + size, now)
                    if best is None or at < best_finish or (at == best_finish and number < best.number):
                        best, best_finish = queue, at
        return best, best_finish

    def choose(self, size: int, priority: int, deadline: float, now: float) -> tuple[Queue | None, float]:
        """Return what `first` does; where the queues stand and that is in time, of those that have not enough, and no
        queue with that time if all have."""
        first, finish = self.first(size, priority, deadline, now)
        left = deadline - now
        # Most queues have emptied of late, and are asked no further.
        if first is None or finish > deadline or now - first.emptied <= STANDING * left:
            return first, finish
        if not stand(self.queues, left, now):
            return first, finish
        best: Queue | None = None
        best_finish = math.inf
        for queue in self.queues:
            if size <= queue.batch and queue.lane.takes_requests(now):
                ahead = queue.ahead(priority, deadline)
                if ahead < enough(queue):
                    at = finish_time(queue, ahead + size, now)
                    if best is None or at < best_finish:
                        best, best_finish = queue, at
        return (None, finish) if best is None else (best, best_finish)

    def is_crowded(self, priority: int, deadline: float, due: float, now: float) -> bool:
        """Tell whether the queues stand for requests that are due then, with enough in each before such a request.
        deadline: by which it is inserted."""
        if not stand(self.queues, due - now, now):
            return False
        up = False
        for queue in self.queues:
            if queue.lane.takes_requests(now):
                up = True
                if queue.ahead(priority, deadline) < enough(queue):
                    return False
        return up

    def before_its_turn(self, size: int, priority: int, deadline: float, due: float, now: float) -> Queue | None:
        """Return a queue where a request finishes by `due` if its batch goes before its turn and makes nobody late;
        None if there is none. deadline: by which it is inserted."""
        for queue in self.queues:
            if (
                size <= queue.batch
                and queue.lane.takes_requests(now)
                and runs_in_time_before_its_turn(queue, queue.ahead(priority, deadline) + size, due, now)
            ):
                return queue
        return None

    def rows_by(self, due: float, now: float) -> int:
        """Return how many more rows, each as the last of the most urgent, finish by `due` in all queues together, or
        are enough where these stand."""
        total = 0
        stands = stand(self.queues, due - now, now)
        for queue in self.queues:
            ahead = queue.ahead(0, math.inf)
            if not queue.lane.takes_requests(now) or finish_time(queue, ahead + 1, now) > due:
                continue
            most = math.ceil(enough(queue)) - ahead if stands else MANY
            if most <= 0:
                continue
            low = -(-(ahead + 1) // queue.batch)  # batches, the last of which is in time with some of its rows
            high = max(low, int((due - now) / queue.expected(queue.batch))) + 1  # the last of which is not
            if finish_time(queue, low * queue.batch, now) > due:
                total += 1
                continue
            while high - low > 1:
                middle = (low + high) // 2
                if finish_time(queue, middle * queue.batch, now) > due:
                    high = middle
                else:
                    low = middle
            rows = low * queue.batch - ahead
            total += rows if rows < most else most
        return total

    def otherwise(self, request: Request, finish: float, now: float) -> tuple[list[tuple[Queue, int]], float]:
        """Return which queues take how many rows of a request that no lane finishes in its turn, before its turn or in
        parts, and the best finish time known; none where it cannot be in time. finish: the best of those by turn."""
        size, priority, deadline = request.size, request.priority, request.deadline
        queue = self.before_its_turn(size, priority, deadline, deadline, now)
        if queue is not None:
            return [(queue, size)], deadline
        if size > 1:
            return places_for_parts(self.queues, size, priority, deadline, now)
        return [], finish

    def push(self, queue: Queue, request: Request, size: int, priority: int, deadline: float) -> None:
        """Insert a request into one of the queues."""
        queue.push(request, size, priority, deadline)
        if self.many:
            self._note(priority, deadline)
            if queue.rows % queue.batch < size:  # one more round
                self.place(queue)

    def place(self, queue: Queue) -> None:
        """Update the place of a queue whose lane began or ended a batch, or whose queue became shorter."""
        lane = queue.lane
        idle = lane.batch is None
        if queue.entry is not None:
            entries = self._idle if queue.idle else self._busy
            del entries[bisect_left(entries, queue.entry)]
            queue.entry = None
        if not lane.is_expected():
            return
        if idle:
            bound = queue.latencies[0] * queue.correction
        else:
            bound = finish_time(queue, queue.rows + 1, -math.inf)
            bound -= abs(bound) * ROUNDING
        entry = (bound, queue.number, queue)
        insort(self._idle if idle else self._busy, entry)
        queue.entry = entry
        queue.idle = idle

    def _note(self, priority: int, deadline: float) -> None:
        if deadline > self._latest:
            self._latest = deadline
        if priority > self._lowest:
            self._lowest = priority

    def invariants(self) -> None:
        """Raise AssertionError where the order contradicts the lanes."""
        assert self._idle == sorted(self._idle)
        assert self._busy == sorted(self._busy)
        ordered = [queue for _, _, queue in self._idle + self._busy]
        routed = [queue for queue in self.queues if queue.lane.is_expected()]
        assert all(queue in routed and queue.idle == (queue.lane.batch is None) for queue in ordered)
        assert len(ordered) == (len(routed) if self.many else 0)
