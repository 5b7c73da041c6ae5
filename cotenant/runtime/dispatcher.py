"""Decides which request runs where and when, and which is not taken.

The same object serves live and in the simulator: events in, commands out. It never waits, reads no clock and holds no
tensor. A request that arrived ends in exactly one `Reply`, whatever happens: `_end` is the one place that says so.
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
HOPELESS: Final = "it can no longer be answered within its deadline"
LEFT: Final = "the caller left"
DIED_TWICE: Final = "its worker died, and so did the one that tried again"
DIED_LATE: Final = "its worker died, and there is no time to try again"
MOVED: Final = "its partition was taken out while it waited, and no other can answer it in time"


class Dispatcher:
    """Feed it events in the order of time; perform what it answers, in order."""

    def __init__(self) -> None:
        self.lanes: dict[LaneId, Lane] = {}
        self._routes: dict[str, ModelRoutes] = {}  # by model
        self._held: dict[int, Queue] = {}  # every request that has not ended → the queue that has or had it
        self._tried: set[int] = set()  # those that were in a batch whose worker died
        self._batches = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about an event at the time `now`, in seconds of any monotonic clock."""
        match event:  # those that come often first
            case Finished():
                return self._finished(event.lane, event.batch, event.failed, now)
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
        """What `handle` does about an `Arrived`; for the simulator, to which making one for each request is much. None
        where there is nothing to do."""
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
            return None  # as it is mostly
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
            batch.whole = False
            gone = tuple([request for request in batch.requests if request.id == request_id])
        self._end(gone, Outcome.CANCELLED, LEFT, commands)
        return commands

    def _open(self, batch: Batch) -> tuple[Request, ...]:
        """Those of its requests that have not ended yet."""
        if batch.whole:
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
        """End requests, none of which has ended yet."""
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
        """Run what can run, and see to it that the lane is looked at again when something is due."""
        again = math.inf
        if lane.batch is None and lane.up:
            for queue in lane.each:
                if queue.rows and (dropped := drop_requests(queue, now)):
                    self._end(tuple(dropped), Outcome.EXPIRED, HOPELESS, commands, lane=lane.id)
            best, count, rows, again = next_queue(lane, now)
            if best is not None:
                self._run(lane, best, count, rows, now, commands)
        self._place(lane)
        self._wake(lane, min(lane.earliest(), again), commands)

    def _place(self, lane: Lane) -> None:
        """When the lane would be done changed."""
        for queue in lane.routed:
            self._routes[queue.model].place(queue)

    def _wake(self, lane: Lane, due: float, commands: list[Command]) -> None:
        """Ask to be woken by then, unless that was asked already."""
        if due < lane.wake:
            lane.wake = due
            commands.append(WakeAt(lane.id, due))

    def _run(self, lane: Lane, queue: Queue, count: int, rows: int, now: float, commands: list[Command]) -> None:
        if queue.waiting[0].arrived <= queue.ended and queue.others:
            queue.waited(now - queue.ended)
        requests = tuple(queue.take(count, rows))
        self._batches += 1
        queue.ran = self._batches
        lane.batch = Batch(self._batches, queue, requests, rows, now)
        lane.free_at = now + queue.expected(rows)
        commands.append(Run(lane.id, self._batches, queue.model, requests))

    def _release(self, lane_id: LaneId, batch_id: int) -> tuple[Lane, Batch] | None:
        """The lane and the batch that just ended there; None for news of a batch that is not there any more."""
        lane = self.lanes.get(lane_id)
        if lane is None or lane.batch is None or lane.batch.id != batch_id:
            return None
        batch, lane.batch = lane.batch, None
        return lane, batch

    def _finished(
        self, lane_id: LaneId, batch_id: int, failed: tuple[tuple[int, str], ...], now: float
    ) -> list[Command]:
        released = self._release(lane_id, batch_id)
        if released is None:
            return []
        lane, batch = released
        batch.queue.observe(batch.rows, now - batch.started)
        batch.queue.ended = now
        commands: list[Command] = []
        self._proceed(lane, now, commands)  # before the answers: the lane should not idle while they are written
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
        """A lane became free: go on, or leave if it was only finishing its last batch."""
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
        self._advance(lane, now, commands)
        return commands

    # Workers and plans

    def _ready(self, lane_id: LaneId, now: float) -> list[Command]:
        lane = self.lanes.get(lane_id)
        commands: list[Command] = []
        if lane is not None and not lane.draining:
            lane.up = True
            self._advance(lane, now, commands)
        return commands

    def _died(self, lane_ids: tuple[LaneId, ...], now: float) -> list[Command]:
        """Lose the workers of all these lanes before anything is tried again: not where it would be lost again."""
        commands: list[Command] = []
        homeless: list[tuple[Lane, list[Request]]] = []
        for lane_id in lane_ids:
            lane = self.lanes.get(lane_id)
            if lane is not None:
                homeless += self._lose(lane, commands)
        for lane, requests in homeless:
            self._reroute(requests, lane, Outcome.FAILED, DIED_LATE, now, commands)
        return commands

    def _lose(self, lane: Lane, commands: list[Command]) -> list[tuple[Lane, list[Request]]]:
        """Take a lane's worker away; the requests that are to be tried again, first those of its batch."""
        lane.up = False
        lost: tuple[Request, ...] = ()
        if lane.batch is not None:
            lost = self._open(lane.batch)
            lane.batch = None
        again = [request for request in lost if request.id not in self._tried]
        twice = tuple([request for request in lost if request.id in self._tried])
        self._end(twice, Outcome.FAILED, DIED_TWICE, commands)
        self._tried.update([request.id for request in again])
        waiting = self._take_all(lane)
        self._place(lane)
        if lane.draining:
            del self.lanes[lane.id]
            commands.append(Drained(lane.id))
        return [(lane, again), (lane, waiting)]

    def _take_all(self, lane: Lane) -> list[Request]:
        taken = [request for queue in lane.queues.values() for request in queue.waiting]
        for queue in lane.queues.values():
            queue.keep([])
        return taken

    def _reroute(
        self, requests: Iterable[Request], home: Lane, end: Outcome, reason: str, now: float, commands: list[Command]
    ) -> None:
        """Find another lane for requests that left theirs, which end like that where there is none in time. Where no
        other is up they wait at home for its worker to come back, unless home is gone."""
        touched: dict[LaneId, Lane] = {}
        for request in requests:
            routes = self._routes.get(request.model)
            size, priority, deadline = request.size, request.priority, request.deadline
            queue, finish = (None, math.inf) if routes is None else routes.first(size, priority, deadline, now)
            why = reason
            if queue is None and self.lanes.get(home.id) is home and not home.draining:
                own = home.queues.get(request.model)
                if own is not None and size > own.batch:
                    why = TOO_LARGE  # since its plan came
                else:
                    queue, finish = own, now
            if queue is None or routes is None or finish > deadline:
                self._end((request,), end, why, commands)
                continue
            self._held[request.id] = queue
            routes.push(queue, request, size, priority, deadline)
            touched[queue.lane.id] = queue.lane
        for lane in touched.values():
            self._advance(lane, now, commands)

    def _applied(self, specs: tuple[LaneSpec, ...], now: float) -> list[Command]:
        commands: list[Command] = []
        homeless: list[tuple[Lane, list[Request]]] = []
        wanted = {spec.id: spec for spec in specs}
        for lane in list(self.lanes.values()):
            spec = wanted.get(lane.id)
            if spec is None and not lane.draining:
                homeless.append((lane, self._take_all(lane)))
                if lane.batch is None:
                    del self.lanes[lane.id]
                    commands.append(Drained(lane.id))
                else:
                    lane.draining = True
            elif spec is not None:
                lane.draining = False
                homeless.append((lane, lane.hold(spec)))
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
        for home, requests in homeless:
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
