"""Carry out the dispatcher's commands on a running event loop.

The driver decides nothing, and answers every caller in one place, `_reply`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.core.tensor import Tensor
from cotenant.errors import CancelledError, FailedError, RequestError, UnavailableError
from cotenant.live.event_log import EventLog
from cotenant.live.oip import rejection
from cotenant.live.split_tensors import SplitTensors
from cotenant.runtime.admission_state import LaneState, read_lane
from cotenant.runtime.applications import Applications
from cotenant.runtime.dispatcher import Dispatcher
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
    Ready,
    Reply,
    Restarting,
    Run,
    Spawn,
    Split,
    WakeAt,
    Woke,
)
from cotenant.runtime.log import log_line
from cotenant.worker.wire import Timing

logger = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
Answered = Callable[[Tensors | RequestError], None]

# uvloop rounds timers to milliseconds; a timer that fires early has to be set again.
ROUNDING = 0.0005
TOGETHER = 0.0005  # seconds for which requests that come in one round of the event loop may wait for the others
MAX_WRITING = (
    1 / 4
)  # of a request's time that is left for writing responses: with more, nothing might be taken any more
GAIN = 1 / 8  # of the exponential average of how long responses take to write


class Observer(Protocol):
    """Receive everything that is worth counting. Times are of the driver's clock, durations in seconds."""

    def ended(self, reply: Reply, now: float) -> None: ...

    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None: ...


class Tracer(Protocol):
    """Hear of each request, and of batches before their requests end. Times are of the driver's clock."""

    def arrived(self, request: Request, parent: str) -> None: ...

    def spawned(self, whole: int, request: Request) -> None: ...

    def ran(self, run: Run, timing: Timing) -> None: ...

    def ended(self, reply: Reply, now: float) -> None: ...


class StageTensors(Protocol):
    """The tensors of an application request, from stage to stage. number: of a stage; item: of its requests, from 0."""

    def inputs(self, number: int, item: int) -> Tensors: ...

    def made(self, number: int, outputs: Tensors) -> dict[int, int]:
        """Return how many requests each later stage gets, for stages whose number the outputs decide. Raises
        RequestError."""
        ...

    def take(self, number: int, item: int, outputs: Tensors) -> None: ...

    def outputs(self) -> Tensors:
        """Return the outputs of the application. Raises RequestError where the outputs of its stages do not fit
        together."""
        ...


class Driver:
    """Submit requests to the dispatcher, and tell it of batches (`finished`, `failed`) and of lanes (`tell`)."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        run: Callable[[LaneId, int, str, Sequence[Tensors]], None],
        observer: Observer,
        *,
        clock: Callable[[], float],
        drained: Callable[[LaneId], None],
        log: EventLog | None = None,
        tracer: Tracer | None = None,
        rounding: float = ROUNDING,
        together: float = 0.0,
    ) -> None:
        """Drive a dispatcher from the running event loop.

        run: gives a lane a batch of a model, with the inputs of each request. clock: monotonic seconds. drained: called
        with a lane whose worker may stop. log: where events and commands are written. tracer: what makes traces of
        requests. rounding: seconds by which the loop's timers may be early. together: seconds for which requests may
        wait for others of the same round of the loop, to arrive together with them.
        """
        self._dispatcher = dispatcher
        self._decide = Applications(dispatcher.handle).handle
        self._run = run
        self._observer = observer
        self._clock = clock
        self._drained = drained
        self._log = log
        self._tracer = tracer
        self._rounding = rounding
        self._together = together
        self._arriving: list[Request] = []  # what the dispatcher has not been told of
        self._loop = asyncio.get_running_loop()
        self._callers: dict[int, tuple[Tensors, Answered]] = {}  # of requests in flight
        self._parts: dict[int, StageTensors] = {}  # of those for applications
        self._stages: dict[int, tuple[StageTensors, int]] = {}  # of those for stages, with the stage's number
        self._split: dict[int, SplitTensors] = {}  # of those that run in parts
        self._split_of: dict[int, SplitTensors] = {}  # by part; their inputs are in `_callers`
        self._full: dict[str, float] = {}  # models that take no requests, and when one would be done, until an event
        self._running: dict[LaneId, tuple[Run, float]] = {}  # by lane, and since when
        self._full_batches: dict[LaneId, float] = {}  # lanes that run as many rows as they may, and until when
        self.full_batch_due = math.inf  # the first of these ends
        self._dying: Counter[LaneId] = Counter()  # lanes whose death the dispatcher has still to hear of
        self._empty: deque[LaneId] = deque()  # lanes that have drained, and of which nobody has heard
        self._pending: deque[tuple[Event, dict[int, Tensors]]] = deque()
        self._busy = False
        # Requests of callers and their rows, by model or application, whatever became of them.
        self.arrived: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self._requests = 0
        self._alone = False  # the latest request came while no other was open, and no other came in its round
        self._uncounted: list[tuple[Run, float, float, Timing]] = []  # batches that have ended, from when until when
        self._writing = 0.0  # seconds from a batch's end until its last response is written, smoothed

    @property
    def in_flight(self) -> int:
        """The number of requests that have not ended."""
        return len(self._callers) - len(self._split_of)

    @property
    def at_work(self) -> bool:
        """Whether any lane runs a batch."""
        return bool(self._running)

    def busy_since(self, lane: LaneId) -> float | None:
        """Return when the batch began that a lane is running; None for an idle lane."""
        running = self._running.get(lane)
        return None if running is None else running[1]

    def predicted(self, lane: LaneId) -> float:
        """Return the seconds that the batch was to take that a lane is running; 0 for an idle lane."""
        held = self._dispatcher.lanes.get(lane)
        return 0.0 if held is None or held.batch is None else held.free_at - held.batch.started

    def stalled(self, lane: LaneId) -> bool:
        """Return whether requests of the running batch have expired, so that the lane gets no others until it ends."""
        held = self._dispatcher.lanes.get(lane)
        return held is not None and held.stalled

    def waiting(self, lane: LaneId) -> dict[str, int]:
        """Return the number of requests in the queues of a lane, by model."""
        held = self._dispatcher.lanes.get(lane)
        return {} if held is None else {name: len(queue.waiting) for name, queue in held.queues.items()}

    def lane_states(self) -> tuple[LaneState, ...]:
        """Describe the lanes, for whoever predicts what would be admitted."""
        self._tell_arrived()
        now = self._clock()
        return tuple(read_lane(lane, now) for lane in self._dispatcher.lanes.values())

    def submit(
        self,
        model: str,
        inputs: Tensors | StageTensors,
        answered: Answered,
        *,
        within: float,
        size: int = 1,
        priority: int = 0,
        trace: str = "",
    ) -> int:
        """Submit a request to be answered `within` seconds. Return its id, perhaps after `answered` was called.

        inputs: for an application, the tensors of its stages. trace: the caller's `traceparent`.
        """
        self._requests += 1
        self.arrived[model] += 1
        self.rows[model] += size
        request_id = self._requests
        if isinstance(inputs, tuple):
            self._callers[request_id] = inputs, answered
        else:
            self._callers[request_id] = (), answered
            self._parts[request_id] = inputs
        now = self._clock()
        deadline = now + self._time_left(within)
        request = Request(request_id, model, now, deadline, size, priority)
        if self._tracer is not None:
            self._tracer.arrived(request, trace)
        arriving = self._arriving
        arriving.append(request)
        if now - arriving[0].arrived >= self._together or (self._alone and len(self._callers) == 1):
            self._tell_arrived()
        elif len(arriving) == 1:
            self._loop.call_soon(self._tell_arrived)
        return request_id

    def _time_left(self, within: float) -> float:
        """Return in how many seconds a request has to be done: its caller counts until it has its response."""
        return within - min(self._writing, MAX_WRITING * max(within, 0.0))

    def _tell_arrived(self) -> None:
        """Tell the dispatcher of the requests that have arrived together."""
        arriving = self._arriving
        if arriving:
            self._arriving = []
            self._alone = len(self._callers) == 1
            self.feed(Arrived(arriving[0], tuple(arriving[1:])))

    def would_reject(self, model: str, *, within: float) -> bool:
        """Return whether a request of one row to be answered `within` seconds would be rejected now, as too late.

        Where one was, all others are that are due sooner than it would have been done, until something ends: what
        arrives only makes it later. So a crowd costs one prediction for each batch, not one each.
        """
        now = self._clock()
        deadline = now + self._time_left(within)
        if deadline < self._full.get(model, -math.inf):
            return True
        self._tell_arrived()
        finish = self._dispatcher.late_finish(model, deadline, now)
        if finish > deadline:
            self._full[model] = finish
        return finish > deadline

    def room(self, model: str, *, within: float) -> tuple[int, float]:
        """Return how many requests of one row to be answered `within` seconds would be admitted now, and how many
        seconds before its deadline the first would be done; -1 for their number where that is not known."""
        self._tell_arrived()
        now = self._clock()
        deadline = now + self._time_left(within)
        room, finish = self._dispatcher.room(model, deadline, now)
        return room, deadline - finish if room >= 0 else 0.0

    def cancel(self, request_id: int) -> None:
        if request_id in self._callers:
            self.feed(Cancelled(request_id))

    def tell(self, event: Applied | Ready | Died | Restarting) -> None:
        """Tell the dispatcher of a change of lanes."""
        if isinstance(event, Died):
            self._dying += Counter((event.lane, *event.others))
        self.feed(event)

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Tensors | RequestError], timing: Timing) -> None:
        running = self._running.get(lane)
        if running is None or running[0].batch != batch:
            return  # the batch has failed already
        self._stopped(lane)
        run, since = running
        outputs: dict[int, Tensors] = {}
        self._uncounted.append((run, since, self._clock(), timing))
        try:
            event: Event = self._read_answers(run, answers, outputs, timing.lent)
        except Exception:
            logger.exception("the answers to batch %d of model '%s' on %s were lost", batch, run.model, lane)
            event = Failed(lane, batch, "the server could not read the answers of the worker")
        self.feed(event, outputs)
        self._count_batches()

    def _count_batches(self) -> None:
        """Count the batches that have ended, before their requests and after the answers: callers wait for those."""
        while self._uncounted:
            run, since, ended, timing = self._uncounted.pop(0)
            try:
                rows = sum([each.size for each in run.requests])
                self._observer.ran(run.lane, run.model, rows, since, ended, timing)
                if self._tracer is not None:
                    self._tracer.ran(run, timing)
            except Exception:
                logger.exception("batch %d of model '%s' on %s was not counted", run.batch, run.model, run.lane)

    def _read_answers(
        self, run: Run, answers: Sequence[Tensors | RequestError], outputs: dict[int, Tensors], lent: float
    ) -> Event:
        """Return what to tell the dispatcher of a batch that has ended, and add the outputs of its requests."""
        failed = []
        made: list[tuple[int, int, int]] = []
        for request, answer in zip(run.requests, answers, strict=True):
            try:
                if isinstance(answer, RequestError):
                    raise answer
                answered, complete = request.id, answer
                if self._split_of and answered in self._split_of:
                    split = self._split_of[answered]
                    taken = split.take(answered, answer)
                    if taken is None:
                        continue  # other parts of it run
                    answered, complete = split.request, taken
                if answered in self._stages:
                    parts, number = self._stages[answered]
                    made += [(answered, later, count) for later, count in parts.made(number, complete).items()]
                outputs[answered] = complete
            except RequestError as error:
                failed.append((request.id, str(error)))
        return Finished(run.lane, run.batch, tuple(failed), tuple(made), lent)

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        self._stopped(lane)
        self.feed(Failed(lane, batch, reason))

    def _started(self, command: Run, now: float) -> None:
        lane = command.lane
        self._running[lane] = command, now
        held = self._dispatcher.lanes.get(lane)
        if held is not None and held.batch is not None and held.batch.rows >= held.batch.queue.batch:
            self._full_batches[lane] = held.free_at
            self.full_batch_due = min(self.full_batch_due, held.free_at)

    def _stopped(self, lane: LaneId) -> None:
        self._running.pop(lane, None)
        if self._full_batches.pop(lane, None) is not None:
            self.full_batch_due = min(self._full_batches.values(), default=math.inf)

    def feed(self, event: Event, answers: dict[int, Tensors] | None = None) -> None:
        """Give the dispatcher an event, and carry out its commands. Events that these cause (a response may let its
        connection continue with the next request) are queued, so that events keep their order. A command that fails is
        logged, and does not affect the others."""
        if self._arriving:
            self._tell_arrived()
        if self._full and not isinstance(event, Arrived):
            self._full.clear()
        self._pending.append((event, answers or {}))
        if self._busy:
            return
        self._busy = True
        try:
            while self._pending:
                event, ready = self._pending.popleft()
                if isinstance(event, Died):
                    for lane in (event.lane, *event.others):
                        self._stopped(lane)
                    self._dying -= Counter((event.lane, *event.others))
                now = self._clock()
                commands = self._decide(event, now)
                if self._log is not None:
                    self._log.write(log_line(now, event, commands))
                for command in commands:
                    try:
                        self._perform(command, now, ready)
                    except Exception as error:
                        logger.exception("a command was not carried out: %s", command)
                        if isinstance(command, Run):  # else its lane would be busy for ever, and its requests never end
                            self.failed(command.lane, command.batch, f"{type(error).__name__}: {error}")
                if ready:
                    self._writing += GAIN * (self._clock() - now - self._writing)
        finally:
            self._busy = False
        self._tell_drained()

    def _tell_drained(self) -> None:
        """Say which lanes have drained, after all that the dispatcher said of it: it may be told of others at once,
        and has to hear of them before anybody counts on that."""
        while self._empty and not self._busy:
            lane = self._empty.popleft()
            try:
                self._drained(lane)
            except Exception:
                logger.exception("cannot report that %s has drained", lane)

    def _perform(self, command: Command, now: float, answers: dict[int, Tensors]) -> None:
        match command:
            case Run(lane, batch, model, requests):
                self._started(command, now)
                if lane in self._dying:
                    return  # it is lost with the worker that died; the next one takes nothing before it is ready
                self._run(lane, batch, model, [self._callers[request.id][0] for request in requests])
            case Reply():
                self._reply(command, now, answers)
            case Spawn(whole, number, request, item):
                parts = self._parts[whole]
                if self._tracer is not None:
                    self._tracer.spawned(whole, request)
                self._stages[request.id] = parts, number
                take = partial(_take, parts, number, item)
                try:
                    self._callers[request.id] = parts.inputs(number, item), take
                except Exception:
                    logger.exception("stage %d of request %d has no inputs", number, whole)
                    self._callers[request.id] = (), take
                    self._pending.append((Cancelled(whole), {}))
            case Split(request_id, split_parts):
                self._take_apart(request_id, split_parts)
            case WakeAt(lane, time):
                self._loop.call_later(max(0.0, time - now) + self._rounding, self.feed, Woke(lane, time))
            case Drained(lane):
                self._empty.append(lane)

    def _take_apart(self, request_id: int, parts: Sequence[Request]) -> None:
        """Give the parts of a request their inputs. request_id: of a request, or of a part of one."""
        split = self._split_of.pop(request_id, None)
        if split is None:
            split = self._split[request_id] = SplitTensors(request_id)
            inputs, _ = self._callers[request_id]
        else:
            inputs, _ = self._callers.pop(request_id)
        try:
            apart = split.split(request_id, inputs, parts)
        except Exception:
            logger.exception("the inputs of request %d cannot be split", split.request)
            apart = [()] * len(parts)
            self._pending.append((Cancelled(split.request), {}))
        for part, tensors in zip(parts, apart, strict=True):
            self._split_of[part.id] = split
            self._callers[part.id] = tensors, _nobody

    def _reply(self, reply: Reply, now: float, answers: dict[int, Tensors]) -> None:
        for request in reply.requests:
            _, answered = self._callers.pop(request.id)
            parts = self._parts.pop(request.id, None) if self._parts else None
            if self._split and request.id in self._split:
                for part in self._split.pop(request.id).parts:
                    del self._callers[part], self._split_of[part]
            self._stages.pop(request.id, None)
            try:
                if reply.outcome is not Outcome.SERVED:
                    answered(_error(request, reply))
                else:
                    answered(answers[request.id] if parts is None else _whole(request, parts))
            except Exception:
                # One response that cannot be written must not cost others theirs, nor the lane its next batch.
                logger.exception("the answer to request %d for model '%s' was lost", request.id, request.model)
        self._count_batches()
        self._observer.ended(reply, now)
        if self._tracer is not None:
            self._tracer.ended(reply, now)


def _nobody(result: Tensors | RequestError) -> None:
    """Take the place of a caller: a part of a request has none."""


def _take(parts: StageTensors, number: int, item: int, result: Tensors | RequestError) -> None:
    if not isinstance(result, RequestError):
        parts.take(number, item, result)


def _whole(request: Request, parts: StageTensors) -> Tensors | RequestError:
    """Return the outputs of a request of an application, or why they do not fit together."""
    try:
        return parts.outputs()
    except RequestError as error:
        return FailedError(f"request for model '{request.model}' failed: {error}")
    except Exception:
        logger.exception("the outputs of request %d for '%s' do not fit together", request.id, request.model)
        return FailedError(f"request for model '{request.model}' failed: its outputs do not fit together")


def _error(request: Request, reply: Reply) -> RequestError:
    """Return the error for a caller whose request was not served."""
    match reply.outcome:
        case Outcome.REJECTED:
            return UnavailableError(rejection(request.model, reply.reason), retry_after=reply.retry_after)
        case Outcome.EXPIRED:
            return UnavailableError(f"request for model '{request.model}' expired: {reply.reason}")
        case Outcome.CANCELLED:
            return CancelledError(f"request for model '{request.model}' cancelled: {reply.reason}")
        case _:
            return FailedError(f"request for model '{request.model}' failed: {reply.reason}")
