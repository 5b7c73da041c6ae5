"""What is observed of one model, and how it is put."""

from __future__ import annotations

from cotenant.control.controller_options import ControllerOptions
from cotenant.control.model_watch import ModelWatch


def watched(*phases: tuple[int, float]) -> ModelWatch:
    """Observe so many requests every half second, for so many seconds each."""
    watch = ModelWatch(ControllerOptions())
    for count, seconds in phases:
        for _ in range(round(2 * seconds)):
            watch.observe_arrivals(count, 0.5, 1.0)
    return watch


def test_excess_of_a_rate_is_said_to_be_offered() -> None:
    assert watched((50, 60.0)).describe_excess("a", 80.0) == "a is offered 100/s"


def test_excess_of_bursts_is_not_said_to_be_offered() -> None:
    """In the gaps between them next to nothing is."""
    watch = watched(*[(50, 5.0), (0, 25.0)] * 20)
    assert watch.describe_excess("a", 20.0).startswith("bursts of a need ")


def test_rate_is_said_to_rise_where_it_does() -> None:
    watch = watched(*[(count, 2.0) for count in range(50, 200, 5)])
    assert ", rising to " in watch.describe_excess("a", 80.0)
