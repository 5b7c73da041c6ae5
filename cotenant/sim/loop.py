"""Virtual time: take the next event, hand it to the dispatcher, carry out what it wants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from cotenant.core.request import Request
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Arrived, Command, Died, Event, Finished, Reply, Run, WakeAt, Woke

Handle = Callable[[Event, float], list[Command]]


def play(
    handle: Handle | Dispatcher,
    requests: Iterable[Request],
    service: Callable[[Run, float], float],
    ended: Callable[[Reply, float], Iterable[Request]],
    events: Iterable[tuple[float, Event]] = (),
) -> float:
    """Run until nothing is left to do; the time of the last event, in seconds.

    handle: of a dispatcher, or what stands before it and wants to see every event; or a dispatcher itself.
    requests: in the order of their arrival. service: seconds that a batch takes which starts at that time. ended: is
    told of each reply and when, and gives the requests that follow from it, which arrive then or later. events: what
    else happens (workers ready, deaths, new plans) and when, in the order of time; each is asked for only once the one
    before it was handled, and so may depend on what came of that. Of events at the same time these come first, then
    those asked for earlier, then `requests`.
    """
    dispatcher = handle if isinstance(handle, Dispatcher) else None
    tell = handle.handle if isinstance(handle, Dispatcher) else handle
    agenda = _Agenda(tell, service, ended, events)
    now = 0.0
    for request in requests:
        arrived = request.arrived
        while agenda.due <= arrived:
            agenda.step()
        now = arrived
        commands = tell(Arrived(request), now) if dispatcher is None else dispatcher.admit(request, now)
        if commands:  # mostly the lane is busy, and there is nothing to do
            agenda.perform(commands, now)
    while agenda.heap:
        now = agenda.step()
    return now


class _Agenda:
    """What will happen, `requests` aside: (time, number, event). Numbers below 0 are those of planned events."""

    def __init__(
        self,
        handle: Handle,
        service: Callable[[Run, float], float],
        ended: Callable[[Reply, float], Iterable[Request]],
        events: Iterable[tuple[float, Event]],
    ) -> None:
        self._handle = handle
        self._service = service
        self._ended = ended
        self._numbers = 0  # of events that were asked for
        self._planned = enumerate(events, -(1 << 60))
        self.heap: list[tuple[float, int, Event]] = []
        self.due = math.inf  # when the next of it happens
        self._plan()

    def step(self) -> float:
        """Let the next of it happen; when that was."""
        now, number, event = heappop(self.heap)
        if type(event) is Died:  # a dead worker finishes nothing
            self.heap[:] = [
                entry for entry in self.heap if not (type(entry[2]) is Finished and entry[2].lane == event.lane)
            ]
            heapify(self.heap)
        self.perform(self._handle(event, now), now)
        if number < 0:
            self._plan()
        self.due = self.heap[0][0] if self.heap else math.inf
        return now

    def perform(self, commands: list[Command], now: float) -> None:
        """Carry out what the dispatcher wants. Of a lane that is drained there is no worker to stop."""
        for command in commands:  # not by isinstance: of a struct, no is a slow answer
            if type(command) is Run:
                self._at(now + self._service(command, now), Finished(command.lane, command.batch))
            elif type(command) is Reply:
                for follower in self._ended(command, now):
                    self._at(follower.arrived, Arrived(follower))
            elif type(command) is WakeAt:
                self._at(max(command.time, now), Woke(command.lane, command.time))

    def _at(self, time: float, event: Event) -> None:
        self._numbers += 1
        self._push(time, self._numbers, event)

    def _plan(self) -> None:
        for number, (time, event) in itertools.islice(self._planned, 1):
            self._push(time, number, event)

    def _push(self, time: float, number: int, event: Event) -> None:
        heappush(self.heap, (time, number, event))
        if time < self.due:
            self.due = time
