"""Forecast the rate of requests for the moment at which a plan that is made now will be in force.

Behind the seam `RateForecast` are two models: `TrendForecast` continues a rise along its line, and is the default;
`HoltWintersForecast` smooths level, trend and season exponentially, by river, value by value in constant time; fitting
anew by least squares would take longer than a decision may.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import Any, Protocol

import msgspec
import numpy as np

from cotenant.control.rate_monitor import RateEstimate
from cotenant.errors import ConfigError

MIN_VALUES = 10  # values before Holt-Winters says anything, at least
STEP_DISPERSION = 1.5  # variance of counts over their mean, up to which a rate is said to have risen at once
STEP_POINTS = 41  # of a window at which a rate may have risen at once, or begun to
MIN_RATE = 1e-3  # requests/s, which no factor of a season can make 0
# Holt-Winters knows no chance: what it says counts where it is so many times the estimated rate, and at most so many.
MARGIN, LIMIT = 1.1, 2.0


class TrendOptions(msgspec.Struct, frozen=True, kw_only=True, tag="trend"):
    """window: seconds, from one half of which to the other a rate rises. deviations: standard deviations of the
    difference between the halves that chance may account for."""

    window: float = 40.0
    deviations: float = 5.0


class HoltWintersOptions(msgspec.Struct, frozen=True, kw_only=True, tag="holt-winters"):
    """period: seconds of which one value is the mean. horizon: seconds to look ahead at least. season: seconds after
    which rates repeat; 0: they do not, and their trend alone is followed. level, trend, seasonal: smoothing factors
    from 0 to 1."""

    period: float = 10.0
    horizon: float = 60.0
    season: float = 0.0
    level: float = 0.3
    trend: float = 0.05
    seasonal: float = 0.3


ForecastOptions = TrendOptions | HoltWintersOptions


class RateForecast(Protocol):
    """Predict the rate of one model from counts of successive intervals."""

    def observe(self, count: int, seconds: float, estimate: RateEstimate) -> None:
        """Count the requests of the next interval. seconds: its length, above 0. estimate: of the rate now."""
        ...

    def expected(self, ahead: float) -> float:
        """Return the largest rate that is expected within so many seconds; 0 where it is not expected to rise."""
        ...


def rate_forecast(options: ForecastOptions) -> RateForecast:
    """Make the forecast of one model. Raises ConfigError where what it needs is not installed."""
    return TrendForecast(options) if isinstance(options, TrendOptions) else HoltWintersForecast(options)


class TrendForecast:
    """Continue a rate that rises beyond chance along the line through both halves of a window of recent seconds.

    A rate that falls is not continued: plans for lower rates can wait. Nor is one that has risen at once and stays: two
    constant rates then explain the window better than a line does. Bursts look like that, too, and are provided for by
    their height: so only counts that vary about as Poisson's are judged by it.
    """

    def __init__(self, options: TrendOptions | None = None) -> None:
        self._options = options or TrendOptions()
        # Seconds and requests before the end of each interval of the window, the first being its beginning.
        self._ends: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._rate = self._slope = 0.0  # requests/s now, and requests/s in a second; 0 where it does not rise

    def observe(self, count: int, seconds: float, estimate: RateEstimate) -> None:
        """See `RateForecast`."""
        ends, window = self._ends, self._options.window
        last_time, last_total = ends[-1]
        now = last_time + seconds
        ends.append((now, last_total + count))
        while now - ends[1][0] >= window:
            ends.popleft()
        self._rate = self._slope = 0.0
        if now - ends[0][0] >= window - seconds / 2:
            self._fit(estimate.dispersion)

    def expected(self, ahead: float) -> float:
        """See `RateForecast`."""
        seen_for = self._options.window  # a line is continued for no longer
        return self._rate + self._slope * min(ahead, seen_for)

    def _fit(self, dispersion: float) -> None:
        ends = self._ends
        (begin, before), (end, after) = ends[0], ends[-1]
        half, total = (end - begin) / 2, after - before
        middle = bisect_right(ends, begin + half, key=itemgetter(0))  # the first interval that ends later
        (time, earlier), (next_time, later) = ends[middle - 1], ends[middle]
        first_half = earlier - before + (later - earlier) * (begin + half - time) / (next_time - time)
        rise = total - 2 * first_half
        if rise <= self._options.deviations * math.sqrt(total * dispersion):
            return
        if dispersion > STEP_DISPERSION or not self._is_step():
            self._slope = rise / half**2
            self._rate = (total - first_half) / half + self._slope * half / 2

    def _is_step(self) -> bool:
        """Tell whether two constant rates in the window are likelier than one that rises along a line from somewhere in
        it on. Counts are Poisson, and both begin from the rate of before and have as many requests from then on."""
        every = -(-len(self._ends) // STEP_POINTS)  # what it takes grows with their square
        times, totals = (np.array(column) for column in zip(*list(self._ends)[::-every][::-1], strict=True))
        times, totals = times - times[0], totals - totals[0]
        since, before = times[1:-1], totals[1:-1]
        left, after = times[-1] - since, totals[-1] - before
        first, second = np.maximum(before / since, MIN_RATE), np.maximum(after / left, MIN_RATE)
        steps = before * np.log(first) + after * np.log(second)
        slope = 2 * (second - first) / left
        middles = (times[:-1] + times[1:]) / 2
        rates = first[:, None] + slope[:, None] * np.maximum(middles - since[:, None], 0.0)
        lines = np.log(np.maximum(rates, MIN_RATE)) @ np.diff(totals)
        return bool(steps.max() > lines.max())


class HoltWintersForecast:
    """Smooth level, trend and season. Raises ConfigError where river is not installed."""

    def __init__(self, options: HoltWintersOptions) -> None:
        self._options = options
        values = round(options.season / options.period)
        self._needed = max(MIN_VALUES, 2 * values)
        self._smoothing = _holt_winters(options, values)
        self._count, self._seconds, self._values = 0, 0.0, 0
        self._estimate = RateEstimate(0.0, 0.0, 1.0)
        self._rates: list[float] = []  # of the values to come, as far as was asked since the last one came

    def observe(self, count: int, seconds: float, estimate: RateEstimate) -> None:
        """See `RateForecast`."""
        self._estimate = estimate
        self._count += count
        self._seconds += seconds
        if self._seconds < self._options.period:
            return
        self._smoothing.learn_one(max(self._count / self._seconds, MIN_RATE))
        self._count, self._seconds, self._rates = 0, 0.0, []
        self._values += 1

    def expected(self, ahead: float) -> float:
        """See `RateForecast`."""
        if self._values < self._needed:
            return 0.0
        steps = max(1, round(max(ahead, self._options.horizon) / self._options.period))
        if len(self._rates) < steps:
            self._rates = self._smoothing.forecast(steps)
        rate = max(self._rates[:steps])
        return min(rate, LIMIT * self._estimate.rate) if rate > MARGIN * self._estimate.rate else 0.0


def _holt_winters(options: HoltWintersOptions, values: int) -> Any:
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
