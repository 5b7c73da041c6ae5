from __future__ import annotations

from typing import Any, cast

import pytest

from cotenant.core.identity import LaneId
from cotenant.live.interference_observer import MIN_BATCHES
from cotenant.live.serving_observer import ServingObserver, _LaneFacts
from cotenant.live.serving_state import ServingState
from cotenant.live.statistics import ModelCounts
from cotenant.worker.wire import Timing


def test_all_lanes_of_a_device_warm_up_with_one_until_it_has_said_so_no_more() -> None:
    lanes = [LaneId.parse(lane) for lane in ("gpu-0/0", "gpu-0/1", "gpu-1/0")]
    state = ServingState(cast(Any, None))
    state.lanes = {lane: cast(Any, None) for lane in lanes}
    observer = ServingObserver(state, lambda lane: None)
    observer.models["a"] = ModelCounts("a", "1")
    for warming_up, expected in ((False, []), (True, lanes[:2]), (False, [])):
        timing = Timing(0, 0, 0, 0, 0, 0, warming_up=warming_up)
        observer.ran(lanes[1], "a", 1, 0.0, 0.1, timing)
        assert observer.take_warming_up() == expected
        assert observer.take_warming_up() == []


@pytest.mark.parametrize("warming_up", [True, False])
def test_batches_beside_a_worker_that_warms_up_say_nothing_of_interference(
    monkeypatch: pytest.MonkeyPatch, warming_up: bool
) -> None:
    lanes = [LaneId.parse(lane) for lane in ("gpu-0/0", "gpu-0/1", "gpu-0/2")]
    state = ServingState(cast(Any, None))
    state.lanes = {lane: cast(Any, None) for lane in lanes}
    observer = ServingObserver(state, lambda lane: None)
    facts = {
        lane: _LaneFacts(observer.partitions.of(lane), 500, tuple(set(lanes) - {lane}), {}, {"a": (1.0,)})
        for lane in lanes
    }
    monkeypatch.setattr(observer, "_facts", facts.get)
    observer.models["a"] = ModelCounts("a", "1")
    for begun in range(2 * MIN_BATCHES):
        for lane in lanes:
            timing = Timing(0, 0, 0, 0, 0, 0, warming_up=warming_up and lane == lanes[1])
            observer.ran(lane, "a", 1, begun, begun + 1.0, timing)
    assert [sample.victim.model for sample in observer.samples()] == ([] if warming_up else ["a", "a"])


def test_lanes_of_plans_before_the_last_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ServingState(cast(Any, None))
    observer = ServingObserver(state, lambda lane: None)

    def facts(lane: LaneId) -> _LaneFacts:
        return _LaneFacts(observer.partitions.of(lane), 500, tuple(set(state.lanes) - {lane}), {}, {"a": (1.0,)})

    monkeypatch.setattr(observer, "_read_facts", facts)
    counts = observer.models["a"] = ModelCounts("a", "1")
    plans = [[LaneId.parse(f"gpu-0/{slot}") for slot in (2 * number, 2 * number + 1)] for number in range(10)]
    for lanes in plans:
        state.lanes = {lane: cast(Any, None) for lane in lanes}
        for lane in lanes:
            observer.ran(lane, "a", 1, 0.0, 1.0, Timing(0, 0, 0, 0, 0, 0))
    known = {*plans[-2], *plans[-1]}  # the lanes of the one before may still drain
    interference = observer._interference
    assert counts._timings.keys() == interference._ended.keys() == interference._last.keys() == known
