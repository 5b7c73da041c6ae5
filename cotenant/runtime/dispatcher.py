"""Decide which request runs where and when, and which is rejected.

The live server and the simulator run the same object: events in, commands out. It never waits, reads no clock and holds
no tensors. Every request that arrives ends in exactly one `Reply`; `_end` is the only place that ends one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.batching import drop_requests, next_queue
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
    Run,
    WakeAt,
    Woke,
)
from cotenant.runtime.lane import Batch, Lane, Queue
from cotenant.runtime.routing import ModelRoutes

COMPILED = not __file__.endswith(".py")  # see the Makefile: `make compiled`

TOO_LATE: Final = "it could not be answered within its deadline"
NO_LANE: Final = "no partition holds the model"
NO_WORKER: Final = "no worker that holds the model is up"
TOO_LARGE: Final = "it has more rows than the largest batch that the plan allows"
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
        self._held: dict[int, Queue] = {}  # every open request → the queue that holds it or held it
        self._tried: set[int] = set()  # requests whose batch was lost with its worker once
        self._batches = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock."""
        match event:  # frequent ones first
            case Finished():
                return self._finished(event.lane, event.batch, event.failed, event.lent, now)
            case Arrived():
                return self.admit(event.request, now) or []
            case Woke():
                return self._woke(event.lane, event.time, now)
            case Cancelled(request_id):
                return self._cancelled(request_id, now)
            case Failed(lane, batch, reason):
                return self._failed(lane, batch, reason, now)
            case Died(lane, _, others):
                return self._died((lane, *others), now)
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
        queue, finish = routes.first(size, priority, deadline, now)
        if queue is None:
            small = any(size <= queue.batch for queue in routes.queues)
            return [Reply((request,), Outcome.REJECTED, NO_WORKER if small else TOO_LARGE)]
        if finish > deadline:
            return [Reply((request,), Outcome.REJECTED, TOO_LATE, finish - deadline)]
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

    def _cancelled(self, request_id: int, now: float) -> list[Command]:
        queue = self._held.get(request_id)
        if queue is None:
            return []  # it ended before its caller left
        commands: list[Command] = []
        gone = tuple([request for request in queue.waiting if request.id == request_id])
        if gone:
            queue.keep([request for request in queue.waiting if request.id != request_id])
            self._place(queue.lane)
        else:  # it is running; the batch goes on without it
            batch = queue.lane.batch
            assert batch is not None
            batch.intact = False
            gone = tuple([request for request in batch.requests if request.id == request_id])
        self._end(gone, Outcome.CANCELLED, LEFT, commands)
        return commands

    def _open(self, batch: Batch) -> tuple[Request, ...]:
        """Return the requests of a batch that have not ended yet."""
        if batch.intact:
            return batch.requests
        return tuple([request for request in batch.requests if request.id in self._held])

    def _end(
        self,
        requests: tuple[Request, ...],
        outcome: Outcome,
        reason: str,
        commands: list[Command],
        batch: Batch | None = None,
        lane: LaneId | None = None,
    ) -> None:
        """End requests, all of them open."""
        if not requests:
            return
        held = self._held
        for request in requests:
            del held[request.id]
        if self._tried:
            self._tried.difference_update([request.id for request in requests])
        if batch is None:
            commands.append(Reply(requests, outcome, reason, 0.0, lane))
        else:
            commands.append(Reply(requests, outcome, reason, 0.0, lane, batch.id, batch.started))

    # Lanes

    def _advance(self, lane: Lane, now: float, commands: list[Command]) -> None:
        """Run what can run, and ask to be woken when something is due."""
        again = math.inf
        if lane.batch is None and lane.up:
            for queue in lane.queue_list:
                if queue.rows and (dropped := drop_requests(queue, now)):
                    self._end(tuple(dropped), Outcome.EXPIRED, HOPELESS, commands, lane=lane.id)
            best, count, rows, again = next_queue(lane, now)
            if best is not None:
                self._run(lane, best, count, rows, now, commands)
        self._place(lane)
        due = min(lane.earliest(), again)
        if lane.batch is not None and lane.batch.overdue < due:
            due = lane.batch.overdue
        self._wake(lane, due, commands)

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
        requests = self._open(batch)
        if failed:
            reasons = dict(failed)
            for request in requests:
                if request.id in reasons:
                    self._end((request,), Outcome.FAILED, reasons[request.id], commands, batch, lane.id)
            requests = tuple([request for request in requests if request.id not in reasons])
        self._end(requests, Outcome.SERVED, "", commands, batch, lane.id)
        return commands

    def _failed(self, lane_id: LaneId, batch_id: int, reason: str, now: float) -> list[Command]:
        released = self._release(lane_id, batch_id)
        if released is None:
            return []
        lane, batch = released
        commands: list[Command] = []
        self._proceed(lane, now, commands)
        self._end(self._open(batch), Outcome.FAILED, reason, commands, batch, lane.id)
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
                self._end(tuple(passed), Outcome.EXPIRED, PASSED, commands, lane=lane.id)
        if lane.batch is not None and lane.batch.overdue <= now:
            self._stall(lane, lane.batch, now, commands)
        self._advance(lane, now, commands)
        return commands

    def _stall(self, lane: Lane, batch: Batch, now: float, commands: list[Command]) -> None:
        """End the running requests that are overdue, and move those that wait for the batch to other lanes. The batch
        goes on: it is for the supervisor to say when its worker hangs."""
        batch.overdue = math.inf
        ended = []
        for request in self._open(batch):
            due = request.deadline + batch.grace
            if due <= now:
                ended.append(request)
            elif due < batch.overdue:
                batch.overdue = due
        batch.intact = batch.intact and not ended
        self._end(tuple(ended), Outcome.EXPIRED, OVERDUE, commands, lane=lane.id)
        if not lane.stalled:
            lane.set_state(up=True, stalled=True)
            waiting = self._take_all(lane)
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

    def _died(self, lane_ids: tuple[LaneId, ...], now: float) -> list[Command]:
        """Take all these lanes down before anything is retried, so that nothing is retried on a lane that is lost
        too."""
        commands: list[Command] = []
        displaced: list[tuple[Lane, list[Request]]] = []
        for lane_id in lane_ids:
            lane = self.lanes.get(lane_id)
            if lane is not None:
                displaced += self._lose(lane, commands)
        for lane, requests in displaced:
            self._reroute(requests, lane, Outcome.FAILED, DIED_LATE, now, commands)
        return commands

    def _lose(self, lane: Lane, commands: list[Command]) -> list[tuple[Lane, list[Request]]]:
        """Take a lane down; return the requests to retry, those of its batch first."""
        lane.set_state(up=False)
        lost: tuple[Request, ...] = ()
        if lane.batch is not None:
            lost = self._open(lane.batch)
            lane.batch = None
        retried = [request for request in lost if request.id not in self._tried]
        twice = tuple([request for request in lost if request.id in self._tried])
        self._end(twice, Outcome.FAILED, DIED_TWICE, commands)
        self._tried.update([request.id for request in retried])
        waiting = self._take_all(lane)
        self._place(lane)
        if lane.draining:
            del self.lanes[lane.id]
            commands.append(Drained(lane.id))
        return [(lane, retried), (lane, waiting)]

    def _take_all(self, lane: Lane) -> list[Request]:
        taken = [request for queue in lane.queues.values() for request in queue.waiting]
        for queue in lane.queues.values():
            queue.keep([])
        return taken

    def _reroute(
        self, requests: Iterable[Request], home: Lane, end: Outcome, reason: str, now: float, commands: list[Command]
    ) -> None:
        """Move requests to other lanes; those that no lane finishes in time end with this outcome.

        If no other lane is up, they wait at `home` for its worker to come back, unless `home` is gone.
        """
        touched: dict[LaneId, Lane] = {}
        for request in requests:
            routes = self._routes.get(request.model)
            size, priority, deadline = request.size, request.priority, request.deadline
            queue, finish = (None, math.inf) if routes is None else routes.first(size, priority, deadline, now)
            own_reason = reason
            if queue is None and self.lanes.get(home.id) is home and not home.draining:
                own = home.queues.get(request.model)
                if own is not None and size > own.batch:
                    own_reason = TOO_LARGE  # under the new plan
                else:
                    queue, finish = own, now
            if queue is None or routes is None or finish > deadline:
                self._end((request,), end, own_reason, commands)
                continue
            self._held[request.id] = queue
            routes.push(queue, request, size, priority, deadline)
            touched[queue.lane.id] = queue.lane
        for lane in touched.values():
            self._advance(lane, now, commands)

    def _applied(self, specs: tuple[LaneSpec, ...], now: float) -> list[Command]:
        commands: list[Command] = []
        displaced: list[tuple[Lane, list[Request]]] = []
        wanted = {spec.id: spec for spec in specs}
        for lane in list(self.lanes.values()):
            spec = wanted.get(lane.id)
            if spec is None and not lane.draining:
                displaced.append((lane, self._take_all(lane)))
                if lane.batch is None:
                    del self.lanes[lane.id]
                    commands.append(Drained(lane.id))
                else:
                    lane.draining = True
            elif spec is not None:
                lane.draining = False
                displaced.append((lane, lane.update(spec)))
        for spec in specs:
            if spec.id not in self.lanes:
                self.lanes[spec.id] = Lane(spec)
        for lane in self.lanes.values():
            lane.routed = []
        holding: dict[str, list[Queue]] = {}
        for spec in specs:
            for queue in self.lanes[spec.id].queues.values():
                holding.setdefault(queue.model, []).append(queue)
        self._routes = {model: ModelRoutes(queues) for model, queues in holding.items()}
        for home, requests in displaced:
            self._reroute(requests, home, Outcome.EXPIRED, MOVED, now, commands)
        return commands

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        seen: dict[int, str] = {}
        for lane in self.lanes.values():
            for queue in lane.queues.values():
                assert queue.rows == sum(request.size for request in queue.waiting), lane.id
                urgency = [(request.priority, request.deadline) for request in queue.waiting]
                assert urgency == sorted(urgency), lane.id
                for request in queue.waiting:
                    assert request.id not in seen, request
                    assert request.size <= queue.batch, request
                    seen[request.id] = lane.id
            if lane.batch is not None:
                assert lane.up, lane.id
                assert lane.batch.overdue >= lane.wake, lane.id
                assert lane.available != lane.stalled, lane.id
            else:
                assert not lane.stalled and lane.available == lane.up, lane.id
            if lane.batch is not None:
                assert sum(request.size for request in lane.batch.requests) == lane.batch.rows
                for request in lane.batch.requests:
                    if request.id in self._held:
                        assert request.id not in seen, request
                        seen[request.id] = lane.id
            assert lane.earliest() >= lane.wake, lane.id
            assert not (lane.draining and (lane.batch is None or lane.earliest() < math.inf)), lane.id
        assert seen.keys() == self._held.keys()
        assert all(self._held[id_].lane.id == lane for id_, lane in seen.items())
        assert self._tried <= self._held.keys()
        for routes in self._routes.values():
            routes.invariants()
