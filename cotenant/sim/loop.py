"""Run a dispatcher in virtual time: take the next event, hand it over, perform the commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from cotenant.core.identity import LaneId
from cotenant.core.request import Request
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Arrived, Command, Died, Drained, Event, Finished, Reply, Run, WakeAt, Woke

Handle = Callable[[Event, float], list[Command]]
Tell = Callable[[Event, float], None]  # hands an event to the dispatcher and performs its commands at once

LONG: Final = 1.0  # seconds; the actor hears of batches that take so long or longer, and may act on them


class Actor(Protocol):
    """Act in a run on its own: workers that start and die, plans that change."""

    @property
    def due(self) -> float:
        """Return the time of the next action; infinity if there is none."""
        ...

    def act(self, now: float, tell: Tell) -> None:
        """Do what is due; everything before this moment has been handled."""
        ...

    def drained(self, lane: LaneId, now: float) -> None:
        """Hear, perhaps within `act`, that a lane is drained. What follows is due now or later."""
        ...


class Script:
    """Feed given events to the dispatcher: (time, event) in order of time, generated one by one."""

    def __init__(self, events: Iterable[tuple[float, Event]]) -> None:
        self._events: Iterator[tuple[float, Event]] = iter(events)
        self._next = next(self._events, None)

    @property
    def due(self) -> float:
        return math.inf if self._next is None else self._next[0]

    def act(self, now: float, tell: Tell) -> None:
        if self._next is not None:
            tell(self._next[1], now)
            self._next = next(self._events, None)  # which may depend on the outcome of this one

    def drained(self, lane: LaneId, now: float) -> None:
        """Do nothing: a script has no workers to stop."""


def play(
    handle: Handle | Dispatcher,
    requests: Iterable[Request],
    service: Callable[[Run, float], float],
    ended: Callable[[Reply, float], Iterable[Request]],
    actor: Actor,
) -> float:
    """Run until nothing is left to do; return the time of the last event in seconds.

    handle: a dispatcher, or the `handle` of whatever wraps one and wants to see every event. requests: in order of
    arrival. service: seconds of a batch that starts at a given time; infinity where the actor tells of its end. ended:
    called with each reply and its time; returns the requests that follow from it, which arrive then or later. actor:
    what else happens. At equal times the actor comes first, then pending events in the order in which they were
    scheduled, then `requests`.
    """
    dispatcher = handle if isinstance(handle, Dispatcher) else None
    tell = handle.handle if isinstance(handle, Dispatcher) else handle
    agenda = _Agenda(tell, service, ended, actor)
    now = 0.0
    for request in requests:
        arrived = request.arrived
        while agenda.due <= arrived:
            agenda.step()
        now = arrived
        commands = tell(Arrived(request), now) if dispatcher is None else dispatcher.admit(request, now)
        if commands:  # usually the lane is busy and there is nothing to do
            agenda.perform(commands, now)
    while agenda.due < math.inf:
        now = agenda.step()
    return now


class _Agenda:
    """The event queue, `requests` apart: (time, number, event). due: time of the next event."""

    def __init__(
        self,
        handle: Handle,
        service: Callable[[Run, float], float],
        ended: Callable[[Reply, float], Iterable[Request]],
        actor: Actor,
    ) -> None:
        self._handle = handle
        self._service = service
        self._ended = ended
        self._actor = actor
        self._acts = actor.due
        self._numbers = 0  # of scheduled events
        self._heap: list[tuple[float, int, Event]] = []
        self.due = self._acts

    def step(self) -> float:
        """Process the next event; return its time."""
        heap = self._heap
        if not heap or self._acts <= heap[0][0]:
            now = self._acts
            self._actor.act(now, self.tell)
            self._acts = self._actor.due
        else:
            now, _, event = heappop(heap)
            self.perform(self._handle(event, now), now)
        self.due = min(heap[0][0], self._acts) if heap else self._acts
        return now

    def tell(self, event: Event, now: float) -> None:
        """Hand an event to the dispatcher and perform its commands."""
        if type(event) is Died:  # a dead worker finishes nothing
            dead = {event.lane, *event.others}
            self._heap[:] = [
                entry for entry in self._heap if not (type(entry[2]) is Finished and entry[2].lane in dead)
            ]
            heapify(self._heap)
        self.perform(self._handle(event, now), now)

    def perform(self, commands: list[Command], now: float) -> None:
        """Perform commands of the dispatcher."""
        for command in commands:  # no isinstance: it is slow to deny for structs
            if type(command) is Run:
                seconds = self._service(command, now)
                if seconds >= LONG:
                    self._acts = self._actor.due
                    self.due = min(self.due, self._acts)
                    if seconds == math.inf:
                        continue  # the actor tells when it ends
                self._at(now + seconds, Finished(command.lane, command.batch))
            elif type(command) is Reply:
                for follower in self._ended(command, now):
                    self._at(follower.arrived, Arrived(follower))
            elif type(command) is WakeAt:
                self._at(max(command.time, now), Woke(command.lane, command.time))
            elif type(command) is Drained:
                self._actor.drained(command.lane, now)
                self._acts = self._actor.due

    def _at(self, time: float, event: Event) -> None:
        self._numbers += 1
        heappush(self._heap, (time, self._numbers, event))
        if time < self.due:
            self.due = time
