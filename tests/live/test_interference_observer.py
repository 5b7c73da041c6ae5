from __future__ import annotations

import pytest

from cotenant.core.identity import DeviceId, LaneId
from cotenant.live.interference_observer import MIN_BATCHES, InterferenceObserver
from cotenant.predictors import Load

LANE_A, LANE_B, LANE_C, LANE_D = (LaneId(DeviceId("cpu"), slot) for slot in range(4))

A, B, C = Load("a", "k", 4, 500), Load("b", "k", 1, 250), Load("c", "k", 2, 250)


def test_batch_with_a_busy_colocated_lane_is_a_sample() -> None:
    """b runs three batches while a runs one."""
    beside = InterferenceObserver()
    for i in range(MIN_BATCHES + 1):
        for part in range(3):
            began = 3.0 * i + part
            beside.ran(LANE_B, B, since=began, now=began + 0.98, alone=0.7, others={LANE_A: 3.0 * i})
        beside.ran(LANE_A, A, since=3.0 * i, now=3.0 * i + 3, alone=2.0, others={LANE_B: None})
    found = {sample.victim: sample for sample in beside.samples()}
    assert found.keys() == {A, B}
    assert found[A].colocated == (B,) and found[B].colocated == (A,)
    assert (found[A].alone, found[A].together) == (2.0, 3.0)
    assert found[B].slowdown == pytest.approx(1.4)


def test_batch_with_a_partly_busy_colocated_lane_is_no_sample() -> None:
    beside = InterferenceObserver()
    for i in range(2 * MIN_BATCHES):
        beside.ran(LANE_B, B, since=i, now=i + 0.5, alone=0.5, others={LANE_A: None})
        beside.ran(LANE_A, A, since=i, now=i + 1, alone=0.5, others={LANE_B: None})
        beside.ran(LANE_A, A, since=i, now=i + 1, alone=0.5, others={LANE_B: i + 0.8, LANE_C: None})
    assert [sample.victim for sample in beside.samples()] == []


def test_idle_lanes_are_left_out_and_busy_ones_ordered() -> None:
    beside = InterferenceObserver()
    beside.ran(LANE_C, C, since=0.0, now=0.1, alone=0.1, others={})
    beside.ran(LANE_B, B, since=0.0, now=0.1, alone=0.1, others={})
    for i in range(1, MIN_BATCHES + 1):
        for others in ({LANE_B: 0.2, LANE_C: 0.2, LANE_D: None}, {LANE_C: 0.2, LANE_D: None, LANE_B: 0.2}):
            beside.ran(LANE_A, A, since=i, now=i + 1.5, alone=1.0, others=others)
    (sample,) = beside.samples()
    assert sample.colocated == (B, C)


def test_combination_seen_too_rarely_is_no_sample() -> None:
    beside = InterferenceObserver()
    beside.ran(LANE_B, B, since=0.0, now=0.1, alone=0.1, others={})
    for i in range(1, MIN_BATCHES):
        beside.ran(LANE_A, A, since=i, now=i + 1, alone=0.5, others={LANE_B: 0.2})
    assert beside.samples() == []
    beside.ran(LANE_A, A, since=MIN_BATCHES, now=MIN_BATCHES + 1, alone=0.5, others={LANE_B: 0.2})
    assert len(beside.samples()) == 1


def test_too_many_combinations_forget_the_rarest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.live.interference_observer.MAX_COMBINATIONS", 8)
    beside = InterferenceObserver()
    beside.ran(LANE_B, B, since=0.0, now=0.1, alone=0.1, others={})
    for i in range(1, MIN_BATCHES + 1):
        beside.ran(LANE_A, A, since=i, now=i + 1, alone=0.5, others={LANE_B: 0.2})
    for rows in range(1, 100):
        beside.ran(LANE_A, Load("a", "k", rows, 500), since=0.3, now=0.4, alone=0.1, others={LANE_B: 0.2})
    (sample,) = beside.samples()
    assert (sample.victim, sample.colocated) == (A, (B,))
    assert len(beside._together) <= 8


def test_batch_that_was_lent_more_than_its_share_is_no_sample_nor_is_one_beside_it() -> None:
    beside = InterferenceObserver()
    for i in range(2 * MIN_BATCHES):
        beside.ran(LANE_B, B, since=i, now=i + 0.5, alone=0.5, others={LANE_A: i - 0.5}, unlike_planned=True)
        beside.ran(LANE_A, A, since=i, now=i + 1, alone=0.5, others={LANE_B: i + 0.5})
    assert beside.samples() == []
    for i in range(10 * MIN_BATCHES, 11 * MIN_BATCHES):  # all as before, on its share
        beside.ran(LANE_B, B, since=i, now=i + 0.5, alone=0.5, others={LANE_A: i - 0.5})
        beside.ran(LANE_A, A, since=i, now=i + 1, alone=0.5, others={LANE_B: i + 0.5})
    assert {sample.victim for sample in beside.samples()} == {A, B}
