"""When a rising rate is extrapolated, and how far."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.control.trend import WINDOW, Trend

PERIOD = 0.5


def expected(trend: Trend, rates: list[float], dispersion: float = 1.0) -> list[float]:
    """Observe evenly spaced requests."""
    left = 0.0
    found = []
    for rate in rates:
        left += rate * PERIOD
        count = int(left)
        left -= count
        found.append(trend.observe(count, PERIOD, dispersion))
    return found


def ramp(first: float, slope: float, seconds: float) -> list[float]:
    return [first + slope * PERIOD * n for n in range(round(seconds / PERIOD))]


@pytest.mark.parametrize("ahead", [10.0, 30.0])
def test_rate_that_rises_is_continued_along_its_line(ahead: float) -> None:
    rates = ramp(200.0, 2.0, 60.0)
    assert expected(Trend(ahead), rates)[-1] == pytest.approx(rates[-1] + 2.0 * ahead, rel=0.01)


def test_rate_that_falls_or_stays_is_not_extrapolated() -> None:
    assert not any(expected(Trend(30.0), ramp(400.0, -2.0, 60.0)))
    assert not any(expected(Trend(30.0), ramp(400.0, 0.0, 60.0)))


def test_nothing_is_extrapolated_before_the_window_is_full_or_without_looking_ahead() -> None:
    rates = ramp(200.0, 2.0, 60.0)
    intervals = round(WINDOW / PERIOD)
    found = expected(Trend(30.0), rates)
    assert not any(found[: intervals - 2])
    assert all(found[intervals:])
    assert not any(expected(Trend(0.0), rates))


def test_rise_within_chance_is_not_extrapolated() -> None:
    assert not any(expected(Trend(30.0), ramp(200.0, 2.0, 60.0), dispersion=100.0))
    for seed in range(20):
        trend = Trend(30.0)
        counts = np.random.default_rng(seed).poisson(50.0 * PERIOD, 2400)
        assert not any(trend.observe(int(count), PERIOD, 1.0) for count in counts)
