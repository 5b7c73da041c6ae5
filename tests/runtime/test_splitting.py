"""Requests with more rows than a batch takes: where their parts run, and how they end.

Batches of n rows take 10 + n ms.
"""

from __future__ import annotations

import pytest

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime import dispatcher as words
from cotenant.runtime.applications import Applications
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    Applied,
    Arrived,
    Cancelled,
    Command,
    Died,
    Event,
    Failed,
    Finished,
    LaneModel,
    LaneSpec,
    Ready,
    Reply,
    Run,
    Split,
    WakeAt,
    Woke,
)
from tests.runtime.test_dispatcher import LANE_A, LANE_B, lane, linear, request


class Told:
    """A dispatcher whose invariants hold after every event, and all that it said."""

    def __init__(self, *specs: LaneSpec) -> None:
        self.dispatcher = Dispatcher()
        self.commands: list[Command] = []
        self.feed(Applied(specs), 0.0)
        for spec in specs:
            self.feed(Ready(spec.id), 0.0)

    def feed(self, event: Event, now: float) -> list[Command]:
        commands = self.dispatcher.handle(event, now)
        self.dispatcher.invariants()
        self.commands += commands
        return commands

    def arrive(self, now: float, *requests: Request) -> list[Command]:
        return [command for it in requests for command in self.feed(Arrived(it), now)]

    def finish(self, now: float, id: LaneId = LANE_A, **more: object) -> list[Command]:
        batch = self.dispatcher.lanes[id].batch
        assert batch is not None
        return self.feed(Finished(id, batch.id, **more), now)  # type: ignore[arg-type]

    def ran(self) -> list[tuple[LaneId, list[int]]]:
        return [(it.lane, [r.size for r in it.requests]) for it in self.commands if isinstance(it, Run)]

    def ends(self) -> list[tuple[int, Outcome, str]]:
        return [(r.id, it.outcome, it.reason) for it in self.commands if isinstance(it, Reply) for r in it.requests]


def of(*batches: int, name: str = "m") -> tuple[LaneSpec, ...]:
    """Lanes of one model with these largest batches."""
    return tuple(
        lane(LaneId(DeviceId("cpu"), slot), LaneModel(model=name, latencies=linear(batch)))
        for slot, batch in enumerate(batches)
    )


SERVED = [(1, Outcome.SERVED, "")]


def test_large_request_runs_in_full_batches_and_ends_once() -> None:
    told = Told(*of(4))
    split = told.arrive(0.0, request(1, size=9, within=1.0))[0]
    assert isinstance(split, Split)
    assert (split.request, [part.size for part in split.parts]) == (1, [4, 4, 1])
    for n in (1, 2, 3):
        assert told.ends() == []
        told.finish(n * 0.014)
    assert told.ran() == [(LANE_A, [4]), (LANE_A, [4]), (LANE_A, [1])]
    assert told.ends() == SERVED
    (reply,) = [it for it in told.commands if isinstance(it, Reply)]
    assert reply.started == 0.0, "it waited until its first row ran"


def test_large_request_is_spread_over_lanes() -> None:
    told = Told(*of(4, 2))
    told.arrive(0.0, request(1, size=8, within=1.0))
    assert told.ran() == [(LANE_B, [2]), (LANE_A, [4])]
    told.finish(0.012, LANE_B)
    assert told.ran()[2:] == [(LANE_B, [2])]
    told.finish(0.014)
    told.finish(0.024, LANE_B)
    assert told.ends() == SERVED


def test_request_that_fits_a_lane_stays_whole_unless_that_is_too_late() -> None:
    told = Told(*of(4, 2))
    told.arrive(0.0, request(1, size=4, within=0.020))
    assert told.ran() == [(LANE_A, [4])]
    told.arrive(0.0, request(2, size=4, within=0.026))  # on the first lane it would end after 28 ms
    assert told.ran()[1:] == [(LANE_B, [2])]
    told.finish(0.012, LANE_B)
    told.finish(0.014)
    told.finish(0.024, LANE_B)
    assert sorted(told.ends()) == [(1, Outcome.SERVED, ""), (2, Outcome.SERVED, "")]


@pytest.mark.parametrize(("within", "admitted"), [(0.0421, True), (0.0419, False)])
def test_all_parts_must_make_the_deadline(within: float, admitted: bool) -> None:
    """Three full batches take 42 ms."""
    told = Told(*of(4))
    told.arrive(0.0, request(1, size=12, within=within))
    assert bool(told.ran()) is admitted
    if not admitted:
        assert told.ends() == [(1, Outcome.REJECTED, words.TOO_LATE)]
        assert not any(isinstance(it, Split | WakeAt) for it in told.commands), "nothing of it is left"


def test_parts_fill_up_the_batches_of_other_requests() -> None:
    """As many batches as if each row were a request of its own."""
    told = Told(*of(4))
    told.arrive(0.0, request(0), *(request(n, within=1.0) for n in (1, 2, 3)), request(4, size=6, within=2.0))
    told.arrive(0.0, *(request(n, within=3.0) for n in (5, 6, 7)))
    for n in range(1, 5):
        told.finish(n * 0.014)
    assert [rows for _, rows in told.ran()] == [[1], [1, 1, 1, 1], [3, 1], [1, 1, 1, 1]]
    assert sorted(n for n, _, _ in told.ends()) == list(range(8))


def test_batch_is_not_filled_up_beyond_its_earliest_deadline() -> None:
    told = Told(*of(4))
    told.arrive(0.0, request(0), request(1, within=0.0262), request(2, size=4, within=1.0, priority=1))
    told.feed(Applied(of(3)), 0.001)
    told.feed(Applied(of(4)), 0.002)
    told.finish(0.0130)  # 13.2 ms are left for request 1: enough for two rows
    assert told.ran()[1:] == [(LANE_A, [1, 1])]


def test_batch_is_not_held_back_while_more_rows_wait_than_it_takes() -> None:
    held = lane(LANE_A, LaneModel(model="m", latencies=linear(4), max_queue_delay=0.5))
    told = Told(held)
    told.arrive(0.0, request(1, size=9, within=5.0))
    told.finish(0.014)
    assert [rows for _, rows in told.ran()] == [[4], [4]]
    told.finish(0.028)
    assert len(told.ran()) == 2, "the last row waits for more"


def test_failed_part_ends_the_request_and_withdraws_the_others() -> None:
    told = Told(*of(4, 4))
    told.arrive(0.0, request(1, size=20, within=1.0), request(2, within=1.0))
    batch = told.dispatcher.lanes[LANE_A].batch
    assert batch is not None
    told.feed(Failed(LANE_A, batch.id, "no such row"), 0.01)
    assert told.ends() == [(1, Outcome.FAILED, "no such row")]
    told.finish(0.014, LANE_B)
    assert told.ends() == [(1, Outcome.FAILED, "no such row")]
    assert sum(len(queue.waiting) for it in told.dispatcher.lanes.values() for queue in it.queues.values()) == 0


def test_bad_part_costs_the_requests_of_its_batch_nothing() -> None:
    told = Told(*of(4))
    told.arrive(0.0, request(0), request(1, size=5, within=1.0), request(2, within=1.0))
    told.finish(0.011)
    (*_, run) = [it for it in told.commands if isinstance(it, Run)]
    told.finish(0.025)
    (*_, run) = [it for it in told.commands if isinstance(it, Run)]
    assert [r.size for r in run.requests] == [1, 1]
    told.finish(0.039, failed=((run.requests[0].id, "no such row"),))
    assert told.ends()[1:] == [(1, Outcome.FAILED, "no such row"), (2, Outcome.SERVED, "")]


def test_two_bad_parts_in_one_batch_end_their_request_once() -> None:
    told = Told(*of(4))
    told.arrive(0.0, request(0), request(9, size=3, within=1.0), request(1, size=6, within=2.0))
    told.feed(Applied(of(2)), 0.001)
    told.feed(Applied(of(4)), 0.002)
    told.finish(0.011)
    told.finish(0.025)
    run = [it for it in told.commands if isinstance(it, Run)][-1]
    assert len(run.requests) > 1 and len({r.deadline for r in run.requests}) == 1
    told.finish(0.039, failed=tuple((r.id, "bad") for r in run.requests))
    assert told.ends()[-1] == (1, Outcome.FAILED, "bad")


def test_caller_that_leaves_cancels_all_parts() -> None:
    told = Told(*of(2, 2))
    told.arrive(0.0, request(1, size=9, within=1.0))
    told.feed(Cancelled(1), 0.001)
    assert told.ends() == [(1, Outcome.CANCELLED, words.LEFT)]
    assert told.feed(Cancelled(1), 0.002) == []
    told.finish(0.012)
    told.finish(0.012, LANE_B)
    assert len(told.ran()) == 2 and len(told.ends()) == 1


def test_part_that_expires_ends_the_request() -> None:
    told = Told(*of(2))
    told.arrive(0.0, request(1, size=4, within=0.030))
    told.feed(Woke(LANE_A, 0.030), 0.030)  # the first batch should have ended long ago
    assert told.ends() == [(1, Outcome.EXPIRED, words.PASSED)]
    told.finish(0.040)
    assert len(told.ran()) == 1 and len(told.ends()) == 1


def test_part_lost_with_its_worker_is_retried_alone() -> None:
    told = Told(*of(4, 2))
    told.arrive(0.0, request(1, size=6, within=1.0))
    assert told.ran() == [(LANE_B, [2]), (LANE_A, [4])]
    told.feed(Died(LANE_A, "killed"), 0.005)
    told.finish(0.012, LANE_B)
    told.finish(0.024, LANE_B)
    assert told.ran()[2:] == [(LANE_B, [2]), (LANE_B, [2])]
    told.feed(Died(LANE_B, "killed"), 0.030)
    assert told.ends() == [(1, Outcome.FAILED, words.DIED_TWICE)]


def test_request_lost_with_its_worker_is_split_for_a_smaller_lane() -> None:
    told = Told(*of(4, 3))
    told.arrive(0.0, request(1, size=4, within=1.0))
    told.feed(Died(LANE_A, "killed"), 0.005)
    told.finish(0.018, LANE_B)
    told.finish(0.030, LANE_B)
    assert told.ran() == [(LANE_A, [4]), (LANE_B, [3]), (LANE_B, [1])]
    assert told.ends() == SERVED


def test_parts_of_a_request_that_was_lost_once_are_not_retried_again() -> None:
    told = Told(*of(4, 3))
    told.arrive(0.0, request(1, size=4, within=1.0))
    told.feed(Died(LANE_A, "killed"), 0.005)
    told.feed(Died(LANE_B, "killed"), 0.006)
    assert told.ends() == [(1, Outcome.FAILED, words.DIED_TWICE)]


def test_part_lost_twice_ends_those_lost_with_it() -> None:
    told = Told(*of(4, 2))
    told.arrive(0.0, request(1, size=7, within=1.0))  # the second lane runs two rows, and one waits there
    told.feed(Died(LANE_B, "killed"), 0.002)
    told.finish(0.014)
    assert told.ran() == [(LANE_B, [2]), (LANE_A, [4]), (LANE_A, [2, 1])]
    told.feed(Died(LANE_A, "killed"), 0.015)  # for the two rows it is the second time, for the other one the first
    assert told.ends() == [(1, Outcome.FAILED, words.DIED_TWICE)]


def test_waiting_request_is_split_for_the_batches_of_the_next_plan() -> None:
    told = Told(*of(4))
    told.arrive(0.0, request(0), request(1, size=3, within=1.0))
    told.feed(Applied(of(2)), 0.001)
    told.finish(0.011)
    told.finish(0.023)
    told.finish(0.034)
    assert [rows for _, rows in told.ran()] == [[1], [2], [1]]
    assert [n for n, _, _ in told.ends()] == [0, 1]


def test_request_waits_in_parts_for_the_only_worker() -> None:
    told = Told(*of(4))
    told.arrive(0.0, request(1, size=3, within=1.0))
    told.feed(Applied(of(2)), 0.001)
    told.feed(Died(LANE_A, "killed"), 0.002)
    told.feed(Ready(LANE_A), 0.1)
    told.finish(0.112)
    told.finish(0.123)
    assert [rows for _, rows in told.ran()] == [[3], [2], [1]]
    assert told.ends() == SERVED


def test_hanging_batch_expires_the_request_with_all_its_parts() -> None:
    told = Told(*of(2, 2))
    told.arrive(0.0, request(1, size=4, within=0.5))
    told.finish(0.012)
    due = told.dispatcher.lanes[LANE_B].wake
    told.feed(Woke(LANE_B, due), due)
    if not told.ends():
        due = told.dispatcher.lanes[LANE_B].wake
        told.feed(Woke(LANE_B, due), due)
    assert told.ends() == [(1, Outcome.EXPIRED, words.OVERDUE)]


def test_application_stage_may_be_larger_than_its_batch() -> None:
    from cotenant.core.application import Application, Stage
    from cotenant.runtime.applications import application_specs

    app = Application(name="app", slo=1.0, stages=(Stage(name="a", model="m"),))
    dispatcher = Dispatcher()
    wrapped = Applications(dispatcher.handle, specs=application_specs([app], {"app": {"a": 1.0}}))
    wrapped.handle(Applied(of(2)), 0.0)
    wrapped.handle(Ready(LANE_A), 0.0)
    commands = wrapped.handle(Arrived(Request(1, "app", 0.0, 1.0, 3)), 0.0)
    assert [type(it).__name__ for it in commands] == ["Spawn", "Split", "Run", "WakeAt"]
    commands = wrapped.handle(Finished(LANE_A, 1), 0.012) + wrapped.handle(Finished(LANE_A, 2), 0.024)
    wrapped.invariants()
    assert [r.id for it in commands if isinstance(it, Reply) for r in it.requests] == [-1, 1]


def test_enormous_request_is_judged_at_once() -> None:
    """The search ends at the first part that is late, however many there would be."""
    told = Told(*of(1))
    told.arrive(0.0, request(1, size=10**9, within=0.1))
    assert told.ends() == [(1, Outcome.REJECTED, words.TOO_LATE)]
