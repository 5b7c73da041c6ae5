"""What one request of an application becomes: requests of its stages, each with a deadline of its own; and its one end.

It stands before a dispatcher, takes the same events and answers the same commands, so the simulator and the server run
it as they would the dispatcher. Requests of single models pass through. One of an application ends when all requests of
its stages have been served, or with the first that is not; what is left of the others is cancelled then.

A stage's request must end early enough for what comes after it, by the split of the target in the plan; what earlier
stages left over of their time is its to use.
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
# (application, number of its stage, how often) → how many requests of the stage there are, each time; None where the
# stage before it will tell (`Finished.made`).
Fanned = Callable[[ApplicationSpec, int, int], Sequence[int] | None]


def application_specs(
    applications: Iterable[Application], split: Mapping[str, Mapping[str, float]]
) -> tuple[ApplicationSpec, ...]:
    """What must be known of applications when they run. split: application → stage → seconds of its target."""
    specs = []
    for application in applications:
        rest = application.remainder(split[application.name])
        numbers = {stage.name: n for n, stage in enumerate(application.order)}
        stages = tuple(
            StageSpec(
                name=stage.name,
                model=stage.model,
                after=tuple(numbers[other] for other in stage.after),
                rest=rest[stage.name],
                fanout=stage.fanout,
                counted=stage.counted,
            )
            for stage in application.order
        )
        specs.append(ApplicationSpec(application.name, application.slo, stages))
    return tuple(specs)


def fixed_fanout(spec: ApplicationSpec, number: int, times: int) -> Sequence[int] | None:
    """Fan-outs where none is drawn."""
    if spec.stages[number].counted:
        return None
    fanout: Fanout = spec.stages[number].fanout
    assert isinstance(fanout, Fixed), "only a simulation draws fan-outs"
    return [fanout.count] * times


class _Open:
    """One request of an application that has not ended.

    since: when it was taken in. fans: of each stage, how many requests it makes each time; left: how many of all those
    have not been served. parts: ids of requests that have not ended → their stage. stretch: what part of the usual time
    there is.
    """

    __slots__ = ("begun", "fans", "left", "parts", "request", "since", "spec", "stretch")

    def __init__(self, request: Request, spec: ApplicationSpec, fanned: Fanned, now: float) -> None:
        self.request = request
        self.since = now
        self.spec = spec
        self.fans: list[list[int]] = []
        self.left: list[int] = []
        self.begun = [False] * len(spec.stages)
        self.parts: dict[int, int] = {}
        # A caller with less patience than the target leaves each stage as much less.
        self.stretch = min(1.0, (request.deadline - request.arrived) / spec.slo)
        for number, stage in enumerate(spec.stages):
            times = self.left[stage.after[0]] if len(stage.after) == 1 else 1
            fans = fanned(spec, number, times)
            self.fans.append(list(fans or ()))
            self.left.append(1 if fans is None else sum(fans))  # not done as long as nobody knows how many there are


class Applications:
    """A dispatcher that knows applications. Requests of stages get ids below 0; those that come from outside have
    others."""

    def __init__(self, handle: Handle, fanned: Fanned = fixed_fanout, specs: Iterable[ApplicationSpec] = ()) -> None:
        """handle: of the dispatcher. specs: the applications to begin with."""
        self._handle = handle
        self._fanned = fanned
        self._specs = {spec.name: spec for spec in specs}
        self._open: dict[int, _Open] = {}  # by the id of the application's request
        self._part_of: dict[int, _Open] = {}  # by the id of a stage's
        self._made: dict[tuple[int, int], int] = {}  # (a stage's request, a later stage) → how many of that
        self._spawned = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        """As `Dispatcher.handle`; beside its commands, a `Spawn` for each request of a stage, before anything else is
        said of that."""
        match event:
            case Arrived(request) if request.model in self._specs:
                return self._arrived(request, now)
            case Cancelled(request_id) if request_id in self._open:
                out: list[Command] = []
                self._end(self._open[request_id], Outcome.CANCELLED, LEFT, 0.0, now, out)
                return out
            case Applied(_, specs) if specs is not None:
                self._specs = {spec.name: spec for spec in specs}
            case Finished(made=made) if made:
                self._made = {(part, stage): count for part, stage, count in made}
        commands = self._handle(event, now)
        return self._followed(commands, now) if commands and self._part_of else commands

    def _arrived(self, request: Request, now: float) -> list[Command]:
        whole = self._open[request.id] = _Open(request, self._specs[request.model], self._fanned, now)
        out: list[Command] = []
        self._begin(whole, now, out)
        return out

    def _begin(self, whole: _Open, now: float, out: list[Command]) -> None:
        """Make the requests of stages that wait for nothing any more; where all are done, end."""
        for number, stage in enumerate(whole.spec.stages):
            if len(stage.after) != 1 and not whole.begun[number] and not any(whole.left[n] for n in stage.after):
                whole.begun[number] = True
                if not self._spawn(whole, number, now, out):
                    return
        if not any(whole.left):
            self._end(whole, Outcome.SERVED, "", 0.0, now, out)

    def _spawn(self, whole: _Open, number: int, now: float, out: list[Command]) -> bool:
        """Make the requests of a stage for one that came before it; whether the application's still stands."""
        stage, request = whole.spec.stages[number], whole.request
        deadline = request.deadline - stage.rest * whole.stretch
        for item in range(whole.fans[number].pop()):
            self._spawned -= 1
            part = Request(self._spawned, stage.model, now, deadline, request.size, request.priority)
            whole.parts[part.id] = number
            self._part_of[part.id] = whole
            out.append(Spawn(request.id, number, part, item))
            out += self._followed(self._handle(Arrived(part), now), now)
            if request.id not in self._open:
                return False
        return True

    def _followed(self, commands: list[Command], now: float) -> list[Command]:
        """The commands, and behind them what follows for applications."""
        out: list[Command] = []
        pending = deque(commands)
        while pending:
            command = pending.popleft()
            out.append(command)
            if isinstance(command, Reply):
                for request in command.requests:
                    if request.id in self._part_of:
                        more: list[Command] = []
                        self._part_ended(request, command, now, more)
                        pending.extend(more)
        return out

    def _part_ended(self, part: Request, reply: Reply, now: float, out: list[Command]) -> None:
        whole = self._part_of.pop(part.id)
        number = whole.parts.pop(part.id)
        if reply.outcome is not Outcome.SERVED:
            late = reply.outcome is Outcome.REJECTED and now > whole.since  # only on arrival is there refusing
            outcome = Outcome.EXPIRED if late else reply.outcome
            self._end(whole, outcome, f"{whole.spec.stages[number].name}: {reply.reason}", reply.retry_after, now, out)
            return
        whole.left[number] -= 1
        for after, stage in enumerate(whole.spec.stages):
            if stage.after != (number,):
                continue
            if (part.id, after) in self._made:
                whole.left[after] = self._made.pop((part.id, after))
                whole.fans[after] = [whole.left[after]]
            if not self._spawn(whole, after, now, out):
                return
        self._begin(whole, now, out)

    def _end(
        self, whole: _Open, outcome: Outcome, reason: str, retry_after: float, now: float, out: list[Command]
    ) -> None:
        """The one end of an application's request."""
        del self._open[whole.request.id]
        siblings = list(whole.parts)
        for part in siblings:
            del self._part_of[part]
        for part in siblings:
            out += self._handle(Cancelled(part), now)
        out.append(Reply((whole.request,), outcome, reason, retry_after, started=whole.request.arrived))

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        parts = {part: whole for whole in self._open.values() for part in whole.parts}
        assert parts == self._part_of
        for whole in self._open.values():
            assert whole.parts, whole.request  # or nothing would ever end it
