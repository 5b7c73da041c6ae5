"""All that a controller observes of one model."""

from __future__ import annotations

from collections import deque

from cotenant.control.attainment_monitor import AttainmentMonitor
from cotenant.control.burst_monitor import BurstMonitor
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.pause_monitor import PauseMonitor
from cotenant.control.profile_monitor import ProfileMonitor
from cotenant.control.rate_forecast import rate_forecast
from cotenant.control.rate_monitor import RateEstimate, RateMonitor
from cotenant.control.slowdown_monitor import SlowdownMonitor
from cotenant.core.units import show_rate

MAX_HEADROOM = 2.0  # factor on an estimated rate
BURST_HEADROOM = 1.05  # factor on what bursts need, which changes with each of them


class ModelWatch:
    """Estimate rate, slowdown and attainment of one model. headroom: factor on its rate that is planned for."""

    def __init__(self, options: ControllerOptions) -> None:
        self.estimate = RateEstimate(0.0, 0.0, 1.0)
        self.rate = RateMonitor(options.rates)
        self.bursts = BurstMonitor(options.bursts)
        self._forecast = None if options.forecast is None else rate_forecast(options.forecast)
        self.slowdown = SlowdownMonitor(options.slowdowns)
        self.attainment = AttainmentMonitor()
        self.profile = ProfileMonitor(
            options.correct_after, options.correct_batches, tolerance=options.slowdowns.tolerance / 2
        )
        self.expected = 0.0  # requests/s when a plan that is made now will be in force; 0 where no rise is seen
        self.headroom = options.headroom
        self.pause = PauseMonitor(options.short_cooldown, options.longest_cooldown)
        self._deviations = options.deviations
        self._peaks: deque[tuple[float, float]] = deque()  # (time, rate wanted), falling: those of the last cool-down

    def observe_arrivals(self, count: int, seconds: float, ahead: float) -> None:
        """Take the requests that arrived in the last interval. seconds: its length, above 0. ahead: seconds for which
        what is planned now has to do."""
        self.bursts.observe(count, seconds)
        self.estimate = self.rate.observe(count, seconds, self.bursts.dispersion)
        if self._forecast is not None:
            self._forecast.observe(count, seconds, self.estimate)
            # Where requests come in bursts, a rise is one of them.
            self.expected = self._forecast.expected(ahead) if not self.bursts.needed else 0.0

    @property
    def demand(self) -> float:
        """The requests/s to plan for."""
        rate = self.estimate.rate
        if self.bursts.needed:
            return max(rate, self.bursts.needed * BURST_HEADROOM)
        uncertain = rate + self._deviations * self.estimate.deviation
        return max(min(max(rate * self.headroom, uncertain), MAX_HEADROOM * rate), self.expected * self.headroom)

    def peak(self, since: float) -> float:
        """Return the largest rate that was wanted since then; what bursts need is wanted for as long as they are
        remembered. Devices that were launched for a burst and come after it are there for the next one."""
        kept = next((rate for time, rate in self._peaks if time >= since), 0.0)
        return max(kept, self.demand) if self.bursts.needed else kept

    def describe_excess(self, name: str, limit: float) -> str:
        """Say what a model of this name is offered, or needs, beyond that limit in requests/s."""
        rate = self.estimate.rate
        if self.bursts.needed > max(rate, limit):
            return f"bursts of {name} need {show_rate(self.bursts.needed)}/s"
        rising = f", rising to {show_rate(self.expected)}/s" if self.expected > rate else ""
        return f"{name} is offered {show_rate(rate)}/s{rising}"

    def raise_peak(self, now: float, rate: float, since: float) -> None:
        """Want a rate now; forget those that were wanted before `since`."""
        while self._peaks and self._peaks[-1][1] <= rate:
            self._peaks.pop()
        self._peaks.append((now, rate))
        while self._peaks[0][0] < since:
            self._peaks.popleft()
