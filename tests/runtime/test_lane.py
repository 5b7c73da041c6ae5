"""What a queue learns of its lane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.request import Request
from cotenant.runtime.lane import GAIN, MAX_CORRECTION, Queue
from tests.runtime.queues import LATENCIES, lane_of, push, request


def queue_of(*models: str) -> Queue:
    return lane_of(*models).queues[models[0]]


def test_observe_one_wild_batch_counts_as_one_of_the_slowest() -> None:
    """So that it is soon forgotten."""
    wild, slow = queue_of("m"), queue_of("m")
    wild.observe(LATENCIES[0], 1000 * LATENCIES[0])
    slow.observe(LATENCIES[0], MAX_CORRECTION * LATENCIES[0])
    assert (wild.ratio, wild.deviation, wild.correction) == (slow.ratio, slow.deviation, slow.correction)
    assert wild.ratio == pytest.approx(1 + GAIN * (MAX_CORRECTION - 1))


def test_waited_long_counts_at_most_a_batch_of_each_other_model() -> None:
    """Else the worker was down, or the batch held back."""
    queue = queue_of("m", "n", "o")
    queue.waited(1000.0)
    assert queue.others_between == pytest.approx(GAIN * 2 * LATENCIES[-1])
    queue = queue_of("m", "n", "o")
    queue.waited(0.008)
    assert queue.others_between == pytest.approx(GAIN * 0.008)


URGENCIES = st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from([1, 1, 1, 3]))


@given(st.lists(URGENCIES, max_size=30), URGENCIES)
def test_requests_run_by_urgency_and_those_that_are_as_urgent_by_arrival(
    pushed: list[tuple[int, int, int]], asked: tuple[int, int, int]
) -> None:
    queue = queue_of("m")
    for number, (priority, deadline, size) in enumerate(pushed):
        push(queue, request(number, float(deadline), size=size, priority=priority))
    expected = sorted(range(len(pushed)), key=lambda number: pushed[number][:2])
    assert [waiting.id for waiting in queue.waiting] == expected
    rows = sum(size for priority, deadline, size in pushed if (priority, deadline) <= asked[:2])
    assert queue.ahead(asked[0], float(asked[1])) == rows


class Counted(list[Request]):
    """Counts how many of its elements are looked at one by one."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Request]:
        self.looked += len(self)
        return super().__iter__()


def test_request_that_is_due_before_a_thousand_that_wait_looks_at_few_of_them() -> None:
    """Under overload many are: what is left of their targets depends on how long they went unread."""
    queue = queue_of("m")
    push(queue, *(request(number, float(number)) for number in range(1000)))
    queue.waiting = waiting = Counted(queue.waiting)
    assert queue.ahead(0, 990.0) == 991 and 0 < waiting.looked <= 12
    push(queue, request(1000, 990.5))
    assert waiting.looked <= 24 and waiting[991].id == 1000
