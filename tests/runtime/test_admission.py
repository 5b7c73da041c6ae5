"""When a request would be done, by hand: a batch of n rows takes 10 + n ms, and eight rows are the largest."""

from __future__ import annotations

import pytest

from cotenant.runtime.admission import finish_time
from cotenant.runtime.lane import Batch, Lane
from tests.runtime.queues import LATENCIES, lane_of, push, request

FULL = LATENCIES[-1]


def shared(*, waiting: int = 0) -> Lane:
    """A lane of `m`, whose queue is empty, and `n`, for which so many rows wait."""
    lane = lane_of("m", "n")
    push(lane.queues["n"], *(request(number, 9.0, model="n") for number in range(waiting)))
    return lane


def running(lane: Lane, model: str, free_at: float) -> Lane:
    lane.batch = Batch(1, lane.queues[model], (), 1, 0.0)
    lane.free_at = free_at
    return lane


def finish(lane: Lane, rows: int, now: float = 0.0) -> float:
    return finish_time(lane.queues["m"], rows, now)


@pytest.mark.parametrize(("rows", "seconds"), [(3, LATENCIES[2]), (8, FULL), (9, 2 * FULL), (17, 3 * FULL)])
def test_finish_time_idle_lane_is_its_rounds(rows: int, seconds: float) -> None:
    assert finish(shared(), rows, now=1.0) == pytest.approx(1.0 + seconds)


def test_finish_time_busy_lane_starts_when_it_is_free_and_counts_a_full_batch() -> None:
    assert finish(running(shared(), "m", 0.050), 1) == pytest.approx(0.050 + FULL)
    assert finish(running(shared(), "m", 0.050), 1, now=0.070) == pytest.approx(0.070 + FULL)  # it is late


@pytest.mark.parametrize(
    ("waiting", "rows", "others"),
    [
        (3, 1, LATENCIES[2]),  # what waits, all of it
        (20, 1, FULL),  # one batch of the other before the own one
        (20, 9, 2 * FULL),  # two rounds, two batches
        (11, 9, FULL + LATENCIES[2]),  # two rounds, a full batch and the rest
    ],
)
def test_finish_time_other_model_waiting_has_a_batch_in_each_round(waiting: int, rows: int, others: float) -> None:
    own = LATENCIES[0] if rows == 1 else 2 * FULL
    assert finish(shared(waiting=waiting), rows) == pytest.approx(own + others)


def test_finish_time_other_model_running_has_a_batch_less() -> None:
    assert finish(running(shared(waiting=20), "n", 0.050), 1) == pytest.approx(0.050 + FULL)
    assert finish(running(shared(waiting=20), "m", 0.050), 1) == pytest.approx(0.050 + FULL + FULL)


def test_finish_time_several_rounds_count_what_others_were_seen_to_run_between() -> None:
    lane = shared(waiting=4)
    lane.queues["m"].others_between = 0.015
    assert finish(lane, 17) == pytest.approx(3 * FULL + LATENCIES[3] + 0.015)
    lane.queues["m"].others_between = 0.0
    assert finish(lane, 17) == pytest.approx(3 * FULL + LATENCIES[3])
