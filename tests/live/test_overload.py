"""Goodput under overload, in virtual time: the shedder before the real dispatcher, on a loop whose work takes time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.live.http.load_shedding import LoadShedder
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    Applied,
    Arrived,
    Command,
    Finished,
    LaneModel,
    LaneSpec,
    Ready,
    Reply,
    Run,
    WakeAt,
    Woke,
)

READ, ANSWER, GLANCE, REJECT = 75e-6, 25e-6, 5e-6, 8e-6  # seconds of the loop, near what docs/benchmarks.md reports
POLL = 0.001  # seconds between two looks for batches that are done
SLO = 0.05
LANE = LaneId.parse("cpu-0/0")
LATENCIES = tuple(0.004 + 0.0001 * rows for rows in range(1, 33))
CAPACITY = 32 / LATENCIES[-1]


class Flood:
    """A server's loop in virtual time, and callers: `rate` requests/s, or so many `callers` that ask again at once."""

    def __init__(self, *, rate: float = 0.0, callers: int = 0, sheds: bool = True) -> None:
        self.now = self.polled = self.looked = 0.0
        self.rate, self.callers = rate, callers
        self.shedder = LoadShedder(self, lambda: self.now)
        if sheds:
            self.shedder.attach(self)
        self.dispatcher = Dispatcher()
        self.soon: list[Callable[[], object]] = []
        self.timers: list[tuple[float, int, Finished | Woke]] = []
        self.arrived: dict[int, float] = {}  # by request, when it was sent
        self.sent = self.within = 0
        self.rejections: list[float] = []
        self.unread: deque[float] = deque([0.0] * callers)  # when it was sent, in sockets
        self.random = random.Random(0)  # noqa: S311  # not for secrets
        self.next = self.random.expovariate(rate) if rate else float("inf")
        self.feed(Applied((LaneSpec(id=LANE, models=(LaneModel(model="m", latencies=LATENCIES),)),)))
        self.feed(Ready(LANE))

    # For the shedder

    def time(self) -> float:
        return self.polled

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self.soon.append(callback)

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        self.look()
        return self.dispatcher.would_reject("m", self.now + SLO - lost, self.now)

    # The loop

    def run(self, seconds: float) -> None:
        while self.now < seconds:
            self.arrive()
            if not self.unread and not self.soon:
                due = [self.next, *(timer[0] for timer in self.timers[:1])]
                self.now = max(self.now, min(due))
                self.arrive()
            self.polled = self.now
            self.look()
            for _ in range(len(self.unread)):
                self.read(self.unread.popleft())
            ending, self.soon = self.soon, []
            for callback in ending:
                callback()

    def arrive(self) -> None:
        while self.next <= self.now:
            self.unread.append(self.next)
            self.next += self.random.expovariate(self.rate)

    def read(self, sent: float) -> None:
        if self.shedder.read() and self.shedder.sheds("m", ""):
            self.now += GLANCE
            self.shedder.reject(lambda: self.reject(sent))
            return
        self.now += READ
        self.look()
        self.sent += 1
        self.arrived[self.sent] = sent
        deadline = self.now + SLO - self.shedder.lost
        self.feed(Arrived(Request(self.sent, "m", self.now, deadline)))

    def reject(self, sent: float) -> None:
        self.now += REJECT
        self.rejections.append(self.now - sent)
        self.again()

    def again(self) -> None:
        if self.callers:
            self.unread.append(self.now)

    def look(self) -> None:
        """Take what workers have done by now, as the loop does between requests."""
        if self.now - self.looked < POLL and self.polled != self.now:
            return
        self.looked = self.now
        while self.timers and self.timers[0][0] <= self.now:
            self.feed(heappop(self.timers)[2])

    def feed(self, event: object) -> None:
        for command in self.dispatcher.handle(event, self.now):  # type: ignore[arg-type]
            self.perform(command)

    def perform(self, command: Command) -> None:
        match command:
            case Run(lane, batch, _, requests):
                due = self.now + LATENCIES[len(requests) - 1]
                heappush(self.timers, (due, len(self.timers) + batch * 1000, Finished(lane, batch)))
            case WakeAt(lane, time):
                heappush(self.timers, (time, -self.sent, Woke(lane, time)))
            case Reply(requests, outcome):
                for request in requests:
                    self.now += ANSWER
                    sent = self.arrived.pop(request.id)
                    if outcome is Outcome.SERVED:
                        self.within += self.now - sent <= SLO
                    elif outcome is Outcome.REJECTED:
                        self.rejections.append(self.now - sent)
                    self.again()


def goodput(flood: Flood, seconds: float = 2.0) -> float:
    """Return the part of the model's capacity that is answered within the target, after a second to begin with."""
    flood.run(1.0)
    before = flood.within
    flood.rejections.clear()
    flood.run(1.0 + seconds)
    return (flood.within - before) / seconds / CAPACITY


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * len(values))]


def test_loop_that_reads_everything_answers_nothing_in_time() -> None:
    assert goodput(Flood(rate=CAPACITY, sheds=False), 0.5) > 0.95
    assert goodput(Flood(rate=3 * CAPACITY, sheds=False), 0.5) < 0.1


def test_server_at_capacity_sheds_nothing() -> None:
    flood = Flood(rate=CAPACITY)
    assert goodput(flood, 0.5) > 0.95 and not flood.shedder.active


def test_goodput_holds_at_three_times_the_capacity_and_rejections_are_prompt() -> None:
    flood = Flood(rate=3 * CAPACITY)
    assert goodput(flood) > 0.9
    assert quantile(flood.rejections, 0.99) < 0.02


def test_goodput_holds_at_ten_times_the_capacity() -> None:
    """More than a loop can reject: there, rejections wait."""
    assert goodput(Flood(rate=10 * CAPACITY)) > 0.8


@pytest.mark.parametrize("callers", [512, 4000])
def test_goodput_holds_though_rejected_callers_ask_again_at_once(callers: int) -> None:
    assert goodput(Flood(callers=callers)) > 0.8
