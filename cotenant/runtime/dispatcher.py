"""Decides which request runs where and when, and which is not taken.

The same object serves live and in the simulator: events in, commands out. It never waits, reads no clock and holds no
tensor. A request that arrived ends in exactly one `Reply`, whatever happens: `_end` is the one place that says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from cotenant.core.request import Outcome, Request
from cotenant.runtime.admission import finish_time
from cotenant.runtime.batching import drop_for_throughput, drop_hopeless, next_queue
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

TOO_LATE = "it could not be answered within its deadline"
NO_LANE = "no partition holds the model"
NO_WORKER = "no worker that holds the model is up"
TOO_LARGE = "it has more rows than the largest batch that the plan allows"
PASSED = "its deadline passed while it waited"
HOPELESS = "it can no longer be answered within its deadline"
LEFT = "the caller left"
DIED_TWICE = "its worker died, and so did the one that tried again"
DIED_LATE = "its worker died, and there is no time to try again"
MOVED = "its partition was taken out while it waited, and no other can answer it in time"


class Dispatcher:
    """Feed it events in the order of time; perform what it answers, in order."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self._by_model: dict[str, list[Lane]] = {}
        self._held: dict[int, Lane] = {}  # every request that has not ended → the lane that has it
        self._tried: set[int] = set()  # those that were in a batch whose worker died
        self._batches = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about an event at the time `now`, in seconds of any monotonic clock."""
        match event:
            case Arrived(request):
                return self._arrived(request, now)
            case Finished(lane, batch, failed):
                return self._finished(lane, batch, failed, now)
            case Woke(lane, time):
                return self._woke(lane, time, now)
            case Cancelled(request_id):
                return self._cancelled(request_id, now)
            case Failed(lane, batch, reason):
                return self._failed(lane, batch, reason, now)
            case Died(lane, reason):
                return self._died(lane, reason, now)
            case Ready(lane):
                return self._ready(lane, now)
            case Applied(lanes):
                return self._applied(lanes, now)

    # Requests

    def _arrived(self, request: Request, now: float) -> list[Command]:
        lane, finish = self._route(request, now)
        if lane is None:
            return [Reply((request,), Outcome.REFUSED, self._why_not(request))]
        if finish > request.deadline:
            return [Reply((request,), Outcome.REFUSED, TOO_LATE, finish - request.deadline)]
        self._held[request.id] = lane
        lane.queues[request.model].push(request)
        commands: list[Command] = []
        if lane.batch is None:
            self._advance(lane, now, commands)
        else:
            self._wake(lane, request.deadline, commands)
        return commands

    def _route(self, request: Request, now: float) -> tuple[Lane | None, float]:
        """The lane that would be done first, and when; None where no lane that is up can take the request."""
        best: Lane | None = None
        best_finish = math.inf
        for lane in self._by_model.get(request.model, ()):
            if lane.up and request.size <= lane.queues[request.model].batch:
                finish = finish_time(lane, request, now)
                if best is None or finish < best_finish:
                    best, best_finish = lane, finish
        return best, best_finish

    def _why_not(self, request: Request) -> str:
        lanes = self._by_model.get(request.model)
        if not lanes:
            return NO_LANE
        return NO_WORKER if any(request.size <= lane.queues[request.model].batch for lane in lanes) else TOO_LARGE

    def _cancelled(self, request_id: int, now: float) -> list[Command]:
        lane = self._held.get(request_id)
        if lane is None:
            return []  # it ended before its caller left
        commands: list[Command] = []
        for queue in lane.queues.values():
            for request in queue.waiting:
                if request.id == request_id:
                    queue.remove(request)
                    self._end((request,), Outcome.CANCELLED, LEFT, commands)
                    return commands
        # It is running. The batch goes on without it.
        assert lane.batch is not None
        gone = [request for request in lane.batch.requests if request.id == request_id]
        self._end(gone, Outcome.CANCELLED, LEFT, commands)
        return commands

    def _end(
        self,
        requests: Iterable[Request],
        outcome: Outcome,
        reason: str,
        commands: list[Command],
        batch: Batch | None = None,
        lane: str = "",
    ) -> None:
        """End those of the requests that have not ended yet."""
        held, tried = self._held, self._tried
        ending = tuple([request for request in requests if held.pop(request.id, None) is not None])
        if not ending:
            return
        if tried:
            tried.difference_update([request.id for request in ending])
        if batch is None:
            commands.append(Reply(ending, outcome, reason, 0.0, lane))
        else:
            commands.append(Reply(ending, outcome, reason, 0.0, lane, batch.id, batch.started))

    # Lanes

    def _advance(self, lane: Lane, now: float, commands: list[Command]) -> None:
        """Run what can run, and see to it that the lane is looked at again when something is due."""
        again = math.inf
        if lane.batch is None and lane.up:
            for queue in lane.queues.values():
                if queue.waiting and (dropped := drop_hopeless(queue, now) + drop_for_throughput(queue, now)):
                    self._end(dropped, Outcome.EXPIRED, HOPELESS, commands, lane=lane.id)
            best, count, rows, again = next_queue(lane, now)
            if best is not None:
                self._run(lane, best, count, rows, now, commands)
        self._wake(lane, min(lane.earliest(), again), commands)

    def _wake(self, lane: Lane, due: float, commands: list[Command]) -> None:
        """Ask to be woken by then, unless that was asked already."""
        if due < lane.wake:
            lane.wake = due
            commands.append(WakeAt(lane.id, due))

    def _run(self, lane: Lane, queue: Queue, count: int, rows: int, now: float, commands: list[Command]) -> None:
        waiting = queue.waiting
        if count == len(waiting):
            requests = tuple(waiting)
            waiting.clear()
        else:
            requests = tuple([waiting.popleft() for _ in range(count)])
        queue.rows -= rows
        self._batches += 1
        queue.ran = self._batches
        lane.batch = Batch(self._batches, queue, requests, rows, now)
        lane.free_at = now + queue.expected(rows)
        commands.append(Run(lane.id, self._batches, queue.model, requests))

    def _release(self, lane_id: str, batch_id: int) -> tuple[Lane, Batch] | None:
        """The lane and the batch that just ended there; None for news of a batch that is not there any more."""
        lane = self.lanes.get(lane_id)
        if lane is None or lane.batch is None or lane.batch.id != batch_id:
            return None
        batch, lane.batch = lane.batch, None
        return lane, batch

    def _finished(self, lane_id: str, batch_id: int, failed: tuple[tuple[int, str], ...], now: float) -> list[Command]:
        released = self._release(lane_id, batch_id)
        if released is None:
            return []
        lane, batch = released
        batch.queue.observe(batch.rows, now - batch.started)
        commands: list[Command] = []
        self._proceed(lane, now, commands)  # before the answers: the lane should not idle while they are written
        requests = batch.requests
        if failed:
            reasons = dict(failed)
            for request in requests:
                if request.id in reasons:
                    self._end((request,), Outcome.FAILED, reasons[request.id], commands, batch, lane.id)
            requests = tuple([request for request in requests if request.id not in reasons])
        self._end(requests, Outcome.SERVED, "", commands, batch, lane.id)
        return commands

    def _failed(self, lane_id: str, batch_id: int, reason: str, now: float) -> list[Command]:
        released = self._release(lane_id, batch_id)
        if released is None:
            return []
        lane, batch = released
        commands: list[Command] = []
        self._proceed(lane, now, commands)
        self._end(batch.requests, Outcome.FAILED, reason, commands, batch, lane.id)
        return commands

    def _proceed(self, lane: Lane, now: float, commands: list[Command]) -> None:
        """A lane became free: go on, or leave if it was only finishing its last batch."""
        if lane.draining:
            del self.lanes[lane.id]
            commands.append(Drained(lane.id))
        else:
            self._advance(lane, now, commands)

    def _woke(self, lane_id: str, time: float, now: float) -> list[Command]:
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
                for request in passed:
                    queue.remove(request)
                self._end(passed, Outcome.EXPIRED, PASSED, commands, lane=lane.id)
        self._advance(lane, now, commands)
        return commands

    # Workers and plans

    def _ready(self, lane_id: str, now: float) -> list[Command]:
        lane = self.lanes.get(lane_id)
        commands: list[Command] = []
        if lane is not None and not lane.draining:
            lane.up = True
            self._advance(lane, now, commands)
        return commands

    def _died(self, lane_id: str, reason: str, now: float) -> list[Command]:
        lane = self.lanes.get(lane_id)
        if lane is None:
            return []
        lane.up = False
        lost: tuple[Request, ...] = ()
        if lane.batch is not None:
            lost = tuple([request for request in lane.batch.requests if request.id in self._held])
            lane.batch = None
        commands: list[Command] = []
        again = [request for request in lost if request.id not in self._tried]
        self._end([request for request in lost if request.id in self._tried], Outcome.FAILED, DIED_TWICE, commands)
        self._tried.update([request.id for request in again])
        waiting = self._take_all(lane)
        if lane.draining:
            del self.lanes[lane.id]
            commands.append(Drained(lane.id))
        self._reroute(again, lane, DIED_LATE, now, commands)
        self._reroute(waiting, lane, DIED_LATE, now, commands)
        return commands

    def _take_all(self, lane: Lane) -> list[Request]:
        taken = [request for queue in lane.queues.values() for request in queue.waiting]
        for queue in lane.queues.values():
            queue.waiting.clear()
            queue.rows = 0
        return taken

    def _reroute(
        self, requests: Iterable[Request], home: Lane, reason: str, now: float, commands: list[Command]
    ) -> None:
        """Find another lane for requests that left theirs. Where no other is up they wait at home for its worker to
        come back, unless home is gone."""
        touched: dict[str, Lane] = {}
        for request in requests:
            lane, finish = self._route(request, now)
            if lane is None and self.lanes.get(home.id) is home and request.model in home.queues and not home.draining:
                lane, finish = home, now
            if lane is None or finish > request.deadline:
                self._end((request,), Outcome.FAILED, reason, commands)
                continue
            self._held[request.id] = lane
            lane.queues[request.model].push(request)
            touched[lane.id] = lane
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
                homeless.append((lane, self._reshape(lane, spec)))
        for spec in specs:
            if spec.id not in self.lanes:
                self.lanes[spec.id] = Lane(spec)
        self._by_model = {}
        for spec in specs:
            for model in spec.models:
                self._by_model.setdefault(model.model, []).append(self.lanes[spec.id])
        for home, requests in homeless:
            self._reroute(requests, home, MOVED, now, commands)
        return commands

    def _reshape(self, lane: Lane, spec: LaneSpec) -> list[Request]:
        """Give a lane that stays its new models and batches; answers the requests that lost their place."""
        homeless: list[Request] = []
        kept = {model.model: model for model in spec.models}
        for name, queue in list(lane.queues.items()):
            model = kept.get(name)
            if model is None:
                homeless.extend(queue.waiting)
                del lane.queues[name]
                continue
            queue.update(model)
            for request in [request for request in queue.waiting if request.size > queue.batch]:
                queue.remove(request)
                homeless.append(request)
        for name, model in kept.items():
            if name not in lane.queues:
                lane.queues[name] = Queue(model)
        return homeless

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
        assert all(self._held[id_].id == lane for id_, lane in seen.items())
        assert self._tried <= self._held.keys()
