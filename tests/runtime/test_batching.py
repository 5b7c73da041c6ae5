"""The rules that turn a queue into a batch, each at the boundary where it starts to apply."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.request import Request
from cotenant.runtime.batching import drop_requests, held_until, next_batch_size
from cotenant.runtime.lane import Queue
from tests.runtime.queues import LATENCIES, lane_of, push, request


def queue_of(*requests: Request, max_queue_delay: float = 0.0) -> Queue:
    return push(lane_of("m", max_queue_delay=max_queue_delay).queues["m"], *requests)


def ids(requests: list[Request]) -> list[int]:
    return [each.id for each in requests]


def behind(head: Request, count: int) -> Queue:
    """A queue of `head` and `count` requests with a second left."""
    return queue_of(head, *(request(n, 1.0) for n in range(2, 2 + count)))


def test_drop_requests_head_late_even_alone_drops_it_and_those_like_it() -> None:
    queue = queue_of(request(1, 0.0109), request(2, 0.0109), request(3, 0.0111), request(4, 0.020))
    assert ids(drop_requests(queue, 0.0)) == [1, 2]
    assert (ids(queue.waiting), queue.rows) == ([3, 4], 2)


def test_drop_requests_head_just_in_time_alone_keeps_it() -> None:
    queue = queue_of(request(1, LATENCIES[0]))
    assert drop_requests(queue, 0.0) == []
    assert ids(queue.waiting) == [1]


def test_drop_requests_head_of_several_rows_drops_it_by_the_latency_of_its_rows() -> None:
    assert ids(drop_requests(queue_of(request(1, 0.0135, size=4)), 0.0)) == [1]


@pytest.mark.parametrize(
    ("deadline", "dropped"),
    [
        (0.0125, [1]),  # two rows in time, which costs 8 · 12/18 = 5.3 answers and gives 2: to lose the head costs 1
        (0.0165, [1]),  # six rows: 7.1 - 6 = 1.1 is still more than 1
        (0.0175, []),  # seven rows: 7.6 - 7 = 0.6 is less
        (0.0185, []),  # the full batch is in time
    ],
)
def test_drop_requests_full_batch_behind_short_head_drops_it_where_fewer_answers_are_lost(
    deadline: float, dropped: list[int]
) -> None:
    """Nexus' early drop (SOSP 2019, section 4.3). The head could run alone in time: it is not hopeless."""
    queue = behind(request(1, deadline), 8)
    assert ids(drop_requests(queue, 0.0)) == dropped
    assert queue.rows == 9 - len(dropped)


def test_drop_requests_no_full_batch_without_the_head_keeps_it() -> None:
    assert drop_requests(behind(request(1, 0.0125), 7), 0.0) == []


def test_drop_requests_rows_of_unequal_priority_keeps_the_head() -> None:
    """Behind a short head of one priority may stand an earlier deadline of another."""
    queue = queue_of(request(1, 0.0125), *(request(n, 1.0, priority=1) for n in range(2, 10)))
    assert drop_requests(queue, 0.0) == []


def test_next_batch_size_everything_fits_in_time_takes_all() -> None:
    assert next_batch_size(queue_of(request(1, 0.0125), request(2, 0.0125)), 0.0) == (2, 2)


def test_next_batch_size_earliest_deadline_near_stops_before_it_is_missed() -> None:
    assert next_batch_size(queue_of(request(1, 0.0125), *(request(n, 1.0) for n in (2, 3, 4))), 0.0) == (2, 2)


def test_next_batch_size_largest_batch_reached_leaves_the_rest() -> None:
    assert next_batch_size(queue_of(*(request(n, 1.0, size=3) for n in range(3))), 0.0) == (2, 6)


def test_next_batch_size_earlier_deadline_in_lower_priority_counts() -> None:
    """All waits within one batch, in time for the head, too late for the last: it joins no batch that it would miss."""
    queue = queue_of(request(1, 1.0), request(2, 1.0), request(3, 0.0125, priority=1))
    assert queue.unordered
    assert next_batch_size(queue, 0.0) == (2, 2)


WAITING = st.tuples(
    st.sampled_from([0.0115, 0.0145, 0.0175, 0.0185, 1.0]), st.sampled_from([1, 1, 1, 2]), st.integers(0, 1)
)


@given(st.lists(WAITING, min_size=1, max_size=20), st.booleans())
def test_next_batch_size_is_the_first_requests_that_make_it_in_time_together(
    waiting: list[tuple[float, int, int]], ones: bool
) -> None:
    queue = queue_of(
        *(
            request(number, deadline, size=1 if ones else size, priority=priority)
            for number, (deadline, size, priority) in enumerate(waiting)
        )
    )
    count = rows = 0
    for number in range(1, len(queue.waiting) + 1):
        first = queue.waiting[:number]
        total = sum(each.size for each in first)
        if total > len(LATENCIES) or (number > 1 and min(each.deadline for each in first) < LATENCIES[total - 1]):
            break
        count, rows = number, total
    assert next_batch_size(queue, 0.0) == (count, rows)


def test_held_until_no_delay_or_full_batch_is_the_past() -> None:
    assert held_until(queue_of(request(1, 1.0)), 1) == -math.inf
    assert held_until(queue_of(request(1, 1.0, size=8), max_queue_delay=0.020), 8) == -math.inf


def test_held_until_time_left_is_the_oldest_arrival_plus_the_delay() -> None:
    assert held_until(queue_of(request(1, 1.0), max_queue_delay=0.020), 1) == pytest.approx(0.020)


def test_held_until_deadline_near_leaves_time_for_one_row_more() -> None:
    assert held_until(queue_of(request(1, 0.025), max_queue_delay=0.020), 1) == pytest.approx(0.025 - LATENCIES[1])
