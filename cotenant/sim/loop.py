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
    deaths, new plans) and when. Of events at the same time the earlier asked for comes first, those `requests` last.
    """
    now = 0.0
    order = itertools.count()
    heap = [(time, next(order), event) for time, event in events]
    heapify(heap)
    arrivals = iter(requests)
    request = next(arrivals, None)
    while heap or request is not None:
        event: Event
        if request is None or (heap and heap[0][0] <= request.arrived):
            now, _, event = heappop(heap)
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
    return now
