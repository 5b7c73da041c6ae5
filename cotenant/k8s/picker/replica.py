"""Predict what one server would do with a request, from the admission state that it told last.

The state ages between two looks. So the server's lanes are rebuilt here, and what should happen on them meanwhile is
played out: batches end when they were predicted to, the next ones begin by the server's own rules, and the requests
that were sent there since wait in its queues.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.request import Request
from cotenant.runtime.admission_state import AdmissionState, ModelTarget, restore_lane
from cotenant.runtime.batching import drop_requests
from cotenant.runtime.lane import Batch, Lane, Queue
from cotenant.runtime.routing import ModelRoutes
from cotenant.runtime.standing import note_batch
from cotenant.runtime.turns import next_queue


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """When a request would finish, in seconds of the caller's clock; infinity where no worker could take it. admitted:
    whether it would be, rather than rejected."""

    finish: float
    admitted: bool


class Replica:
    """Follow a server from an admission state on. Times are of one clock, and never run backwards."""

    def __init__(self, state: AdmissionState, now: float) -> None:
        """now: the moment that the state describes."""
        self.accepting = state.accepting
        self._models = state.models
        self._lanes = [restore_lane(lane, now) for lane in state.lanes]
        self._batches = max((queue.ran for lane in self._lanes for queue in lane.queue_list), default=0)
        holding: dict[str, list[Queue]] = {}
        for lane in self._lanes:
            for queue in lane.queue_list:
                holding.setdefault(queue.model, []).append(queue)
        self._routes = {model: ModelRoutes(queues) for model, queues in holding.items()}

    def serves(self, model: str) -> bool:
        """Return whether the server has a model."""
        return model in self._models

    def timeout(self, model: str) -> float:
        """Return the seconds that a request for a model has that does not say it."""
        return self._models[model].timeout

    def predict(self, model: str, deadline: float, now: float) -> Prediction:
        """Predict what becomes of a request of one row that arrives now. Of an application, the stages that begin at
        once are asked, each with what the later ones leave of the time."""
        self._advance(now)
        target = self._models[model]
        if not target.stages:
            return self._predict(model, deadline, now)
        finish, admitted = now, True
        for stage, downstream in self._stages(target, deadline, now):
            predicted = self._predict(stage, deadline - downstream, now)
            finish = max(finish, predicted.finish + downstream)
            admitted = admitted and predicted.admitted
        return Prediction(finish, admitted)

    def admit(self, model: str, deadline: float, now: float) -> None:
        """Count with a request of one row that was sent to the server; nothing where it would not take it."""
        self._advance(now)
        target = self._models.get(model)
        if target is None:
            return
        stages = self._stages(target, deadline, now) if target.stages else [(model, 0.0)]
        for stage, downstream in stages:
            self._admit(stage, deadline - downstream, now)

    def _stages(self, target: ModelTarget, deadline: float, now: float) -> list[tuple[str, float]]:
        """Return the stages that begin at once, with the seconds that are kept for those behind. A deadline shorter
        than the target shortens them in proportion, as in `runtime.applications`."""
        scale = min(1.0, (deadline - now) / target.timeout)
        return [(stage, downstream * scale) for stage, downstream in target.stages]

    def _predict(self, model: str, deadline: float, now: float) -> Prediction:
        routes = self._routes.get(model)
        if routes is None:
            return Prediction(math.inf, False)
        queue, finish = routes.choose(1, 0, deadline, now)
        if queue is None:
            return Prediction(max(finish, deadline), False)
        if finish <= deadline:
            return Prediction(finish, True)
        if routes.before_its_turn(1, 0, deadline, deadline, now) is not None:
            return Prediction(deadline, True)
        return Prediction(finish, False)

    def _admit(self, model: str, deadline: float, now: float) -> None:
        routes = self._routes.get(model)
        if routes is None:
            return
        queue, finish = routes.choose(1, 0, deadline, now)
        if queue is not None and finish > deadline:
            queue = routes.before_its_turn(1, 0, deadline, deadline, now)
        if queue is not None:
            routes.push(queue, Request(0, model, now, deadline), 1, 0, deadline)
            self._advance_lane(queue.lane, now)

    def _advance(self, now: float) -> None:
        for lane in self._lanes:
            batch = lane.batch
            if lane.free_at <= now if batch is not None else (not lane.up or any(q.rows for q in lane.queue_list)):
                self._advance_lane(lane, now)

    def _advance_lane(self, lane: Lane, now: float) -> None:
        """Let batches end and begin on a lane, as the dispatcher would."""
        while True:
            at = now
            if lane.batch is not None:
                if lane.free_at > now:
                    break
                lane.batch.queue.ended = at = lane.free_at
                lane.batch = None
            elif not lane.up:
                if not -math.inf < lane.back_at <= now:
                    break
                at = lane.back_at
                lane.set_state(up=True)
            for queue in lane.queue_list:
                if queue.rows:
                    drop_requests(queue, at)
            best, count, rows, _ = next_queue(lane, at)
            if best is None:
                break
            note_batch(best, best.take(count, rows)[0], rows, at)
            self._batches += 1
            best.ran = self._batches
            lane.batch = Batch(self._batches, best, (), rows, at)
            lane.free_at = at + best.expected(rows)
        for queue in lane.routed:
            self._routes[queue.model].place(queue)
