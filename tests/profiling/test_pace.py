from __future__ import annotations

import itertools

from cotenant.profiling.pace import ProfilingPace


def test_pace_tells_place_and_the_seconds_that_are_left() -> None:
    clock = itertools.count(100.0, 10.0)
    pace = ProfilingPace(clock=lambda: next(clock))
    assert pace("a", 0, 4, 1, 2) == "profiling a, model 1 of 2"
    assert pace("a", 2, 4, 1, 2) == "profiling a, model 1 of 2, about 30 s left"  # a quarter took 10 s
    assert pace("b", 0, 4, 2, 2) == "profiling b, model 2 of 2, about 20 s left"
    assert pace("b", 4, 4, 2, 2) == "profiling b, model 2 of 2, about 0 s left"
