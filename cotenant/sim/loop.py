"""Virtual time: take the next event, hand it to the dispatcher, carry out what it wants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from cotenant.core.request import Request
from cotenant.runtime.events import Arrived, Command, Died, Drained, Event, Finished, Reply, Run, WakeAt, Woke

Handle = Callable[[Event, float], list[Command]]


def play(
    handle: Handle,
    requests: Iterable[Request],
    service: Callable[[Run], float],
    ended: Callable[[Reply, float], Iterable[Request]],
    events: Iterable[tuple[float, Event]] = (),
) -> float:
    """Run until nothing is left to do; the time of the last event, in seconds.

    requests: in the order of their arrival. service: seconds that a batch takes. ended: is told of each reply and when,
    and gives the requests that follow from it, which arrive then or later. events: what else happens (workers ready,
    deaths, new plans) and when, in the order of time; each is asked for only once the one before it was handled, and
    so may depend on what came of that. Of events at the same time these come first, then those asked for earlier, then
    `requests`.
    """
    now = 0.0
    order = itertools.count()
    # Numbers below 0 come before all that `order` gives.
    planned = ((time, number, event) for number, (time, event) in enumerate(events, -(1 << 60)))
    heap: list[tuple[float, int, Event]] = list(itertools.islice(planned, 1))
    arrivals = iter(requests)
    request = next(arrivals, None)
    while heap or request is not None:
        number = 0
        if request is None or (heap and heap[0][0] <= request.arrived):
            now, number, event = heappop(heap)
            if type(event) is Died:  # a dead worker finishes nothing
                heap = [entry for entry in heap if not (type(entry[2]) is Finished and entry[2].lane == event.lane)]
                heapify(heap)
        else:
            now, event = request.arrived, Arrived(request)
            request = next(arrivals, None)
        for command in handle(event, now):
            match command:
                case Run(lane, batch):
                    heappush(heap, (now + service(command), next(order), Finished(lane, batch)))
                case Reply():
                    for follower in ended(command, now):
                        heappush(heap, (follower.arrived, next(order), Arrived(follower)))
                case WakeAt(lane, time):
                    heappush(heap, (max(time, now), next(order), Woke(lane, time)))
                case Drained():
                    pass  # there is no worker to stop
        if number < 0:
            for entry in itertools.islice(planned, 1):
                heappush(heap, entry)
    return now
