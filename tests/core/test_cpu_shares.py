from __future__ import annotations

import math

import pytest

from cotenant.core.cpu_shares import computing_parts
from cotenant.core.profile import Point, Profile

PROCESSORS = 2.0


def test_computing_part_is_processor_time_over_latency() -> None:
    """One thread uses 20 ms of a processor, and two are no faster."""
    points = [
        Point(share=s, batch=1, latency=max(10 / s, 0.02), memory=0, features={"cpu_ms": 20.0})
        for s in (50, 250, 500, 1000)
    ]
    known = Profile("a", "cpu", points)
    assert computing_parts(known, 50, PROCESSORS)[0] == pytest.approx(0.1)
    assert computing_parts(known, 500, PROCESSORS) == pytest.approx((1.0,))
    assert all(0 < part <= 1 for share in range(50, 1001, 50) for part in computing_parts(known, share, PROCESSORS))


def test_computing_part_without_processor_times_is_that_of_the_largest_share_with_as_many_threads() -> None:
    points = [
        Point(share=share, batch=1, latency=latency, memory=0)
        for share, latency in ((250, 0.040), (500, 0.020), (1000, 0.012))
    ]
    known = Profile("a", "cpu", points)
    assert computing_parts(known, 250, PROCESSORS) == pytest.approx((0.5,))
    assert computing_parts(known, 500, PROCESSORS) == pytest.approx((1.0,))
    assert computing_parts(known, 1000, PROCESSORS) == pytest.approx((1.0,))
    assert computing_parts(known, 750, PROCESSORS) == pytest.approx((0.012 / known.latency(1, 750),))
    assert computing_parts(known, 100, PROCESSORS) == (1.0,) and known.latency(1, 100) == math.inf
