"""Forecast the rates of requests, so that a plan for more is there before they have come: an option.

Behind the seam `RateForecast` is Holt-Winters' exponential smoothing of river, updated value by value in constant time;
fitting anew by least squares would take longer than a decision may.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from cotenant.errors import ConfigError

MIN_VALUES = 10  # values before anything is forecast, at least
MIN_RATE = 1e-3  # requests/s, which no factor of a season can make 0


class ForecastOptions(msgspec.Struct, frozen=True, kw_only=True):
    """period: seconds of which one value is the mean. horizon: seconds ahead. season: seconds after which rates repeat;
    0: they do not, and their trend alone is followed. level, trend, seasonal: smoothing factors from 0 to 1."""

    period: float = 10.0
    horizon: float = 60.0
    season: float = 0.0
    level: float = 0.3
    trend: float = 0.05
    seasonal: float = 0.3


class RateForecast(Protocol):
    """Predict the rate of one model from counts of successive intervals."""

    def observe(self, count: int, seconds: float) -> float:
        """Count the requests of the next interval, of so many seconds; return the largest rate expected within the
        horizon, 0 where nothing can be said yet."""
        ...


class HoltWintersForecast:
    """Smooth level, trend and season. Raises ConfigError where river is not installed."""

    def __init__(self, options: ForecastOptions) -> None:
        self._options = options
        values = round(options.season / options.period)
        self._needed = max(MIN_VALUES, 2 * values)
        self._ahead = max(1, round(options.horizon / options.period))
        self._smoothing = _holt_winters(options, values)
        self._count, self._seconds, self._values = 0, 0.0, 0
        self._expected = 0.0

    def observe(self, count: int, seconds: float) -> float:
        """See `RateForecast`."""
        self._count += count
        self._seconds += seconds
        if self._seconds < self._options.period:
            return self._expected
        self._smoothing.learn_one(max(self._count / self._seconds, MIN_RATE))
        self._count, self._seconds = 0, 0.0
        self._values += 1
        if self._values >= self._needed:
            self._expected = max(0.0, *self._smoothing.forecast(self._ahead))
        return self._expected


def _holt_winters(options: ForecastOptions, values: int) -> Any:
    try:
        from river import time_series
    except ImportError:
        raise ConfigError("a forecast of rates needs river; run `pip install 'cotenant[forecast]'`") from None
    make: Any = time_series.HoltWinters
    if values < 2:
        return make(alpha=options.level, beta=options.trend)
    # The shape of a day scales with its load.
    return make(
        alpha=options.level, beta=options.trend, gamma=options.seasonal, seasonality=values, multiplicative=True
    )
