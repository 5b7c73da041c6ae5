"""Decide which request runs where and when, and which is rejected.

The live server and the simulator run the same object: events in, commands out. It never waits, reads no clock and
holds no tensors. Every request that arrives ends in exactly one `Reply` (`open_requests`). A request with more rows
than a batch takes runs in parts (`splitting`), and still ends in one `Reply`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.batching import drop_requests
from cotenant.runtime.events import (
    Applied,
    Arrived,
    Cancelled,
    Command,
    Died,
    Drained,
    Event,
    Failed,
    Finished,
    LaneSpec,
    Ready,
    Reply,
    Restarting,
    Run,
    WakeAt,
    Woke,
)
from cotenant.runtime.lane import Batch, Lane, Queue
from cotenant.runtime.lane_changes import change_lanes, routes_by_model
from cotenant.runtime.open_requests import OpenRequests
from cotenant.runtime.routing import ModelRoutes
from cotenant.runtime.splitting import rows_to_fill
from cotenant.runtime.standing import note_batch
from cotenant.runtime.turns import next_queue

COMPILED = not __file__.endswith(".py")  # see the Makefile: `make compiled`

CROWDED: Final = "more requests arrive than can be answered, and enough of them wait"
TOO_LATE: Final = "it could not be answered within its deadline"
NO_LANE: Final = "no partition holds the model"
NO_WORKER: Final = "no worker that holds the model is up"
PASSED: Final = "its deadline passed while it waited"
OVERDUE: Final = "its deadline passed long ago, and its batch still runs"
STALLED: Final = "the batch before it does not end, and no other partition can answer it in time"
HOPELESS: Final = "it can no longer be answered within its deadline"
LEFT: Final = "the caller left"
DIED_TWICE: Final = "its worker died, and so did the one that tried again"
DIED_LATE: Final = "its worker died, and there is no time to try again"
MOVED: Final = "its partition was taken out while it waited, and no other can answer it in time"


class Dispatcher:
    """Schedule requests on lanes. Feed it events in order of time and perform the commands in order."""

    def __init__(self) -> None:
        self.lanes: dict[LaneId, Lane] = {}
        self._routes: dict[str, ModelRoutes] = {}  # by model
        self._open = OpenRequests(self._place)
        self._held = self._open.held
        self._tried = self._open.tried
        self._parts = self._open.by_part
        self._batches = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock."""
        match event:  # frequent ones first
            case Finished():
                return self._finished(event.lane, event.batch, event.failed, event.lent, now)
            case Arrived():
                if event.others:
                    return self._admit_together((event.request, *event.others), now)
                return self.admit(event.request, now) or []
            case Woke():
                return self._woke(event.lane, event.time, now)
            case Cancelled(request_id):
                return self._cancelled(request_id, now)
            case Failed(lane, batch, reason):
                return self._failed(lane, batch, reason, now)
            case Died(lane, _, others, back):
                return self._died((lane, *others), back, now)
            case Restarting(lane, time):
                return self._restarting(lane, time)
            case Ready(lane):
                return self._ready(lane, now)
            case Applied(lanes):
                return self._applied(lanes, now)

    # Requests

    def admit(self, request: Request, now: float) -> list[Command] | None:
        """Handle an arrival without an `Arrived` event, which the simulator saves for speed. None: nothing to do."""
        routes = self._routes.get(request.model)
        if routes is None:
            return [Reply((request,), Outcome.REJECTED, NO_LANE)]
        size, priority, deadline = request.size, request.priority, request.deadline
        queue, finish = routes.choose(size, priority, deadline, now)
        if queue is None or finish > deadline:
            return self._admit_otherwise(request, routes, finish, now)
        self._held[request.id] = queue
        routes.push(queue, request, size, priority, deadline)
        lane = queue.lane
        if lane.batch is not None and deadline >= lane.wake:
            return None  # the usual case
        commands: list[Command] = []
        if lane.batch is None:
            self._advance(lane, now, commands)
        else:
            self._wake(lane, deadline, commands)
        return commands

    def _admit_together(self, requests: tuple[Request, ...], now: float) -> list[Command]:
        """Handle requests that arrive at the same moment. Idle lanes begin once all are in their queues."""
        commands: list[Command] = []
        idle: dict[LaneId, Lane] = {}
        for request in requests:
            routes = self._routes.get(request.model)
            if routes is None:
                commands.append(Reply((request,), Outcome.REJECTED, NO_LANE))
                continue
            size, priority, deadline = request.size, request.priority, request.deadline
            queue, finish = routes.choose(size, priority, deadline, now)
            if queue is None or finish > deadline:
                commands.extend(self._admit_otherwise(request, routes, finish, now))
                continue
            self._held[request.id] = queue
            routes.push(queue, request, size, priority, deadline)
            lane = queue.lane
            if lane.batch is None:
                idle[lane.id] = lane
            else:
                self._wake(lane, request.deadline, commands)
        for lane in idle.values():
            self._advance(lane, now, commands)
        return commands

    def late_finish(self, model: str, deadline: float, now: float) -> float:
        """Return when a request of one row would finish as the last of its priority, if that is after its deadline;
        infinity if it would be rejected because queues stand; minus infinity if it would not, or there is no lane to
        say so.

        A front end asks, before it reads a request. By its deadline the request may be more urgent than those that
        wait, but only because it has waited longer, unread.
        """
        routes = self._routes.get(model)
        if routes is None:
            return -math.inf
        queue, finish = routes.first(1, 0, math.inf, now)
        if queue is None:
            return -math.inf
        if finish <= deadline:
            return math.inf if routes.is_crowded(0, math.inf, deadline, now) else -math.inf
        return -math.inf if routes.before_its_turn(1, 0, math.inf, deadline, now) is not None else finish

    def room(self, model: str, deadline: float, now: float) -> tuple[int, float]:
        """Return how many requests of one row, as the last of their priority, would be admitted now, and when the first
        would finish; -1 for their number where there is no lane to say so, or they would run before their turn.

        Front ends in other processes reject by it. Of a queue's own batches whole ones count, as `finish_time` has it.
        """
        routes = self._routes.get(model)
        if routes is None:
            return -1, 0.0
        best, first = routes.first(1, 0, math.inf, now)
        if best is None:
            return -1, 0.0
        if first <= deadline:
            return routes.rows_by(deadline, now), first  # none, perhaps, where its queues stand
        hurries = routes.before_its_turn(1, 0, math.inf, deadline, now) is not None
        return (-1, 0.0) if hurries else (0, first)

    def _admit_otherwise(self, request: Request, routes: ModelRoutes, finish: float, now: float) -> list[Command]:
        """Handle the arrival of a request that no lane finishes in time in its turn, the best of them at `finish`; or
        that is in time, and no lane takes, since queues stand."""
        deadline = request.deadline
        if finish <= deadline or (request.size > 1 and routes.is_crowded(request.priority, deadline, deadline, now)):
            return [Reply((request,), Outcome.REJECTED, CROWDED)]
        places, finish = routes.otherwise(request, finish, now)
        if not places:
            if finish == math.inf:
                return [Reply((request,), Outcome.REJECTED, NO_WORKER)]
            return [Reply((request,), Outcome.REJECTED, TOO_LATE, finish - request.deadline)]
        commands: list[Command] = []
        touched: dict[LaneId, Lane] = {}
        self._enqueue(request, places, routes, touched, commands)
        for lane in touched.values():
            self._advance(lane, now, commands)
        return commands

    def _enqueue(
        self,
        request: Request,
        places: list[tuple[Queue, int]],
        routes: ModelRoutes,
        touched: dict[LaneId, Lane],
        commands: list[Command],
    ) -> None:
        """Insert a request into these queues, so many rows into each; add their lanes to `touched`."""
        parts = [request] if len(places) == 1 else self._open.split(request, [rows for _, rows in places], commands)
        for part, (queue, rows) in zip(parts, places):  # noqa: B905  # mypyc knows this zip
            self._held[part.id] = queue
            routes.push(queue, part, rows, part.priority, part.deadline)
            touched[queue.lane.id] = queue.lane

    def _cancelled(self, request_id: int, now: float) -> list[Command]:
        commands: list[Command] = []
        queue = self._held.get(request_id)
        if queue is None:
            whole = self._open.parts.by_request.get(request_id)
            if whole is not None:  # else it ended before its caller left
                self._open.end(tuple(whole.parts.values()), Outcome.CANCELLED, LEFT, commands)
            return commands
        gone = tuple([request for request in queue.waiting if request.id == request_id])
        if gone:
            queue.keep([request for request in queue.waiting if request.id != request_id])
            self._place(queue.lane)
        else:  # it is running; the batch goes on without it
            batch = queue.lane.batch
            assert batch is not None
            batch.intact = False
            gone = tuple([request for request in batch.requests if request.id == request_id])
        self._open.end(gone, Outcome.CANCELLED, LEFT, commands)
        return commands

    # Lanes

    def _advance(self, lane: Lane, now: float, commands: list[Command]) -> None:
        """Run what can run, and ask to be woken when something is due."""
        again = math.inf
        if lane.batch is None and lane.up:
            for queue in lane.queue_list:
                if queue.rows and (dropped := drop_requests(queue, now)):
                    self._open.end(tuple(dropped), Outcome.EXPIRED, HOPELESS, commands, lane=lane.id)
            best, count, rows, again = next_queue(lane, now)
            if best is not None:
                if self._parts and count < len(best.waiting) and best.waiting[count].id in self._parts:
                    fill = rows_to_fill(best, count, rows, now)
                    if fill:
                        self._fill(best, count, fill, commands)
                        count += 1
                        rows += fill
                self._run(lane, best, count, rows, now, commands)
        self._place(lane)
        due = min(lane.earliest(), again)
        if lane.batch is not None and lane.batch.overdue < due:
            due = lane.batch.overdue
        self._wake(lane, due, commands)

    def _fill(self, queue: Queue, position: int, rows: int, commands: list[Command]) -> None:
        """Split a waiting part, so that its first rows can run with the requests before it."""
        part = queue.waiting[position]
        parts = self._open.split(part, [rows, part.size - rows], commands)
        queue.waiting[position : position + 1] = parts
        for part in parts:
            self._held[part.id] = queue

    def _place(self, lane: Lane) -> None:
        """Update the routing order after the lane's finish times changed."""
        for queue in lane.routed:
            self._routes[queue.model].place(queue)

    def _wake(self, lane: Lane, due: float, commands: list[Command]) -> None:
        """Ask to be woken at `due`, unless an earlier wake is pending."""
        if due < lane.wake:
            lane.wake = due
            commands.append(WakeAt(lane.id, due))

    def _run(self, lane: Lane, queue: Queue, count: int, rows: int, now: float, commands: list[Command]) -> None:
        if queue.waiting[0].arrived <= queue.ended and queue.others:
            queue.waited(now - queue.ended + lane.lent - queue.lent)
        requests = tuple(queue.take(count, rows))
        note_batch(queue, requests[0], rows, now)
        self._batches += 1
        queue.ran = self._batches
        lane.batch = Batch(self._batches, queue, requests, rows, now)
        lane.free_at = now + queue.expected(rows)
        commands.append(Run(lane.id, self._batches, queue.model, requests))

    def _release(self, lane_id: LaneId, batch_id: int) -> tuple[Lane, Batch] | None:
        """Return the lane and the batch that just ended there; None if that batch is gone (a stale event)."""
        lane = self.lanes.get(lane_id)
        if lane is None or lane.batch is None or lane.batch.id != batch_id:
            return None
        batch, lane.batch = lane.batch, None
        if self._parts:
            batch.intact = False  # parts in it may end with others while its lane proceeds
        lane.set_state(up=True)
        return lane, batch

    def _finished(
        self, lane_id: LaneId, batch_id: int, failed: tuple[tuple[int, str], ...], lent: float, now: float
    ) -> list[Command]:
        released = self._release(lane_id, batch_id)
        if released is None:
            return []
        lane, batch = released
        lane.lent += lent
        batch.queue.observe(batch.predicted, now - batch.started + lent)
        batch.queue.ended = now
        batch.queue.lent = lane.lent
        commands: list[Command] = []
        self._proceed(lane, now, commands)  # before the replies, so that the lane does not idle while they are written
        requests = self._open.of(batch)
        if failed:
            reasons = dict(failed)
            for request in requests:
                if request.id in reasons and request.id in self._held:  # else it ended with another part
                    self._open.end((request,), Outcome.FAILED, reasons[request.id], commands, batch, lane.id)
            requests = tuple([request for request in requests if request.id in self._held])
        self._open.end(requests, Outcome.SERVED, "", commands, batch, lane.id)
        return commands

    def _failed(self, lane_id: LaneId, batch_id: int, reason: str, now: float) -> list[Command]:
        released = self._release(lane_id, batch_id)
        if released is None:
            return []
        lane, batch = released
        commands: list[Command] = []
        self._proceed(lane, now, commands)
        self._open.end(self._open.of(batch), Outcome.FAILED, reason, commands, batch, lane.id)
        return commands

    def _proceed(self, lane: Lane, now: float, commands: list[Command]) -> None:
        """Continue after a batch ended: run the next one, or report a draining lane as drained."""
        if lane.draining:
            del self.lanes[lane.id]
            commands.append(Drained(lane.id))
        else:
            self._advance(lane, now, commands)

    def _woke(self, lane_id: LaneId, time: float, now: float) -> list[Command]:
        lane = self.lanes.get(lane_id)
        if lane is None or time != lane.wake:
            return []
        if now < time:
            return [WakeAt(lane_id, time)]
        lane.wake = math.inf
        commands: list[Command] = []
        for queue in lane.queues.values():
            if queue.earliest() <= now:
                passed = [request for request in queue.waiting if request.deadline <= now]
                queue.keep([request for request in queue.waiting if request.deadline > now])
                self._open.end(tuple(passed), Outcome.EXPIRED, PASSED, commands, lane=lane.id)
        if lane.batch is not None and lane.batch.overdue <= now:
            self._stall(lane, lane.batch, now, commands)
        self._advance(lane, now, commands)
        return commands

    def _stall(self, lane: Lane, batch: Batch, now: float, commands: list[Command]) -> None:
        """End the running requests that are overdue, and move those that wait for the batch to other lanes. The batch
        goes on: it is for the supervisor to say when its worker hangs."""
        batch.overdue = math.inf
        ended = []
        for request in self._open.of(batch):
            due = request.deadline + batch.grace
            if due <= now:
                ended.append(request)
            elif due < batch.overdue:
                batch.overdue = due
        batch.intact = batch.intact and not ended
        self._open.end(tuple(ended), Outcome.EXPIRED, OVERDUE, commands, lane=lane.id)
        if not lane.stalled:
            lane.set_state(up=True, stalled=True)
            waiting = lane.take_all()
            self._place(lane)
            self._reroute(waiting, lane, Outcome.EXPIRED, STALLED, now, commands)

    # Workers and plans

    def _ready(self, lane_id: LaneId, now: float) -> list[Command]:
        lane = self.lanes.get(lane_id)
        commands: list[Command] = []
        if lane is not None and not lane.draining:
            lane.set_state(up=True, stalled=lane.stalled)
            self._advance(lane, now, commands)
        return commands

    def _died(self, lane_ids: tuple[LaneId, ...], back: dict[LaneId, float], now: float) -> list[Command]:
        """Take all these lanes down before anything is retried, so that nothing is retried on a lane that is lost too,
        or only once that is back."""
        commands: list[Command] = []
        displaced: list[tuple[Lane, list[Request]]] = []
        for lane_id in lane_ids:
            lane = self.lanes.get(lane_id)
            if lane is not None:
                displaced += self._lose(lane, commands)
        for lane_id, time in back.items():
            self._restarting(lane_id, time)
        for lane, requests in displaced:
            self._reroute(requests, lane, Outcome.FAILED, DIED_LATE, now, commands)
        return commands

    def _restarting(self, lane_id: LaneId, time: float) -> list[Command]:
        lane = self.lanes.get(lane_id)
        if lane is not None and not lane.up:
            lane.back_at = time
            self._place(lane)
        return []

    def _lose(self, lane: Lane, commands: list[Command]) -> list[tuple[Lane, list[Request]]]:
        """Take a lane down; return the requests to retry, those of its batch first."""
        lane.set_state(up=False)
        lost: tuple[Request, ...] = ()
        if lane.batch is not None:
            lost = self._open.of(lane.batch)
            lane.batch = None
        retried = [request for request in lost if request.id not in self._tried]
        twice = tuple([request for request in lost if request.id in self._tried])
        self._open.end(twice, Outcome.FAILED, DIED_TWICE, commands)
        retried = [request for request in retried if request.id in self._held]  # else it ended with another part
        self._tried.update([request.id for request in retried])
        waiting = lane.take_all()
        self._place(lane)
        if lane.draining:
            del self.lanes[lane.id]
            commands.append(Drained(lane.id))
        return [(lane, retried), (lane, waiting)]

    def _reroute(
        self, requests: Iterable[Request], home: Lane, end: Outcome, reason: str, now: float, commands: list[Command]
    ) -> None:
        """Move requests to other lanes; those that no lane finishes in time end with this outcome.

        If no other lane is up, they wait at `home` for its worker to come back, unless `home` is gone.
        """
        touched: dict[LaneId, Lane] = {}
        for request in requests:
            if request.id not in self._held:
                continue  # it ended with another part
            routes = self._routes.get(request.model)
            places = [] if routes is None else self._places(request, routes, home, now)
            if routes is None or not places:
                self._open.end((request,), end, reason, commands)
            else:
                self._enqueue(request, places, routes, touched, commands)
        for lane in touched.values():
            self._advance(lane, now, commands)

    def _places(self, request: Request, routes: ModelRoutes, home: Lane, now: float) -> list[tuple[Queue, int]]:
        """Return which queues take how many rows of a request; empty where they cannot finish in time."""
        size, priority, deadline = request.size, request.priority, request.deadline
        queue, finish = routes.first(size, priority, deadline, now)
        if queue is not None and finish <= deadline:
            return [(queue, size)]
        places, _ = routes.otherwise(request, finish, now)
        none_up = not any(queue.lane.available for queue in routes.queues)
        if not places and none_up and now <= deadline and self.lanes.get(home.id) is home and not home.draining:
            own = home.queues.get(request.model)
            if own is not None:
                places = [(own, min(own.batch, size - row)) for row in range(0, size, own.batch)]
        return places

    def _applied(self, specs: tuple[LaneSpec, ...], now: float) -> list[Command]:
        commands: list[Command] = []
        displaced = change_lanes(self.lanes, specs, commands)
        self._routes = routes_by_model(self.lanes, specs)
        for home, requests in displaced:
            self._reroute(requests, home, Outcome.EXPIRED, MOVED, now, commands)
        return commands

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        seen: dict[int, str] = {}
        for lane in self.lanes.values():
            lane.invariants()
            running = () if lane.batch is None else lane.batch.requests
            held = [request for queue in lane.queues.values() for request in queue.waiting]
            for request in (*held, *(request for request in running if request.id in self._held)):
                assert request.id not in seen, request
                seen[request.id] = lane.id
        assert seen.keys() == self._held.keys()
        assert all(self._held[id_].lane.id == lane for id_, lane in seen.items())
        assert self._tried <= self._held.keys()
        self._open.parts.invariants()
        assert self._parts.keys() <= self._held.keys()
        assert not self._open.parts.by_request.keys() & self._held.keys()
        for routes in self._routes.values():
            routes.invariants()
