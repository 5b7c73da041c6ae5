"""All that a controller observes of one model."""

from __future__ import annotations

from collections import deque

from cotenant.control.attainment_monitor import AttainmentMonitor
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.profile_monitor import ProfileMonitor
from cotenant.control.rate_forecast import HoltWintersForecast
from cotenant.control.rate_monitor import RateEstimate, RateMonitor
from cotenant.control.slowdown_monitor import SlowdownMonitor
from cotenant.control.trend import Trend

MAX_HEADROOM = 2.0  # factor on an estimated rate
FORECAST_MARGIN = 1.1  # times an estimated rate, beyond which a forecast says anything


class ModelWatch:
    """Estimate rate, slowdown and attainment of one model. headroom: factor on its rate that is planned for."""

    def __init__(self, options: ControllerOptions) -> None:
        self.estimate = RateEstimate(0.0, 0.0, 1.0)
        self.rate = RateMonitor(options.rates)
        self._forecast = None if options.forecast is None else HoltWintersForecast(options.forecast)
        self.slowdown = SlowdownMonitor(options.slowdowns)
        self.attainment = AttainmentMonitor()
        self.profile = ProfileMonitor(
            options.correct_after, options.correct_batches, tolerance=options.slowdowns.tolerance / 2
        )
        self.expected = 0.0  # requests/s when a plan that is made now will be in force; 0 where no rise is seen
        self.headroom = options.headroom
        self._trend = Trend(options.ahead)
        self._deviations = options.deviations
        self._peaks: deque[tuple[float, float]] = deque()  # (time, rate wanted), falling: those of the last cool-down

    def observe_arrivals(self, count: int, seconds: float) -> None:
        """Take the requests that arrived in the last interval. seconds: its length, above 0."""
        self.estimate = self.rate.observe(count, seconds)
        self.expected = self._trend.observe(count, seconds, self.estimate.dispersion)
        if self._forecast is not None:
            forecast = min(self._forecast.observe(count, seconds), MAX_HEADROOM * self.estimate.rate)
            if forecast > FORECAST_MARGIN * self.estimate.rate:
                self.expected = max(self.expected, forecast)

    @property
    def demand(self) -> float:
        """The requests/s to plan for."""
        rate = self.estimate.rate
        uncertain = rate + self._deviations * self.estimate.deviation
        return max(min(max(rate * self.headroom, uncertain), MAX_HEADROOM * rate), self.expected * self.headroom)

    def peak(self, since: float) -> float:
        """Return the largest rate that was wanted since then."""
        return next((rate for time, rate in self._peaks if time >= since), 0.0)

    def raise_peak(self, now: float, rate: float, since: float) -> None:
        """Want a rate now; forget those that were wanted before `since`."""
        while self._peaks and self._peaks[-1][1] <= rate:
            self._peaks.pop()
        self._peaks.append((now, rate))
        while self._peaks[0][0] < since:
            self._peaks.popleft()
