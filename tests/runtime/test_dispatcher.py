"""The dispatcher's rules one by one, and its promises over random sequences of events."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from cotenant.control.event_log import replay
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime import dispatcher as words
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    Applied,
    Arrived,
    Cancelled,
    Command,
    Died,
    Drained,
    Event,
    Failed,
    Finished,
    LaneModel,
    LaneSpec,
    Ready,
    Reply,
    Restarting,
    Run,
    Split,
    WakeAt,
    Woke,
)
from cotenant.runtime.log import log_line

LANE_A, LANE_B, LANE_C = (LaneId(DeviceId("cpu"), slot) for slot in range(3))


def linear(batch: int, *, fixed: float = 0.010, row: float = 0.001) -> tuple[float, ...]:
    return tuple(fixed + row * n for n in range(1, batch + 1))


def lane(id: LaneId, *models: LaneModel) -> LaneSpec:
    return LaneSpec(id=id, models=models)


def started(*specs: LaneSpec) -> Dispatcher:
    dispatcher = Dispatcher()
    dispatcher.handle(Applied(specs), 0.0)
    for spec in specs:
        dispatcher.handle(Ready(spec.id), 0.0)
    return dispatcher


def request(
    id: int, now: float = 0.0, *, model: str = "m", within: float = 0.1, size: int = 1, priority: int = 0
) -> Request:
    return Request(id, model, now, now + within, size, priority)


def runs(commands: list[Command]) -> list[list[int]]:
    return [[r.id for r in command.requests] for command in commands if isinstance(command, Run)]


def ends(commands: list[Command]) -> dict[int, Outcome]:
    return {r.id: command.outcome for command in commands if isinstance(command, Reply) for r in command.requests}


def arrive(dispatcher: Dispatcher, now: float, *requests: Request) -> list[Command]:
    return [command for r in requests for command in dispatcher.handle(Arrived(r), now)]


A = lane(LANE_A, LaneModel(model="m", latencies=linear(4)))


def test_dispatcher_idle_lane_runs_a_request_at_once() -> None:
    assert runs(arrive(started(A), 0.0, request(1))) == [[1]]


def test_dispatcher_requests_to_a_busy_lane_form_the_next_batch() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, *(request(i) for i in range(6)))
    commands = dispatcher.handle(Finished(LANE_A, 1), 0.011)
    assert runs(commands) == [[1, 2, 3, 4]]
    assert ends(commands) == {0: Outcome.SERVED}


def test_dispatcher_next_batch_starts_before_responses_are_written() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1))
    commands = dispatcher.handle(Finished(LANE_A, 1), 0.011)
    assert [type(command) for command in commands] == [Run, Reply]


def test_dispatcher_request_that_cannot_meet_its_deadline_is_rejected() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0))
    (reply,) = arrive(dispatcher, 0.0, request(1, within=0.015))
    assert isinstance(reply, Reply)
    assert reply.outcome is Outcome.REJECTED
    assert reply.reason == words.TOO_LATE
    assert reply.retry_after == pytest.approx(0.011 + 0.014 - 0.015)  # its batch counts as a full one


def test_dispatcher_request_without_a_lane_is_rejected_with_the_reason() -> None:
    (reply,) = arrive(started(A), 0.0, request(1, model="other"))
    assert isinstance(reply, Reply)
    assert reply.reason == words.NO_LANE


@pytest.mark.parametrize("size", [1, 4, 5])
def test_dispatcher_without_a_running_worker_rejects_everything(size: int) -> None:
    dispatcher = Dispatcher()
    dispatcher.handle(Applied((A,)), 0.0)
    (reply,) = arrive(dispatcher, 0.0, request(1, size=size))
    assert isinstance(reply, Reply)
    assert reply.reason == words.NO_WORKER


def test_dispatcher_deadline_on_a_busy_lane_expires_the_request() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0))
    commands = arrive(dispatcher, 0.0, request(1, within=0.030))
    assert commands == [WakeAt(LANE_A, 0.030)]
    assert ends(dispatcher.handle(Woke(LANE_A, 0.030), 0.030)) == {1: Outcome.EXPIRED}


def test_dispatcher_early_timer_is_set_again() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1, within=0.030))
    assert dispatcher.handle(Woke(LANE_A, 0.030), 0.029) == [WakeAt(LANE_A, 0.030)]


def test_dispatcher_late_head_is_dropped_for_requests_that_can_finish() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1, within=0.030), request(2, within=0.1))
    commands = dispatcher.handle(Finished(LANE_A, 1), 0.025)  # late: 14 ms over
    assert ends(commands) == {0: Outcome.SERVED, 1: Outcome.EXPIRED}
    assert runs(commands) == [[2]]


def test_dispatcher_batch_is_limited_by_its_earliest_deadline() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0))
    arrive(dispatcher, 0.0, request(1, within=0.0262), *(request(i, within=0.2) for i in (2, 3, 4)))
    # The lane was late, and 13.2 ms are left for request 1: enough for two rows, not for four.
    assert runs(dispatcher.handle(Finished(LANE_A, 1), 0.013)) == [[1, 2]]


def test_dispatcher_late_head_before_a_full_batch_is_dropped() -> None:
    dispatcher = started(lane(LANE_A, LaneModel(model="m", latencies=linear(8))))
    arrive(dispatcher, 0.0, request(0), request(1, within=0.034), *(request(i, within=0.2) for i in range(2, 10)))
    # The first batch took 18 ms instead of 11: from now on one row counts as 13.6 ms, two as 14.9 and eight as 22.3.
    # Request 1 has 16 ms left: enough for itself and one more. Two answers, or one lost and eight given.
    commands = dispatcher.handle(Finished(LANE_A, 1), 0.018)
    assert ends(commands) == {0: Outcome.SERVED, 1: Outcome.EXPIRED}
    assert runs(commands) == [[2, 3, 4, 5, 6, 7, 8, 9]]


def test_dispatcher_batch_limit_counts_rows() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1, size=3), request(2, size=2), request(3, size=1))
    assert runs(dispatcher.handle(Finished(LANE_A, 1), 0.011)) == [[1]]


def test_dispatcher_higher_priority_overtakes() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1, priority=1), request(2, priority=1), request(3, priority=0))
    commands = dispatcher.handle(Finished(LANE_A, 1), 0.011)
    assert runs(commands) == [[3, 1, 2]]


def test_dispatcher_earlier_deadline_overtakes_within_a_priority() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1, within=0.2), request(2, within=0.1))
    assert runs(dispatcher.handle(Finished(LANE_A, 1), 0.011)) == [[2, 1]]


def test_dispatcher_queue_delay_ends_when_full_or_elapsed() -> None:
    spec = lane(LANE_A, LaneModel(model="m", latencies=linear(2), max_queue_delay=0.020))
    dispatcher = started(spec)
    assert arrive(dispatcher, 0.0, request(0)) == [WakeAt(LANE_A, 0.020)]
    assert runs(arrive(dispatcher, 0.005, request(1, 0.005))) == [[0, 1]]

    dispatcher = started(spec)
    arrive(dispatcher, 0.0, request(0))
    assert runs(dispatcher.handle(Woke(LANE_A, 0.020), 0.020)) == [[0]]


def test_dispatcher_queue_delay_ends_early_for_a_deadline() -> None:
    dispatcher = started(lane(LANE_A, LaneModel(model="m", latencies=linear(4), max_queue_delay=0.020)))
    (wake,) = arrive(dispatcher, 0.0, request(0, within=0.025))
    assert isinstance(wake, WakeAt)
    assert wake.time == pytest.approx(0.025 - 0.012)


def test_dispatcher_models_of_a_lane_alternate_under_any_load() -> None:
    shared = lane(LANE_A, LaneModel(model="m", latencies=linear(2)), LaneModel(model="n", latencies=linear(2)))
    dispatcher = started(shared)
    arrive(dispatcher, 0.0, *(request(i, within=1) for i in range(9)))
    arrive(dispatcher, 0.0, *(request(i, model="n", within=9) for i in (10, 11, 12)))
    order = []
    for batch in range(1, 5):
        order += runs(dispatcher.handle(Finished(LANE_A, batch), batch * 0.01))
    assert order == [[10, 11], [1, 2], [12], [3, 4]]


def test_dispatcher_requests_go_to_the_lane_that_finishes_first() -> None:
    slow = lane(LANE_A, LaneModel(model="m", latencies=linear(4, fixed=0.015)))
    fast = lane(LANE_B, LaneModel(model="m", latencies=linear(4)))
    dispatcher = started(slow, fast)
    commands = arrive(dispatcher, 0.0, request(1), request(2), request(3))
    assert [(c.lane, [r.id for r in c.requests]) for c in commands if isinstance(c, Run)] == [
        (LANE_B, [1]),
        (LANE_A, [2]),
    ]


def test_dispatcher_request_lost_with_its_worker_is_retried_once_elsewhere() -> None:
    other = lane(LANE_B, LaneModel(model="m", latencies=linear(4)))
    dispatcher = started(A, other)
    arrive(dispatcher, 0.0, request(1))
    assert runs(dispatcher.handle(Died(LANE_A, "killed"), 0.005)) == [[1]]
    (reply,) = dispatcher.handle(Died(LANE_B, "killed"), 0.006)
    assert isinstance(reply, Reply)
    assert (reply.outcome, reply.reason) == (Outcome.FAILED, words.DIED_TWICE)


def test_dispatcher_lanes_that_die_together_get_no_retries() -> None:
    """They share a device or a process: what one held would be lost a second time on another."""
    model = LaneModel(model="m", latencies=linear(1))
    dispatcher = started(lane(LANE_A, model), lane(LANE_B, model), lane(LANE_C, model))
    assert runs(dispatcher.handle(Arrived(request(1)), 0.0)) == [[1]]
    commands = dispatcher.handle(Died(LANE_A, "lost", (LANE_B,)), 0.001)
    dispatcher.invariants()
    assert [(command.lane, [r.id for r in command.requests]) for command in commands if isinstance(command, Run)] == [
        (LANE_C, [1])
    ]
    assert [lane.up for lane in dispatcher.lanes.values()] == [False, False, True]


def test_dispatcher_lost_request_without_another_lane_waits_for_its_worker() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(1))
    assert dispatcher.handle(Died(LANE_A, "killed"), 0.005) == [WakeAt(LANE_A, 0.1)]
    assert runs(dispatcher.handle(Ready(LANE_A), 0.050)) == [[1]]


def test_request_for_a_worker_that_comes_back_in_time_waits_for_it() -> None:
    dispatcher = started(A)
    dispatcher.handle(Died(LANE_A, "killed"), 0.0)
    assert dispatcher.handle(Restarting(LANE_A, 0.050), 0.0) == []
    assert arrive(dispatcher, 0.010, request(1, 0.010)) == [WakeAt(LANE_A, 0.110)]
    assert runs(dispatcher.handle(Ready(LANE_A), 0.060)) == [[1]]


def test_request_that_a_restarting_worker_cannot_answer_in_time_is_rejected_at_once() -> None:
    dispatcher = started(A)
    dispatcher.handle(Died(LANE_A, "killed"), 0.0)
    dispatcher.handle(Restarting(LANE_A, 0.100), 0.0)
    (reply,) = arrive(dispatcher, 0.0, request(1))
    assert isinstance(reply, Reply)
    assert (reply.outcome, reply.reason) == (Outcome.REJECTED, words.TOO_LATE)
    assert reply.retry_after == pytest.approx(0.100 + 0.011 - 0.100)


def test_worker_that_does_not_come_back_when_expected_gets_no_more_requests() -> None:
    dispatcher = started(A)
    dispatcher.handle(Died(LANE_A, "killed"), 0.0)
    dispatcher.handle(Restarting(LANE_A, 0.050), 0.0)
    (reply,) = arrive(dispatcher, 0.051, request(1, 0.051))
    assert isinstance(reply, Reply)
    assert (reply.outcome, reply.reason) == (Outcome.REJECTED, words.NO_WORKER)


def test_worker_that_is_up_is_not_expected_back() -> None:
    dispatcher = started(A)
    dispatcher.handle(Restarting(LANE_A, 9.0), 0.0)  # stale
    assert runs(arrive(dispatcher, 0.0, request(1))) == [[1]]


def test_lost_request_waits_for_its_worker_though_that_is_expected_too_late() -> None:
    """It was accepted, and may be lucky."""
    other = lane(LANE_B, LaneModel(model="m", latencies=linear(4)))
    dispatcher = started(A, other)
    dispatcher.handle(Died(LANE_B, "killed"), 0.0)
    dispatcher.handle(Restarting(LANE_B, 0.2), 0.0)
    arrive(dispatcher, 0.0, request(1))
    assert dispatcher.handle(Died(LANE_A, "killed"), 0.005) == [WakeAt(LANE_A, 0.1)]
    assert runs(dispatcher.handle(Ready(LANE_A), 0.050)) == [[1]]


def test_large_request_is_split_over_a_lane_that_is_up_and_one_that_comes_back() -> None:
    other = lane(LANE_B, LaneModel(model="m", latencies=linear(4)))
    dispatcher = started(A, other)
    dispatcher.handle(Died(LANE_B, "killed"), 0.0)
    dispatcher.handle(Restarting(LANE_B, 0.005), 0.0)
    commands = arrive(dispatcher, 0.0, request(1, size=8, within=0.035))
    assert len(runs(commands)) == 1 and not ends(commands)
    assert len(runs(dispatcher.handle(Ready(LANE_B), 0.005))) == 1


def test_time_that_was_lent_is_not_counted_on() -> None:
    """A lane whose batches end early for now admits no more than it could by its share."""
    spent, lent = started(A), started(A)
    for n in range(1, 9):
        arrive(spent, n, request(n, n))
        spent.handle(Finished(LANE_A, n), n + 0.0165)
        arrive(lent, n, request(n, n))
        lent.handle(Finished(LANE_A, n, lent=0.0125), n + 0.004)
    assert lent.lanes[LANE_A].queues["m"].correction == pytest.approx(spent.lanes[LANE_A].queues["m"].correction)
    assert lent.lanes[LANE_A].queues["m"].correction > 1.4


@pytest.mark.parametrize(("latencies", "known"), [(linear(4), True), (linear(2), True), (linear(4, fixed=0.02), False)])
def test_dispatcher_new_lane_counts_with_what_the_old_one_observed(latencies: tuple[float, ...], known: bool) -> None:
    """A worker that takes over would accept what its first batches cannot do. Where the plan predicts other latencies,
    what was observed is of another share, or counted in them already."""
    dispatcher = started(A)
    for number in range(20):
        arrive(dispatcher, number * 1.0, request(number + 1, number * 1.0))
        dispatcher.handle(Finished(LANE_A, number + 1), number + 0.0165)  # planned: 0.011
    learnt = dispatcher.lanes[LANE_A].queues["m"]
    assert learnt.correction > 1.4
    dispatcher.handle(Applied((A, lane(LANE_B, LaneModel(model="m", latencies=latencies)))), 30.0)
    fresh = dispatcher.lanes[LANE_B].queues["m"]
    assert (fresh.ratio, fresh.deviation, fresh.correction) == (
        (learnt.ratio, learnt.deviation, learnt.correction) if known else (1.0, 0.0, 1.0)
    )


def test_time_that_other_models_were_lent_is_not_counted_on() -> None:
    both = lane(LANE_A, LaneModel(model="m", latencies=linear(1)), LaneModel(model="n", latencies=linear(1)))
    learnt = []
    for taken, extra in ((0.011, 0.0), (0.003, 0.008)):
        dispatcher = started(both)
        now = 0.0
        for n in range(1, 9):
            arrive(dispatcher, now, *(request(10 * n + i, now, model=name, within=9.0) for i, name in enumerate("mn")))
            now += taken
            running = dispatcher.lanes[LANE_A].batch
            assert running is not None
            dispatcher.handle(Finished(LANE_A, running.id, lent=extra), now)
        learnt.append(dispatcher.lanes[LANE_A].queues["m"].others_between)
    assert learnt[0] == pytest.approx(learnt[1]) and learnt[0] > 0


def test_dispatcher_failed_batch_fails_only_its_requests() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1))
    commands = dispatcher.handle(Failed(LANE_A, 1, "no such thing"), 0.005)
    assert ends(commands) == {0: Outcome.FAILED}
    assert runs(commands) == [[1]]


def test_dispatcher_request_error_fails_only_that_request() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1), request(2))
    dispatcher.handle(Finished(LANE_A, 1), 0.011)
    commands = dispatcher.handle(Finished(LANE_A, 2, ((1, "no such row"),)), 0.025)
    assert ends(commands) == {1: Outcome.FAILED, 2: Outcome.SERVED}
    assert [c.reason for c in commands if isinstance(c, Reply)] == ["no such row", ""]


def test_dispatcher_cancelled_request_is_answered_once() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1), request(2))
    assert ends(dispatcher.handle(Cancelled(0), 0.001)) == {0: Outcome.CANCELLED}  # runs already
    assert ends(dispatcher.handle(Cancelled(1), 0.001)) == {1: Outcome.CANCELLED}  # waits
    assert dispatcher.handle(Cancelled(1), 0.001) == []
    commands = dispatcher.handle(Finished(LANE_A, 1), 0.011)
    assert runs(commands) == [[2]]
    assert ends(commands) == {}


def test_dispatcher_late_events_of_a_lost_batch_are_ignored() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0))
    assert dispatcher.handle(Finished(LANE_A, 7), 0.001) == []
    assert dispatcher.handle(Finished(LaneId(DeviceId("nowhere"), 0), 1), 0.001) == []
    assert dispatcher.handle(Woke(LANE_A, 0.001), 0.001) == []


def test_dispatcher_removed_lane_finishes_its_batch_and_hands_over_its_queue() -> None:
    other = lane(LANE_B, LaneModel(model="m", latencies=linear(4)))
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1))
    dispatcher.handle(Applied((A, other)), 0.001)
    dispatcher.handle(Ready(LANE_B), 0.001)
    assert runs(dispatcher.handle(Applied((other,)), 0.002)) == [[1]]
    commands = dispatcher.handle(Finished(LANE_A, 1), 0.011)
    assert commands[0] == Drained(LANE_A)
    assert ends(commands) == {0: Outcome.SERVED}
    assert set(dispatcher.lanes) == {LANE_B}


def test_dispatcher_requests_of_a_removed_model_are_unavailable() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1))
    (reply,) = [command for command in dispatcher.handle(Applied(()), 0.001) if isinstance(command, Reply)]
    assert ([it.id for it in reply.requests], reply.outcome, reply.reason) == ([1], Outcome.EXPIRED, words.MOVED)
    assert ends(dispatcher.handle(Finished(LANE_A, 1), 0.011)) == {0: Outcome.SERVED}


def test_dispatcher_removed_idle_lane_is_drained_at_once() -> None:
    assert started(A).handle(Applied(()), 0.0) == [Drained(LANE_A)]


def test_dispatcher_batch_above_the_limit_of_the_new_plan_is_answered() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), request(1), request(2))
    assert runs(dispatcher.handle(Finished(LANE_A, 1), 0.011)) == [[1, 2]]
    dispatcher.handle(Applied((lane(LANE_A, LaneModel(model="m", latencies=linear(1))),)), 0.012)
    assert ends(dispatcher.handle(Finished(LANE_A, 2), 0.023)) == {1: Outcome.SERVED, 2: Outcome.SERVED}


def test_dispatcher_observed_slowdown_changes_admission() -> None:
    dispatcher = started(A)
    for batch in range(1, 40):
        now = float(batch)
        arrive(dispatcher, now, request(batch, now))
        dispatcher.handle(Finished(LANE_A, batch), now + 0.022)  # twice the prediction of 11 ms
    (reply,) = arrive(dispatcher, 50.0, request(99, 50.0, within=0.0219))
    assert ends([reply]) == {99: Outcome.REJECTED}
    assert runs(arrive(dispatcher, 51.0, request(100, 51.0, within=0.0221))) == [[100]]


def test_dispatcher_backlog_is_admitted_by_observed_turns_of_others() -> None:
    """In every round another model takes a batch, and it comes while the first one runs: nobody sees it wait."""
    shared = lane(LANE_A, LaneModel(model="m", latencies=linear(2)), LaneModel(model="n", latencies=linear(2)))

    def third_round(learnt: int) -> Outcome | None:
        """Of m's last batch, which needs 4 of 12 ms and so 48 ms by itself, and has 60."""
        dispatcher = started(shared)
        now = 0.0
        arrive(dispatcher, now, request(0, within=9), request(1, within=9), request(2, within=9))
        for batch in range(1, 2 * learnt, 2):
            arrive(dispatcher, now, *(request(10 * batch + i, now, within=9) for i in (0, 1)))
            arrive(dispatcher, now, *(request(10 * batch + i, now, model="n", within=9) for i in (2, 3)))
            dispatcher.handle(Finished(LANE_A, batch), now := now + 0.012)
            dispatcher.handle(Finished(LANE_A, batch + 1), now := now + 0.012)
            dispatcher.invariants()
        queue = dispatcher.lanes[LANE_A].queues["m"]
        new = [request(10**6 + i, now, within=9) for i in range(5 - queue.rows)]
        return ends(arrive(dispatcher, now, *new, request(10**7, now, within=0.06, priority=1))).get(10**7)

    assert third_round(0) is None
    assert third_round(20) is Outcome.REJECTED


def test_dispatcher_single_slow_batch_does_not_close_a_lane() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0))
    dispatcher.handle(Finished(LANE_A, 1), 100.0)
    # A plan gives twice a batch's latency, so a request with that much time is taken whatever was seen.
    assert runs(arrive(dispatcher, 101.0, request(1, 101.0, within=2 * 0.011))) == [[1]]


def test_requests_that_arrive_together_run_as_one_batch() -> None:
    commands = started(A).handle(Arrived(request(1), (request(2), request(3))), 0.0)
    assert runs(commands) == [[1, 2, 3]] and not ends(commands)


def test_requests_that_arrive_together_are_admitted_one_by_one() -> None:
    """Batches of four, one after the other: what no batch finishes in time is rejected, and the others are not."""
    dispatcher = started(A)
    hurried = [request(number, within=1.5 * linear(4)[-1]) for number in range(1, 8)]
    commands = dispatcher.handle(Arrived(hurried[0], tuple(hurried[1:])), 0.0)
    dispatcher.invariants()
    assert runs(commands) == [[1, 2, 3, 4]]
    assert ends(commands) == dict.fromkeys((5, 6, 7), Outcome.REJECTED)


def test_requests_that_arrive_together_go_to_all_lanes_that_are_idle() -> None:
    model = LaneModel(model="m", latencies=linear(1))
    dispatcher = started(lane(LANE_A, model), lane(LANE_B, model), lane(LANE_C, LaneModel(model="n", latencies=(0.1,))))
    commands = dispatcher.handle(Arrived(request(1), (request(2), request(3, model="n"), request(4, model="?"))), 0.0)
    dispatcher.invariants()
    assert sorted(runs(commands)) == [[1], [2], [3]] and ends(commands) == {4: Outcome.REJECTED}


def test_request_that_arrives_with_others_expires_by_its_own_deadline() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(1))
    commands = dispatcher.handle(Arrived(request(2, within=0.09), (request(3, within=0.05),)), 0.0)
    assert [command.time for command in commands if isinstance(command, WakeAt)] == [0.09, 0.05]


class Story:
    """Plays random events against a dispatcher and remembers what became of every request."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        self.now = 0.0
        self.running: dict[LaneId, int] = {}
        self.arrived: set[int] = set()
        self.replied: dict[int, Outcome] = {}
        self.log: list[tuple[float, Event, list[Command]]] = []
        self.part_of: dict[int, int] = {}
        self.rows: dict[int, int] = {}  # of requests and parts that were not split
        self.largest = {spec.id: max(len(model.latencies) for model in spec.models) for spec in LANES}

    def whole_of(self, id: int) -> int:
        return self.part_of.get(id, id)

    def feed(self, event: Event) -> None:
        commands = self.dispatcher.handle(event, self.now)
        self.dispatcher.invariants()
        self.log.append((self.now, event, commands))
        if isinstance(event, Died):
            self.running.pop(event.lane, None)
        if isinstance(event, Arrived):
            self.rows.update((arrived.id, arrived.size) for arrived in (event.request, *event.others))
        for command in commands:
            match command:
                case Run(lane_id, batch, _, requests):
                    assert lane_id not in self.running, "two batches in flight on one lane"
                    assert requests
                    assert all(self.whole_of(r.id) not in self.replied for r in requests), "ran after it ended"
                    assert sum(r.size for r in requests) <= self.largest[lane_id]
                    self.running[lane_id] = batch
                case Reply(requests):
                    for ended in requests:
                        assert ended.id not in self.replied, "ended twice"
                        self.replied[ended.id] = command.outcome
                case WakeAt(_, time):
                    assert time >= self.now or math.isclose(time, self.now)
                case Drained(lane_id):
                    assert lane_id not in self.running
                case Split(split, parts):
                    assert self.whole_of(split) not in self.replied, "split after it ended"
                    self.part_of.update((part.id, self.whole_of(split)) for part in parts)
                    rows = self.rows.pop(split, None)
                    assert rows is None or rows == sum(part.size for part in parts), "rows were lost"
                    self.rows.update((part.id, part.size) for part in parts)


LANES = (
    lane(LANE_A, LaneModel(model="m", latencies=linear(4))),
    lane(LANE_B, LaneModel(model="m", latencies=linear(2, fixed=0.02)), LaneModel(model="n", latencies=linear(8))),
    lane(
        LANE_C,
        LaneModel(model="n", latencies=linear(3), max_queue_delay=0.01),
        LaneModel(model="m", latencies=linear(3)),
    ),
)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.integers(0, 40),
    st.integers(0, 20),
    st.floats(0.0, 0.01),
    st.floats(0.005, 0.2),
)
def test_dispatcher_room_is_how_many_requests_are_admitted(
    batches: list[int], own: int, others: int, now: float, within: float
) -> None:
    """Lanes are busy. Where other models share them, a request may go before its turn, and more are admitted."""
    models = [LaneModel(model="n", latencies=linear(3))] if others else []
    specs = [
        lane(LaneId(DeviceId("cpu"), slot), LaneModel(model="m", latencies=linear(batch)), *models)
        for slot, batch in enumerate(batches)
    ]
    dispatcher = started(*specs)
    arrive(dispatcher, 0.0, *(request(n, within=0.05) for n in range(len(batches) + own)))
    arrive(dispatcher, 0.0, *(request(1000 + n, model="n", within=0.05) for n in range(others)))
    deadline = now + 0.05 + within
    room, finish = dispatcher.room("m", deadline, now)
    asked = [Request(5000 + n, "m", now, deadline) for n in range(max(room, 0) + 2)]
    rejected = ends(dispatcher.handle(Arrived(asked[0], tuple(asked[1:])), now))
    if others:
        assert room == -1 or len(asked) - len(rejected) >= room
    else:
        assert len(asked) - len(rejected) == room
        assert (finish <= deadline) == (room > 0)


def test_dispatcher_room_of_urgent_requests_is_not_that_behind_others() -> None:
    dispatcher = started(A)
    arrive(dispatcher, 0.0, request(0), *(request(1 + n, within=1.0, priority=1) for n in range(40)))
    room, _ = dispatcher.room("m", 0.1, 0.0)
    asked = [request(100 + n) for n in range(room + 1)]
    assert room > 0 and list(ends(arrive(dispatcher, 0.0, *asked))) == [100 + room]


def test_dispatcher_room_is_unknown_without_a_lane() -> None:
    assert started(A).room("other", 1.0, 0.0)[0] == -1
    dispatcher = started(A)
    dispatcher.handle(Died(LANE_A, "killed"), 0.0)
    assert dispatcher.room("m", 1.0, 0.0)[0] == -1


def smaller(spec: LaneSpec, batch: int) -> LaneSpec:
    """The same lane with batches of no more rows."""
    models = tuple(msgspec.structs.replace(model, latencies=model.latencies[:batch]) for model in spec.models)
    return LaneSpec(id=spec.id, models=models)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive"] * 8
            + ["together"] * 3
            + ["finish"] * 5
            + ["wake"] * 3
            + ["cancel", "die", "restarting", "ready", "fail", "bad", "apply", "smaller", "stale", "hang"]
        ),
        st.integers(0, 10**6),
        st.floats(0, 0.02),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_dispatcher_over_random_events_ends_every_request_once(steps: list[tuple[str, int, float]]) -> None:
    story = Story()
    story.feed(Applied(LANES))
    for step, (what, pick, wait) in enumerate(steps):
        story.now += wait
        running = sorted(story.running)
        lane_id = LANES[pick % 3].id
        size = 1 + pick % 3 if pick % 5 else 1 + pick % 31
        match what:
            case "arrive":
                model = "mn"[pick % 2]
                asked = Request(step, model, story.now, story.now + (pick % 297) / 1000, size, pick // 7 % 2)
                story.arrived.add(step)
                hopeless = story.dispatcher.late_finish(model, asked.deadline, story.now) > asked.deadline
                waiting = [r for lane in story.dispatcher.lanes.values() for q in lane.queue_list for r in q.waiting]
                last = all(r.deadline <= asked.deadline for r in waiting if r.model == model and not r.priority)
                story.feed(Arrived(asked))
                if asked.size == 1 and asked.priority == 0:
                    _, _, commands = story.log[-1]
                    reasons = [c.reason for c in commands if isinstance(c, Reply) and asked in c.requests]
                    assert hopeless or reasons != [words.TOO_LATE]
                    if hopeless and reasons != [words.TOO_LATE]:
                        assert not last, "it was taken only because it is more urgent than another"
            case "together":
                ids = [1000 + 10 * step + number for number in range(2 + pick % 4)]
                story.arrived.update(ids)
                model, within = "mn"[pick % 2], pick % 297 / 1000
                first, *others = [Request(n, model, story.now, story.now + within, size, n % 2) for n in ids]
                story.feed(Arrived(first, tuple(others)))
            case "finish" | "fail" | "bad" if running:
                done = running[pick % len(running)]
                batch = story.running.pop(done)
                if what == "fail":
                    story.feed(Failed(done, batch, "broken"))
                else:
                    ran = next(c for _, _, cs in story.log for c in cs if isinstance(c, Run) and c.batch == batch)
                    bad = tuple((r.id, "bad") for i, r in enumerate(ran.requests) if what == "bad" and pick >> i & 1)
                    story.feed(Finished(done, batch, bad))
            case "wake":
                due = story.dispatcher.lanes[lane_id].wake if lane_id in story.dispatcher.lanes else math.inf
                if due < math.inf:
                    story.now = max(story.now, due) if pick % 3 else story.now
                    story.feed(Woke(lane_id, due))
            case "cancel" if story.arrived:
                story.feed(Cancelled(sorted(story.arrived)[pick % len(story.arrived)]))
            case "die":
                story.feed(Died(lane_id, "killed"))
            case "restarting":
                story.feed(Restarting(lane_id, story.now + pick % 100 / 1000))
            case "ready":
                if not (lane_id in story.dispatcher.lanes and story.dispatcher.lanes[lane_id].up):
                    story.feed(Ready(lane_id))
            case "apply":
                story.feed(Applied(tuple(spec for i, spec in enumerate(LANES) if pick >> i & 1)))
            case "smaller":
                story.feed(Applied(tuple(smaller(spec, 1 + pick % 4) for spec in LANES)))
            case "stale":
                story.feed(Finished(lane_id, -1))
            case "hang":
                due = story.dispatcher.lanes[lane_id].wake if lane_id in story.dispatcher.lanes else math.inf
                story.now += 1.2  # beyond the grace of every request
                if due < math.inf:
                    story.feed(Woke(lane_id, due))
            case _:
                pass
    # Everything that is still held ends once its lanes come to rest.
    for _ in range(len(steps) + 3):
        story.now += 1.0
        for done in sorted(story.running):
            story.feed(Finished(done, story.running.pop(done)))
        for spec in LANES:
            if spec.id in story.dispatcher.lanes and story.dispatcher.lanes[spec.id].wake < math.inf:
                story.feed(Woke(spec.id, story.dispatcher.lanes[spec.id].wake))
    assert story.replied.keys() == story.arrived

    # A log replays exactly.
    replayed = replay(log_line(*entry) for entry in story.log)
    assert replayed.difference == ""
    assert sum(replayed.outcomes.values()) == len(story.arrived)
