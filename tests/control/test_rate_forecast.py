from __future__ import annotations

import math
import sys

import pytest

from cotenant.control.adaptation import Adopted, ControllerCommand, Observed, Solve
from cotenant.control.controller import Controller
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.rate_forecast import ForecastOptions, HoltWintersForecast
from cotenant.errors import ConfigError
from tests.control.controller_world import GPU, plan_of


def test_nothing_is_forecast_from_few_counts() -> None:
    forecast = HoltWintersForecast(ForecastOptions(period=1.0))
    assert [forecast.observe(100, 1.0) for _ in range(9)] == [0.0] * 9
    assert forecast.observe(100, 1.0) == pytest.approx(100.0)


def test_trend_goes_on_for_the_horizon() -> None:
    forecast = HoltWintersForecast(ForecastOptions(period=1.0, horizon=20.0))
    for n in range(100):
        expected = forecast.observe(100 + 2 * n, 1.0)
    assert expected == pytest.approx(298.0 + 2 * 20.0, rel=0.02)


def test_rise_of_a_season_is_known_before_it_comes() -> None:
    season, horizon = 600.0, 60.0
    forecast = HoltWintersForecast(ForecastOptions(season=season, horizon=horizon))

    def rate(time: float) -> float:
        return 100.0 + 50.0 * math.sin(2 * math.pi * time / season)

    errors = []
    for n in range(400):
        time = 10.0 * n
        expected = forecast.observe(round(10 * rate(time)), 10.0)
        if n > 200:
            errors.append(abs(expected - max(rate(time + ahead) for ahead in range(10, 61, 10))))
    assert max(errors) < 10.0


def test_counts_of_short_intervals_make_one_value() -> None:
    forecast, other = (HoltWintersForecast(ForecastOptions(period=5.0)) for _ in range(2))
    for n in range(20):
        for _ in range(10):
            expected = forecast.observe(n, 0.5)
        assert other.observe(10 * n, 5.0) == expected


def solved(forecast: ForecastOptions | None) -> float:
    """Return when a controller first plans for a rate that rises by a percent every second."""
    controller = Controller(GPU[:1], {"a": 0.99}, ControllerOptions(forecast=forecast, ahead=0.0))
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
    assert solved(ForecastOptions(period=5.0, horizon=30.0, trend=0.3)) < solved(None) - 5.0


def test_forecast_without_river_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "river", None)
    with pytest.raises(ConfigError, match=r"pip install 'cotenant\[forecast\]'"):
        HoltWintersForecast(ForecastOptions())
