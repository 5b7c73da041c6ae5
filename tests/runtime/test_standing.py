"""Queues that stand are cut to what keeps their lanes busy, and nothing else is."""

from __future__ import annotations

import math
from collections import Counter
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.admission_state import read_lane, restore_lane
from cotenant.runtime.dispatcher import CROWDED, Dispatcher
from cotenant.runtime.events import Applied, Arrived, Finished, LaneModel, LaneSpec, Ready, Reply, Run, WakeAt, Woke
from cotenant.runtime.lane import Queue
from cotenant.runtime.standing import EMPTY, GAP, INTERVAL, STANDING, enough, stand

BATCH = 8
LATENCIES = tuple(0.004 + 0.0005 * rows for rows in range(1, BATCH + 1))  # seconds: 8 ms for eight rows
TARGET = 0.1
STANDS = max(INTERVAL, STANDING * TARGET)
CAPACITY = BATCH / LATENCIES[-1]


def spec(number: int, models: str, latencies: tuple[float, ...] = LATENCIES) -> LaneSpec:
    return LaneSpec(
        id=LaneId(DeviceId("cpu"), number),
        models=tuple(LaneModel(model=model, latencies=latencies) for model in models),
    )


class Lanes:
    """Lanes in virtual time, whose batches take as long as predicted, and how requests ended."""

    def __init__(self, *specs: LaneSpec) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher()
        self.latencies = {(lane.id, model.model): model.latencies for lane in specs for model in lane.models}
        self.due: list[tuple[float, int, Finished | Woke]] = []
        self.count = 0
        self.ended: Counter[tuple[str, Outcome, str]] = Counter()
        self.batches: list[int] = []  # their rows
        self.feed(Applied(specs))
        for lane in specs:
            self.feed(Ready(lane.id))

    def feed(self, event: Applied | Ready | Arrived | Finished | Woke) -> None:
        for command in self.dispatcher.handle(event, self.now):
            self.count += 1
            match command:
                case Run(lane, batch, model, requests):
                    rows = sum(request.size for request in requests)
                    self.batches.append(rows)
                    seconds = self.latencies[lane, model][rows - 1]
                    heappush(self.due, (self.now + seconds, self.count, Finished(lane, batch)))
                case WakeAt(lane, time):
                    heappush(self.due, (time, self.count, Woke(lane, time)))
                case Reply(requests, outcome, reason):
                    for request in requests:
                        self.ended[request.model, outcome, reason] += 1

    def run(self, until: float) -> None:
        while self.due and self.due[0][0] <= until:
            time, _, event = heappop(self.due)
            self.now = max(self.now, time)
            self.feed(event)
        self.now = until

    def ask(
        self, model: str = "m", *, count: int = 1, within: float = TARGET, size: int = 1, priority: int = 0
    ) -> Counter[str]:
        """Let requests arrive one by one at this moment; return why how many were rejected."""
        before = self.ended.copy()
        for _ in range(count):
            self.count += 1
            self.feed(Arrived(Request(self.count, model, self.now, self.now + within, size, priority)))
        gone = self.ended - before
        return Counter({reason: n for (_, outcome, reason), n in gone.items() if outcome is Outcome.REJECTED})

    def offer(self, rate: float, seconds: float, model: str = "m", within: float = TARGET) -> int:
        """Let requests arrive evenly for so long; return the most rows that were waiting when one had been taken."""
        most = 0
        for number in range(int(rate * seconds)):
            self.run(self.now + 1 / rate)
            self.ask(model, within=within)
            most = max(most, self.queue(model).rows) if number else 0
        return most

    def queue(self, model: str = "m", lane: int = 0) -> Queue:
        return self.dispatcher.lanes[LaneId(DeviceId("cpu"), lane)].queues[model]

    def served(self, model: str = "m") -> int:
        return self.ended[model, Outcome.SERVED, ""]


def overloaded(*specs: LaneSpec) -> Lanes:
    """A lane of `m` whose queue has come to stand."""
    lanes = Lanes(*(specs or (spec(0, "m"),)))
    lanes.offer(3 * CAPACITY, STANDS + 2 * TARGET)
    assert lanes.ended["m", Outcome.REJECTED, CROWDED]
    return lanes


def test_queue_that_stands_is_cut_to_what_is_enough() -> None:
    lanes = Lanes(spec(0, "m"))
    long = lanes.offer(3 * CAPACITY, 8 * TARGET)
    assert not lanes.ended["m", Outcome.REJECTED, CROWDED] and long > 5 * BATCH, "it may still be a burst"
    lanes.offer(3 * CAPACITY, STANDS)
    before = lanes.served()
    short = lanes.offer(3 * CAPACITY, 1.0)
    assert short <= math.ceil(enough(lanes.queue())) < long / 2
    assert lanes.served() - before == pytest.approx(CAPACITY, rel=0.01), "as many are answered as before"


def test_rejection_by_a_standing_queue_is_what_a_front_end_is_told() -> None:
    lanes = overloaded()
    while not lanes.ask():
        pass
    deadline = lanes.now + TARGET
    assert lanes.dispatcher.late_finish("m", deadline, lanes.now) == math.inf
    assert lanes.dispatcher.room("m", deadline, lanes.now)[0] == 0
    lanes.run(lanes.now + LATENCIES[-1])
    room, finish = lanes.dispatcher.room("m", lanes.now + TARGET, lanes.now)
    assert room > 0 and finish < lanes.now + TARGET / 2
    assert lanes.dispatcher.late_finish("m", lanes.now + TARGET, lanes.now) == -math.inf
    assert lanes.ask(count=room + 3) == {CROWDED: 3}


def test_burst_that_passes_is_taken_as_far_as_its_deadlines_allow() -> None:
    lanes = Lanes(spec(0, "m"))
    taken = 100 - lanes.ask(count=100).total()
    assert taken > 10 * BATCH
    for _ in range(20):  # again and again, for longer than a queue may stand
        lanes.run(lanes.now + TARGET)
        assert 100 - lanes.ask(count=100).total() == taken
    assert not lanes.ended["m", Outcome.REJECTED, CROWDED]


@pytest.mark.parametrize("pause", [LATENCIES[-1] * 4, TARGET, 100.0])
def test_burst_after_an_overload_is_taken_once_the_queue_has_emptied(pause: float) -> None:
    """Right after it, with the lane kept at work by a few requests, or after a rest."""
    taken = 100 - Lanes(spec(0, "m")).ask(count=100).total()
    lanes = overloaded()
    drained = enough(lanes.queue()) / CAPACITY + LATENCIES[-1]
    lanes.run(lanes.now + drained)
    assert not lanes.queue().rows
    lanes.run(lanes.now + pause)
    assert 100 - lanes.ask(count=100).total() == taken


def test_queue_that_empties_now_and_then_under_overload_still_stands() -> None:
    """A gap in what arrives is no end of it: only several batches in a row that leave nothing are."""
    lanes = overloaded()
    for _ in range(5):
        lanes.run(lanes.now + 2 * LATENCIES[-1])
        lanes.offer(3 * CAPACITY, 0.03)
    most = math.ceil(enough(lanes.queue()))
    assert lanes.offer(3 * CAPACITY, 0.1) <= most < 3 * BATCH
    lanes.offer(CAPACITY / 2, 2 * EMPTY * LATENCIES[-1])
    assert lanes.offer(3 * CAPACITY, 0.1) > 3 * BATCH


def test_lane_whose_requests_come_in_clumps_is_kept_busy() -> None:
    """Twice what a clump leaves room for must wait, which is learnt from batches that were not full."""
    lanes = overloaded()
    clump = 2 * LATENCIES[-1]
    for number in range(80):
        if number == 40:
            lanes.batches.clear()
        lanes.run(lanes.now + clump)
        lanes.ask(count=6 * BATCH)
    assert lanes.ended["m", Outcome.REJECTED, CROWDED]
    assert sum(lanes.batches) == pytest.approx(40 * clump * CAPACITY, rel=0.05)
    assert lanes.queue().rows < 3 * BATCH


def test_urgent_requests_are_taken_though_others_stand() -> None:
    lanes = overloaded()
    for _ in range(50):  # lower priority stands, urgent requests come and go
        lanes.run(lanes.now + LATENCIES[-1])
        lanes.ask(count=3 * BATCH, priority=1)
        assert not lanes.ask(count=2)
    assert not lanes.ask(count=4 * BATCH)
    lanes.run(lanes.now + TARGET)
    # Likewise those that are due much sooner.
    lanes = Lanes(spec(0, "m"))
    for _ in range(150):  # for longer than queues may stand
        lanes.run(lanes.now + LATENCIES[-1])
        lanes.ask(count=3 * BATCH, within=100 * TARGET)
        assert not lanes.ask(count=2)
    assert not lanes.ask(count=4 * BATCH)


def test_large_request_is_rejected_like_small_ones_where_queues_stand() -> None:
    lanes = overloaded()
    while not lanes.ask():
        pass
    assert lanes.ask(size=3 * BATCH) == {CROWDED: 1}
    lanes.run(lanes.now + LATENCIES[-1])
    assert not lanes.ask(size=3 * BATCH)


def test_lane_that_waits_for_requests_is_used_though_another_lane_has_enough() -> None:
    """A slow lane finishes later than the standing queue of a fast one: it takes what is beyond that."""
    slow = tuple(6 * seconds for seconds in LATENCIES)
    lanes = Lanes(spec(0, "m"), spec(1, "m", slow))
    lanes.offer(3 * CAPACITY, STANDS + TARGET)
    before = lanes.served()
    lanes.offer(3 * CAPACITY, 1.0)
    assert lanes.ended["m", Outcome.REJECTED, CROWDED]
    assert lanes.served() - before == pytest.approx(CAPACITY * 7 / 6, rel=0.02)


def test_enough_is_a_batch_and_a_stock_and_another_batch_in_a_shared_lane() -> None:
    alone, shared = Lanes(spec(0, "m")).queue(), Lanes(spec(0, "mn")).queue()
    assert BATCH + 1 < enough(alone) < 1.5 * BATCH
    assert enough(shared) == enough(alone) + BATCH
    quick = Lanes(spec(0, "m", (0.0001,))).queue()
    assert quick.expected(1) * enough(quick) >= GAP


def test_queue_is_not_cut_while_another_model_of_its_lane_keeps_up() -> None:
    """It would take its turns sooner, with smaller batches: less would be answered in all."""
    lanes = Lanes(spec(0, "mn"))
    for number in range(int(3 * CAPACITY * 2 * STANDS)):
        lanes.run(lanes.now + 1 / (3 * CAPACITY))
        lanes.ask("m")
        if number % 100 == 0:
            lanes.ask("n")
    assert not lanes.ended["m", Outcome.REJECTED, CROWDED]
    assert lanes.queue().rows > 4 * BATCH
    for _ in range(int(3 * CAPACITY * 2 * STANDS)):
        lanes.run(lanes.now + 1 / (3 * CAPACITY))
        lanes.ask("m")
        lanes.ask("n")
    assert lanes.queue("m").rows <= 3 * BATCH and lanes.queue("n").rows <= 3 * BATCH


def test_standing_is_remembered_over_a_change_of_plan() -> None:
    lanes = overloaded()
    lanes.feed(Applied((spec(0, "m", LATENCIES[:4]),)))
    assert lanes.queue().emptied < lanes.now - STANDS
    while not (reasons := lanes.ask()):
        pass
    assert reasons == {CROWDED: 1}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 0.05)), min_size=1, max_size=40),
    st.sampled_from([1, 8]),
)
def test_request_is_only_rejected_for_a_standing_queue_with_enough_before_it(
    bursts: list[tuple[int, float]], batch: int
) -> None:
    lanes = Lanes(spec(0, "m", LATENCIES[:batch]))
    for count, pause in bursts * 3:
        lanes.run(lanes.now + pause)
        for _ in range(count):
            queue = lanes.queue()
            ahead, least = queue.rows, enough(queue)
            reasons = lanes.ask(within=0.06)
            if CROWDED in reasons:
                assert ahead >= least and lanes.now - queue.emptied > INTERVAL
            lanes.dispatcher.invariants()


def test_standing_is_told_to_other_processes() -> None:
    lanes = overloaded()
    lanes.queue().stock = 3.0
    lane = lanes.dispatcher.lanes[LaneId(DeviceId("cpu"), 0)]
    restored = restore_lane(read_lane(lane, lanes.now), 1000.0).queues["m"]
    assert restored.emptied == pytest.approx(lanes.queue().emptied + 1000.0 - lanes.now)
    assert enough(restored) == enough(lanes.queue())
    fresh = restore_lane(read_lane(Lanes(spec(0, "m")).dispatcher.lanes[lane.id], 0.0), 1000.0).queues["m"]
    assert not stand([fresh], TARGET, 1000.0)
