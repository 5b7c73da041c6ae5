"""What a server tells of its admission rebuilds lanes that predict the same."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.application import Fixed
from cotenant.core.identity import DeviceId, LaneId, decode_identity
from cotenant.core.request import Request
from cotenant.runtime.admission import finish_time
from cotenant.runtime.admission_state import (
    FOREVER,
    LaneState,
    ModelTarget,
    RunningBatch,
    model_targets,
    read_lane,
    restore_lane,
)
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import ApplicationSpec, Applied, Arrived, Died, LaneModel, LaneSpec, Ready, StageSpec
from cotenant.runtime.lane import Lane
from cotenant.runtime.turns import next_queue, runs_in_time_before_its_turn

NAMES = ("m", "n")
SPEC = LaneSpec(
    id=LaneId(DeviceId("cpu"), 0),
    models=tuple(
        LaneModel(model=name, latencies=tuple(base + 0.002 * rows for rows in range(1, 5)))
        for name, base in zip(NAMES, (0.01, 0.03), strict=True)
    ),
)
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 0.05), st.sampled_from(NAMES), st.floats(0.05, 1), st.integers(1, 3), st.integers(0, 1)),
    max_size=12,
)


def lane_after(arrivals: list[tuple[float, str, float, int, int]]) -> tuple[Lane, float]:
    dispatcher = Dispatcher()
    dispatcher.handle(Applied((SPEC,)), 0.0)
    dispatcher.handle(Ready(SPEC.id), 0.0)
    now = 0.0
    for number, (pause, model, within, size, priority) in enumerate(arrivals):
        now += pause
        dispatcher.handle(Arrived(Request(number, model, now, now + within, size, priority)), now)
    lane = dispatcher.lanes[SPEC.id]
    for queue in lane.queue_list:  # what it has learnt from batches before
        queue.observe(0.010, 0.013)
        queue.waited(0.02)
    return lane, now


def sent(state: LaneState) -> LaneState:
    return msgspec.json.decode(msgspec.json.encode(state, enc_hook=str), type=LaneState, dec_hook=decode_identity)


@given(ARRIVALS, st.floats(0, 0.2))
def test_restored_lane_predicts_what_the_lane_does(
    arrivals: list[tuple[float, str, float, int, int]], later: float
) -> None:
    lane, now = lane_after(arrivals)
    other = 1000.0  # the other process' clock
    restored = restore_lane(sent(read_lane(lane, now)), other)
    for name in NAMES:
        ours, theirs = restored.queues[name], lane.queues[name]
        assert ours.rows == theirs.rows
        for rows in (ours.rows + 1, ours.rows + 5):
            at = finish_time(theirs, rows, now + later) - now
            assert finish_time(ours, rows, other + later) - other == pytest.approx(at, abs=1e-9)
        for due in (0.02, 0.1, 1.0):
            assert runs_in_time_before_its_turn(
                ours, ours.rows + 1, other + due, other
            ) == runs_in_time_before_its_turn(theirs, theirs.rows + 1, now + due, now)
        assert ours.ahead(0, other + 0.3) == theirs.ahead(0, now + 0.3)
    ours_next, count, rows, _ = next_queue(restored, other + later)
    theirs_next, *numbers, _ = next_queue(lane, now + later)
    assert (ours_next and ours_next.model, count, rows) == (theirs_next and theirs_next.model, *numbers)


def test_read_lane_of_a_worker_that_comes_back_tells_when() -> None:
    dispatcher = Dispatcher()
    dispatcher.handle(Applied((SPEC,)), 0.0)
    dispatcher.handle(Ready(SPEC.id), 0.0)
    dispatcher.handle(Died(SPEC.id, "killed", back={SPEC.id: 3.0}), 1.0)
    state = sent(read_lane(dispatcher.lanes[SPEC.id], 1.0))
    assert state.free_in == pytest.approx(2.0)
    restored = restore_lane(state, 10.0)
    assert not restored.available and restored.takes_requests(12.0) and restored.next_start(10.0) == pytest.approx(12)


def test_read_lane_of_a_dead_worker_takes_no_requests() -> None:
    dispatcher = Dispatcher()
    dispatcher.handle(Applied((SPEC,)), 0.0)
    state = sent(read_lane(dispatcher.lanes[SPEC.id], 0.0))
    assert state.free_in is None
    assert not restore_lane(state, 10.0).takes_requests(10.0)


def test_restore_lane_with_a_batch_of_a_model_that_is_gone_is_busy_until_then() -> None:
    state = LaneState(id=SPEC.id, free_in=0.5, running=RunningBatch("gone", 3), queues=())
    restored = restore_lane(state, 10.0)
    assert restored.next_start(10.0) == pytest.approx(10.5) and restored.takes_requests(10.0)


def test_read_lane_writes_no_infinity() -> None:
    lane, now = lane_after([(0.0, "m", 1.0, 1, 0), (0.0, "n", 1.0, 1, 0)])
    lane.queues["n"].keep([Request(7, "n", now, math.inf)])
    state = sent(read_lane(lane, now))
    assert state.queues[1].waiting[0].due == FOREVER


def test_model_targets_of_an_application_name_the_stages_that_begin() -> None:
    stages = (
        StageSpec(name="a", model="m", downstream=0.3, fanout=Fixed(1)),
        StageSpec(name="b", model="n", downstream=0.1, fanout=Fixed(1)),
        StageSpec(name="c", model="n", after=(0, 1), fanout=Fixed(1)),
    )
    spec = ApplicationSpec("app", 0.5, stages)
    assert model_targets({"app": 0.5, "m": 0.2}, [spec]) == {
        "app": ModelTarget(timeout=0.5, stages=(("m", 0.3), ("n", 0.1))),
        "m": ModelTarget(timeout=0.2),
    }
