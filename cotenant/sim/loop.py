"""Virtual time: take the next event, hand it to the dispatcher, carry out what it wants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from cotenant.core.identity import LaneId
from cotenant.core.request import Request
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Arrived, Command, Died, Drained, Event, Finished, Reply, Run, WakeAt, Woke

Handle = Callable[[Event, float], list[Command]]
Tell = Callable[[Event, float], None]  # an event for the dispatcher, and when; its commands are performed at once


class Actor(Protocol):
    """Act by itself in a run: workers that start and die, plans that change."""

    @property
    def due(self) -> float:
        """When to act next; infinity where there is nothing to do."""
        ...

    def act(self, now: float, tell: Tell) -> None:
        """Do what is due. All that came before this moment has been handled."""
        ...

    def drained(self, lane: LaneId, now: float) -> None:
        """Hear of a lane that holds nothing any more, perhaps within `act`. What follows is due now or later."""
        ...


class Script:
    """Tell the dispatcher what is known beforehand, or from one event to the next: (time, event), in order of time."""

    def __init__(self, events: Iterable[tuple[float, Event]]) -> None:
        self._events: Iterator[tuple[float, Event]] = iter(events)
        self._next = next(self._events, None)

    @property
    def due(self) -> float:
        return math.inf if self._next is None else self._next[0]

    def act(self, now: float, tell: Tell) -> None:
        if self._next is not None:
            tell(self._next[1], now)
            self._next = next(self._events, None)  # which may depend on what came of that

    def drained(self, lane: LaneId, now: float) -> None:
        """Of a lane that is drained there is no worker to stop."""


def play(
    handle: Handle | Dispatcher,
    requests: Iterable[Request],
    service: Callable[[Run, float], float],
    ended: Callable[[Reply, float], Iterable[Request]],
    actor: Actor,
) -> float:
    """Run until nothing is left to do; the time of the last event, in seconds.

    handle: of a dispatcher, or what stands before it and wants to see every event; or a dispatcher itself.
    requests: in the order of their arrival. service: seconds that a batch takes which starts at that time. ended: is
    told of each reply and when, and gives the requests that follow from it, which arrive then or later. actor: what
    else happens. Of what is due at the same time the actor is first, then events that were asked for earlier, then
    `requests`.
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
        if commands:  # mostly the lane is busy, and there is nothing to do
            agenda.perform(commands, now)
    while agenda.due < math.inf:
        now = agenda.step()
    return now


class _Agenda:
    """What will happen, `requests` aside: (time, number, event). due: when the next of it does."""

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
        self._numbers = 0  # of events that were asked for
        self._heap: list[tuple[float, int, Event]] = []
        self.due = self._acts

    def step(self) -> float:
        """Let the next of it happen; when that was."""
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
        if type(event) is Died:  # a dead worker finishes nothing
            dead = {event.lane, *event.others}
            self._heap[:] = [
                entry for entry in self._heap if not (type(entry[2]) is Finished and entry[2].lane in dead)
            ]
            heapify(self._heap)
        self.perform(self._handle(event, now), now)

    def perform(self, commands: list[Command], now: float) -> None:
        """Carry out what the dispatcher wants."""
        for command in commands:  # not by isinstance: of a struct, no is a slow answer
            if type(command) is Run:
                self._at(now + self._service(command, now), Finished(command.lane, command.batch))
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
