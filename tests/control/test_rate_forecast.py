from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from cotenant.control.adaptation import Adopted, ControllerCommand, Observed, Solve
from cotenant.control.controller import Controller
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.rate_forecast import (
    ForecastOptions,
    HoltWintersForecast,
    HoltWintersOptions,
    RateForecast,
    TrendForecast,
    TrendOptions,
    rate_forecast,
)
from cotenant.control.rate_monitor import RateEstimate
from cotenant.errors import ConfigError
from tests.control.controller_world import GPU, plan_of

PERIOD = 0.5
LOW = RateEstimate(0.0, 0.0, 1.0)  # whatever is forecast is more
WINDOW = TrendOptions().window


def expected(
    forecast: RateForecast, rates: list[float], ahead: float = 30.0, dispersion: float = 1.0, period: float = PERIOD
) -> list[float]:
    """Observe evenly spaced requests; return what is expected after each interval."""
    left = 0.0
    values = []
    for rate in rates:
        left += rate * period
        count = int(left)
        left -= count
        forecast.observe(count, period, RateEstimate(rate, 1.0, dispersion))
        values.append(forecast.expected(ahead))
    return values


def ramp(first: float, slope: float, seconds: float) -> list[float]:
    return [first + slope * PERIOD * n for n in range(round(seconds / PERIOD))]


@pytest.mark.parametrize("ahead", [0.0, 10.0, 30.0])
def test_trend_continues_a_rising_rate_along_its_line(ahead: float) -> None:
    rates = ramp(200.0, 2.0, 60.0)
    assert expected(TrendForecast(), rates, ahead)[-1] == pytest.approx(rates[-1] + 2.0 * ahead, rel=0.01)


def test_trend_is_continued_for_no_longer_than_it_was_seen() -> None:
    forecast = TrendForecast()
    expected(forecast, ramp(200.0, 2.0, 60.0))
    assert forecast.expected(10 * WINDOW) == forecast.expected(WINDOW)


def test_trend_of_a_rate_that_falls_or_stays_expects_nothing() -> None:
    assert not any(expected(TrendForecast(), ramp(400.0, -2.0, 60.0)))
    assert not any(expected(TrendForecast(), ramp(400.0, 0.0, 60.0)))


def test_trend_of_a_steady_rate_expects_nothing_whatever_the_intervals() -> None:
    """With an odd number of them one lies in both halves."""
    assert expected(TrendForecast(), [20_000.0] * 200, period=0.52)[-1] == 0.0


def test_trend_expects_nothing_before_its_window_is_full() -> None:
    values = expected(TrendForecast(), ramp(200.0, 2.0, 60.0))
    intervals = round(WINDOW / PERIOD)
    assert not any(values[: intervals - 2])
    assert all(values[intervals:])


@pytest.mark.parametrize(("before", "after"), [(18.0, 37.0), (100.0, 200.0), (0.0, 50.0), (300.0, 400.0)])
def test_trend_of_a_rate_that_rose_at_once_expects_no_further_rise(before: float, after: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        forecast = TrendForecast()
        for seconds, rate in ((60.0, before), (60.0, after)):
            for _ in range(round(seconds / PERIOD)):
                forecast.observe(int(rng.poisson(rate * PERIOD)), PERIOD, LOW)
                assert forecast.expected(4.0) < 1.1 * after


def test_trend_of_counts_that_come_in_bursts_is_continued_though_it_rose_at_once() -> None:
    for dispersion, continued in ((1.0, False), (2.0, True)):
        expected_after = expected(TrendForecast(), [100.0] * 80 + [300.0] * 40, dispersion=dispersion)[-1]
        assert (expected_after > 300.0) is continued


@pytest.mark.parametrize(("before", "slope"), [(100.0, 5.0), (300.0, 3.0)])
def test_trend_that_begins_within_the_window_is_continued(before: float, slope: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        forecast = TrendForecast()
        rates = [before] * round(60.0 / PERIOD) + ramp(before, slope, 30.0)
        for rate in rates:
            forecast.observe(int(rng.poisson(rate * PERIOD)), PERIOD, LOW)
        assert forecast.expected(4.0) == pytest.approx(rates[-1] + 4.0 * slope, rel=0.12)


def test_trend_ends_with_the_rise() -> None:
    forecast = TrendForecast()
    assert expected(forecast, ramp(200.0, 2.0, 60.0))[-1]
    assert not expected(forecast, [320.0] * round(2 * WINDOW / PERIOD))[-1]


def test_trend_takes_no_chance_for_a_rise() -> None:
    assert not any(expected(TrendForecast(), ramp(200.0, 2.0, 60.0), dispersion=100.0))
    for seed in range(20):
        forecast = TrendForecast()
        for count in np.random.default_rng(seed).poisson(50.0 * PERIOD, 2400):
            forecast.observe(int(count), PERIOD, LOW)
            assert not forecast.expected(30.0)


def test_holt_winters_forecasts_nothing_from_few_counts() -> None:
    forecast = HoltWintersForecast(HoltWintersOptions(period=1.0))
    values = []
    for _ in range(10):
        forecast.observe(100, 1.0, LOW)
        values.append(forecast.expected(0.0))
    assert values[:9] == [0.0] * 9
    assert values[9] == 0.0, "no more than the estimated rate, which counts"


def test_holt_winters_continues_a_trend_for_the_horizon_and_for_as_long_as_is_asked() -> None:
    forecast = HoltWintersForecast(HoltWintersOptions(period=1.0, horizon=20.0))
    expected(forecast, [100.0 + 2 * n for n in range(100)], period=1.0)
    assert forecast.expected(0.0) == pytest.approx(298.0 + 2 * 20.0, rel=0.02)
    assert forecast.expected(30.0) == pytest.approx(298.0 + 2 * 30.0, rel=0.03)
    assert forecast.expected(0.0) == pytest.approx(298.0 + 2 * 20.0, rel=0.02)


def test_holt_winters_is_believed_within_limits() -> None:
    forecast = HoltWintersForecast(HoltWintersOptions(period=1.0, horizon=20.0))
    expected(forecast, [100.0 + 2 * n for n in range(100)], period=1.0)
    said = forecast.expected(0.0)
    for rate, believed in ((said / 1.05, 0.0), (said / 1.2, said), (said / 3.0, said * 2 / 3)):
        forecast.observe(0, 0.01, RateEstimate(rate, 1.0, 1.0))
        assert forecast.expected(0.0) == pytest.approx(believed)


def test_holt_winters_knows_the_rise_of_a_season_before_it_comes() -> None:
    season, horizon = 600.0, 60.0
    forecast = HoltWintersForecast(HoltWintersOptions(season=season, horizon=horizon))

    def rate(time: float) -> float:
        return 100.0 + 50.0 * math.sin(2 * math.pi * time / season)

    errors = []
    for n in range(400):
        time = 10.0 * n
        forecast.observe(round(10 * rate(time)), 10.0, RateEstimate(rate(time), 10.0, 1.0))
        largest = max(rate(time + ahead) for ahead in range(10, 61, 10))
        if n > 200 and largest > 1.2 * rate(time):
            errors.append(abs(forecast.expected(0.0) - largest))
    assert len(errors) > 50
    assert max(errors) < 10.0


def test_counts_of_short_intervals_make_one_value() -> None:
    forecast, other = (HoltWintersForecast(HoltWintersOptions(period=5.0)) for _ in range(2))
    for n in range(20):
        estimate = RateEstimate(n / 1.0, 5.0, 1.0)
        for _ in range(10):
            forecast.observe(n, 0.5, estimate)
        other.observe(10 * n, 5.0, estimate)
        assert forecast.expected(0.0) == other.expected(0.0)
    assert forecast.expected(0.0)


def solved(forecast: ForecastOptions | None) -> float:
    """Return when a controller first plans for a rate that rises by a percent every second."""
    controller = Controller(GPU[:1], {"a": 0.99}, ControllerOptions(forecast=forecast))
    controller.handle(Adopted(plan=plan_of(1, 150.0), rates={"a": 150.0}), 0.0)
    commands: list[ControllerCommand] = []
    now = 0.0
    while not commands:
        now += 0.5
        count = round(0.5 * (100.0 + max(0.0, now - 60.0)))
        commands = controller.handle(Observed(seconds=0.5, offered={"a": count}), now)
    (solve,) = commands
    assert isinstance(solve, Solve)
    assert ("rising to" in solve.reason) is (forecast is not None)
    return now


def test_controller_plans_ahead_of_a_rise_that_is_forecast() -> None:
    none, trend = solved(None), solved(TrendOptions())
    assert trend < none, "a trend has no lag, which an estimate of the rate has"
    assert solved(HoltWintersOptions(period=5.0, horizon=30.0, trend=0.3)) < none - 5.0


def test_forecast_without_river_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "river", None)
    rate_forecast(TrendOptions())
    with pytest.raises(ConfigError, match=r"pip install 'cotenant\[forecast\]'"):
        rate_forecast(HoltWintersOptions())
