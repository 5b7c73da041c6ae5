"""What a queue learns of its lane."""

from __future__ import annotations

import pytest

from cotenant.runtime.lane import GAIN, MAX_CORRECTION, Queue
from tests.runtime.queues import LATENCIES, lane_of


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
