"""Expand a request of an application into requests of its stages, each with its own deadline, and end it exactly once.

`Applications` wraps a dispatcher: it takes the same events and returns the same commands, so the simulator and the
server run it like the dispatcher. Requests of single models pass through. A request of an application ends when all
requests of its stages are served, or with the first that is not; the others are then cancelled.

The deadline of a stage's request leaves the stages behind it their part of the target, as split in the plan; a stage
may use the time that earlier stages did not need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from cotenant.core.application import Application, Fanout, Fixed
from cotenant.core.request import Outcome, Request
from cotenant.runtime.dispatcher import LEFT
from cotenant.runtime.events import (
    ApplicationSpec,
    Applied,
    Arrived,
    Cancelled,
    Command,
    Event,
    Finished,
    Reply,
    Spawn,
    StageSpec,
)

Handle = Callable[[Event, float], list[Command]]
# (application, stage index, times) → number of requests of the stage, each time; None if the stage before it determines
# the number (`Finished.made`).
Fanouts = Callable[[ApplicationSpec, int, int], Sequence[int] | None]


def application_specs(
    applications: Iterable[Application], split: Mapping[str, Mapping[str, float]]
) -> tuple[ApplicationSpec, ...]:
    """Return the run-time form of applications. split: application → stage → seconds of the target."""
    specs = []
    for application in applications:
        downstream = application.remainder(split[application.name])
        numbers = {stage.name: n for n, stage in enumerate(application.order)}
        stages = tuple(
            StageSpec(
                name=stage.name,
                model=stage.model,
                after=tuple(numbers[other] for other in stage.after),
                downstream=downstream[stage.name],
                fanout=stage.fanout,
                counted=stage.counted,
            )
            for stage in application.order
        )
        specs.append(ApplicationSpec(application.name, application.slo, stages))
    return tuple(specs)


def fixed_fanout(spec: ApplicationSpec, number: int, times: int) -> Sequence[int] | None:
    """Return constant fan-outs, for a run that draws none at random."""
    if spec.stages[number].counted:
        return None
    fanout: Fanout = spec.stages[number].fanout
    assert isinstance(fanout, Fixed), "only the simulator draws fan-outs"
    return [fanout.count] * times


class _OpenRequest:
    """Track a request of an application that has not ended.

    since: when it was admitted. fanouts: for each stage, the number of its requests each time it is spawned. unserved:
    for
    each stage, how many of those have not been served. parts: ids of its requests that have not ended → stage index.
    time_scale: the time there is over the target, at most 1.
    """

    __slots__ = ("begun", "fanouts", "parts", "request", "since", "spec", "time_scale", "unserved")

    def __init__(self, request: Request, spec: ApplicationSpec, fanouts: Fanouts, now: float) -> None:
        self.request = request
        self.since = now
        self.spec = spec
        self.fanouts: list[list[int]] = []
        self.unserved: list[int] = []
        self.begun = [False] * len(spec.stages)
        self.parts: dict[int, int] = {}
        # A timeout shorter than the target shortens the time of every stage in proportion.
        self.time_scale = min(1.0, (request.deadline - request.arrived) / spec.slo)
        for number, stage in enumerate(spec.stages):
            times = self.unserved[stage.after[0]] if len(stage.after) == 1 else 1
            counts = fanouts(spec, number, times)
            self.fanouts.append(list(counts or ()))
            self.unserved.append(1 if counts is None else sum(counts))  # 1: not done while the number is unknown


class Applications:
    """Dispatch applications. Requests of stages have negative ids; external requests must not."""

    def __init__(self, handle: Handle, fanouts: Fanouts = fixed_fanout, specs: Iterable[ApplicationSpec] = ()) -> None:
        """handle: that of the dispatcher. specs: the initial applications."""
        self._handle = handle
        self._fanouts = fanouts
        self._specs = {spec.name: spec for spec in specs}
        self._open: dict[int, _OpenRequest] = {}  # by id of the application's request
        self._whole_of: dict[int, _OpenRequest] = {}  # by id of a stage's request
        self._made: dict[tuple[int, int], int] = {}  # (id of a stage's request, later stage) → number of its requests
        self._spawned = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle an event as `Dispatcher.handle` does; a `Spawn` precedes all other commands about a stage's
        request."""
        match event:
            case Arrived(request, others) if self._specs and (others or request.model in self._specs):
                return self._all_arrived((request, *others), now)
            case Cancelled(request_id) if request_id in self._open:
                out: list[Command] = []
                self._end(self._open[request_id], Outcome.CANCELLED, LEFT, 0.0, now, out)
                return out
            case Applied(_, specs) if specs is not None:
                self._specs = {spec.name: spec for spec in specs}
            case Finished(made=made) if made:
                self._made = {(part, stage): count for part, stage, count in made}
        commands = self._handle(event, now)
        return self._with_consequences(commands, now) if commands and self._whole_of else commands

    def _all_arrived(self, requests: tuple[Request, ...], now: float) -> list[Command]:
        out: list[Command] = []
        for request in requests:
            if request.model in self._specs:
                out += self._arrived(request, now)
        single = [request for request in requests if request.model not in self._specs]
        if single:
            commands = self._handle(Arrived(single[0], tuple(single[1:])), now)
            out += self._with_consequences(commands, now) if self._whole_of else commands
        return out

    def _arrived(self, request: Request, now: float) -> list[Command]:
        whole = self._open[request.id] = _OpenRequest(request, self._specs[request.model], self._fanouts, now)
        out: list[Command] = []
        self._begin(whole, now, out)
        return out

    def _begin(self, whole: _OpenRequest, now: float, out: list[Command]) -> None:
        """Spawn the stages whose predecessors are done; end the request if all stages are."""
        for number, stage in enumerate(whole.spec.stages):
            if len(stage.after) != 1 and not whole.begun[number] and not any(whole.unserved[n] for n in stage.after):
                whole.begun[number] = True
                if not self._spawn(whole, number, now, out):
                    return
        if not any(whole.unserved):
            self._end(whole, Outcome.SERVED, "", 0.0, now, out)

    def _spawn(self, whole: _OpenRequest, number: int, now: float, out: list[Command]) -> bool:
        """Spawn the requests of a stage once; return whether the application's request is still open."""
        stage, request = whole.spec.stages[number], whole.request
        deadline = request.deadline - stage.downstream * whole.time_scale
        for item in range(whole.fanouts[number].pop()):
            self._spawned -= 1
            part = Request(self._spawned, stage.model, now, deadline, request.size, request.priority)
            whole.parts[part.id] = number
            self._whole_of[part.id] = whole
            out.append(Spawn(request.id, number, part, item))
            out += self._with_consequences(self._handle(Arrived(part), now), now)
            if request.id not in self._open:
                return False
        return True

    def _with_consequences(self, commands: list[Command], now: float) -> list[Command]:
        """Return the commands, followed by what they entail for applications."""
        out: list[Command] = []
        pending = deque(commands)
        while pending:
            command = pending.popleft()
            out.append(command)
            if isinstance(command, Reply):
                for request in command.requests:
                    if request.id in self._whole_of:
                        more: list[Command] = []
                        self._part_ended(request, command, now, more)
                        pending.extend(more)
        return out

    def _part_ended(self, part: Request, reply: Reply, now: float, out: list[Command]) -> None:
        whole = self._whole_of.pop(part.id)
        number = whole.parts.pop(part.id)
        if reply.outcome is not Outcome.SERVED:
            late = reply.outcome is Outcome.REJECTED and now > whole.since  # a request is rejected on arrival only
            outcome = Outcome.EXPIRED if late else reply.outcome
            self._end(whole, outcome, f"{whole.spec.stages[number].name}: {reply.reason}", reply.retry_after, now, out)
            return
        whole.unserved[number] -= 1
        for after, stage in enumerate(whole.spec.stages):
            if stage.after != (number,):
                continue
            if (part.id, after) in self._made:
                whole.unserved[after] = self._made.pop((part.id, after))
                whole.fanouts[after] = [whole.unserved[after]]
            if not self._spawn(whole, after, now, out):
                return
        self._begin(whole, now, out)

    def _end(
        self, whole: _OpenRequest, outcome: Outcome, reason: str, retry_after: float, now: float, out: list[Command]
    ) -> None:
        """End an application's request; the only place that does."""
        del self._open[whole.request.id]
        siblings = list(whole.parts)
        for part in siblings:
            del self._whole_of[part]
        for part in siblings:
            out += self._handle(Cancelled(part), now)
        out.append(Reply((whole.request,), outcome, reason, retry_after, started=whole.request.arrived))

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        parts = {part: whole for whole in self._open.values() for part in whole.parts}
        assert parts == self._whole_of
        for whole in self._open.values():
            assert whole.parts, whole.request  # otherwise nothing would ever end it
