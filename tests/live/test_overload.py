"""Goodput under overload, in virtual time: the shedder before the real dispatcher, on a loop whose work takes time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.live.driver import GAIN
from cotenant.live.http.load_shedding import LoadShedder
from cotenant.live.inference import POLL_INTERVAL
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

READ, ANSWER, GLANCE, REJECT = 25e-6, 20e-6, 6e-6, 10e-6  # seconds of the loop, near what docs/benchmarks.md reports
POLL = POLL_INTERVAL  # seconds between two looks for batches that are done
SLO = 0.05
LANE = LaneId.parse("cpu-0/0")
LATENCIES = tuple(0.004 + 0.0001 * rows for rows in range(1, 33))
CAPACITY = 32 / LATENCIES[-1]


class Flood:
    """A server's loop in virtual time, and callers: `rate` requests/s, or so many `callers` that ask again at once."""

    def __init__(self, *, rate: float = 0.0, callers: int = 0, sheds: bool = True) -> None:
        self.now = self.polled = self.looked = self.writing = 0.0
        self.rate, self.callers = rate, callers
        self.shedder = LoadShedder(self, lambda: self.now)
        if sheds:
            self.shedder.attach(self)
        self.dispatcher = Dispatcher()
        self.soon: list[Callable[[], object]] = []
        self.timers: list[tuple[float, int, Finished | Woke]] = []
        self.arrived: dict[int, float] = {}  # by request, when it was sent
        self.sent = self.within = self.read_for_nothing = 0
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

    @property
    def shortest_target(self) -> float:
        return SLO

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        self.look()
        return self.dispatcher.late_finish("m", self.now + SLO - lost - self.writing, self.now) > 0

    def poll(self) -> None:
        self.look()

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
        deadline = self.now + SLO - self.shedder.lost - self.writing
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
            event, began = heappop(self.timers)[2], self.now
            self.feed(event)
            if isinstance(event, Finished):  # as the driver does
                self.writing += GAIN * (self.now - began - self.writing)

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
                        self.read_for_nothing += 1
                        self.rejections.append(self.now - sent)
                    self.again()


class Pool(Flood):
    """Callers that share so many connections: a request for which none is free is given up."""

    def __init__(self, *, rate: float, connections: int) -> None:
        super().__init__(rate=rate)
        self.free = connections

    def arrive(self) -> None:
        while self.next <= self.now:
            if self.free:
                self.free -= 1
                self.unread.append(self.next)
            self.next += self.random.expovariate(self.rate)

    def again(self) -> None:
        self.arrive()
        self.free += 1


class Patient(Pool):
    """Callers whose requests wait for a free connection, in order, for `patience` seconds at most: time that the server
    does not see."""

    def __init__(self, *, rate: float, connections: int, patience: float) -> None:
        super().__init__(rate=rate, connections=connections)
        self.patience = patience
        self.line: deque[float] = deque()

    def arrive(self) -> None:
        while self.next <= self.now:
            if self.free:
                self.free -= 1
                self.unread.append(self.next)
            else:
                self.line.append(self.next)
            self.next += self.random.expovariate(self.rate)

    def again(self) -> None:
        self.arrive()
        while self.line:
            due = self.line.popleft()
            if self.now - due <= self.patience:
                self.unread.append(due)
                return
        self.free += 1


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
    assert goodput(Flood(rate=10 * CAPACITY, sheds=False), 0.5) < 0.1


def test_server_at_capacity_sheds_nothing() -> None:
    flood = Flood(rate=CAPACITY)
    assert goodput(flood, 0.5) > 0.95 and not flood.shedder.active


def test_goodput_holds_at_three_times_the_capacity_and_rejections_are_prompt() -> None:
    flood = Flood(rate=3 * CAPACITY)
    assert goodput(flood) > 0.9
    assert quantile(flood.rejections, 0.99) < 0.02


def test_goodput_holds_at_ten_times_the_capacity_and_rejections_are_prompt() -> None:
    flood = Flood(rate=10 * CAPACITY)
    assert goodput(flood) > 0.9
    assert quantile(flood.rejections, 0.99) < 0.02


@pytest.mark.parametrize("callers", [4000, 20000])
def test_goodput_holds_though_rejected_callers_ask_again_at_once(callers: int) -> None:
    assert goodput(Flood(callers=callers)) > 0.9


def test_goodput_holds_though_few_callers_ask_again_at_once() -> None:
    """A few fall in step with batches, more or less luckily by their number: on average."""
    assert sum(goodput(Flood(callers=callers), 1.0) for callers in (400, 512, 600)) / 3 > 0.9


@pytest.mark.parametrize("slower", [1, 3])
@pytest.mark.parametrize("factor", [3, 10, 30, 100])
def test_serving_keeps_its_time_whatever_is_offered(
    monkeypatch: pytest.MonkeyPatch, factor: float, slower: float
) -> None:
    """Also on a machine on which the loop has much less time than it takes to reject all."""
    for cost in ("READ", "ANSWER", "GLANCE", "REJECT"):
        monkeypatch.setitem(globals(), cost, globals()[cost] * slower)
    assert goodput(Pool(rate=factor * CAPACITY, connections=4000), 1.0) > 0.8


@pytest.mark.parametrize("slower", [1.5, 2])
def test_goodput_holds_though_callers_have_waited_where_the_server_does_not_see_it(
    monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    """The server answers less than is offered, so every request has waited for as long as its caller is patient."""
    for cost in ("READ", "ANSWER", "GLANCE", "REJECT"):
        monkeypatch.setitem(globals(), cost, globals()[cost] * slower)
    callers = Patient(rate=10 * CAPACITY, connections=4000, patience=SLO / 2)
    assert goodput(callers, 1.0) > 0.8


@pytest.mark.parametrize(("slower", "holds"), [(1.0, True), (1.5, False)])
def test_callers_that_wait_for_ever_are_late_once_less_is_answered_than_they_offer(
    monkeypatch: pytest.MonkeyPatch, slower: float, holds: bool
) -> None:
    """The line at the callers grows by what is not answered, rejections included: no order of answers helps."""
    for cost in ("READ", "ANSWER", "GLANCE", "REJECT"):
        monkeypatch.setitem(globals(), cost, globals()[cost] * slower)
    callers = Patient(rate=10 * CAPACITY, connections=4000, patience=math.inf)
    assert goodput(callers, 1.0) > 0.9 if holds else goodput(callers, 1.0) < 0.1
    assert (len(callers.line) > 0) == (not holds)


def test_request_that_was_read_is_not_rejected_afterwards() -> None:
    """To read it would have been for nothing: under overload the shedder and the dispatcher agree."""
    flood = Flood(callers=512)
    flood.run(1.0)
    flood.read_for_nothing = 0
    flood.run(2.0)
    assert flood.read_for_nothing < 50
