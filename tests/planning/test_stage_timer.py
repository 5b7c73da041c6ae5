from __future__ import annotations

from collections.abc import Iterator

import pytest

from cotenant.planning.stage_timer import StageTimer


@pytest.fixture
def timer() -> StageTimer:
    """A timer whose clock goes on by a second each time that it is read."""
    seconds: Iterator[int] = iter(range(100))
    return StageTimer(lambda: float(next(seconds)))


def test_stage_within_another_counts_for_the_inner_one_alone(timer: StageTimer) -> None:
    with timer.stage("outer"):
        with timer.stage("inner"):
            pass
        with timer.stage("inner"):
            pass
    assert timer.seconds == {"outer": 3.0, "inner": 2.0}


def test_timed_function_is_a_stage_that_ends_on_errors_too(timer: StageTimer) -> None:
    def fail(text: str, *, number: int) -> None:
        raise ValueError(f"{text} {number}")

    with pytest.raises(ValueError, match="wrong 3"):
        timer.timed("failing", fail)("wrong", number=3)
    with timer.stage("next"):
        pass
    assert timer.seconds == {"failing": 1.0, "next": 1.0}
