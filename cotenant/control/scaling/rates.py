"""Rates to plan for, from rates observed: smoothed, with headroom, and the same until they have moved enough.

gpulet, section 4.5, with the numbers of its published program: rates are smoothed exponentially and planned for with
headroom, since they may rise until the next period while new workers start. A plan is made again when what it should
be made for has moved away from what it was made for, sooner upwards than downwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class TargetRateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are in requests/s, of each model.

    weight: of the latest period in the smoothed rate. ahead: seconds for which a rise is extrapolated. The paper does
    not; but an observed rate is half a period old on average, a smoothed one (1 - weight) / weight periods older, and
    a plan that is made now is in force from when its workers are up until the next one's are. headroom: multiple of the
    smoothed rate that is planned for; low_headroom: the same below `low_rate`, where chance is larger. Rates have moved
    when that exceeds what was planned for by `rise` of it or by `rise_by`, or is below it by `fall` of it.
    """

    weight: float = 0.5
    ahead: float = 0.0
    headroom: float = 1.2
    low_headroom: float = 1.5
    low_rate: float = 125.0
    rise: float = 0.05
    rise_by: float = 10.0
    fall: float = 0.1


NEGLIGIBLE_RATE = 1e-6  # requests/s: one in eleven days; smoothed rates never get to 0 by themselves

# What was observed last is what is planned for, and every difference counts.
LATEST = TargetRateOptions(weight=1.0, headroom=1.0, low_headroom=1.0, rise=0.0, rise_by=0.0, fall=0.0)


class TargetRates:
    """Follow observed rates, and say which to plan for. estimate: the smoothed rates."""

    def __init__(self, options: TargetRateOptions | None = None) -> None:
        self.options = options or TargetRateOptions()
        self.estimate: dict[str, float] = {}
        self._slope: dict[str, float] = {}  # of the smoothed rates, requests/s in a second, smoothed alike

    def observe(self, rates: Mapping[str, float], seconds: float) -> None:
        """Take in the rates of the last `seconds`, above 0."""
        weight = self.options.weight
        for name, rate in rates.items():
            before = self.estimate.get(name, rate)
            smoothed = weight * rate + (1 - weight) * before
            self.estimate[name] = smoothed if smoothed > NEGLIGIBLE_RATE else 0.0
            slope = (self.estimate[name] - before) / seconds
            self._slope[name] = weight * slope + (1 - weight) * self._slope.get(name, 0.0)

    def wanted(self) -> dict[str, float]:
        """Return the rates to plan for now."""
        ahead = self.options.ahead
        return {
            name: self._with_headroom(rate + ahead * max(0.0, self._slope[name]))
            for name, rate in self.estimate.items()
        }

    def moved(self, wanted: Mapping[str, float], planned: Mapping[str, float]) -> bool:
        """Tell whether any rate has moved away from what was planned for; one that is missing there was unknown."""
        return any(name not in planned or self._has_moved(rate, planned[name]) for name, rate in wanted.items())

    def _with_headroom(self, rate: float) -> float:
        low = rate < self.options.low_rate
        return rate * (self.options.low_headroom if low else self.options.headroom)

    def _has_moved(self, rate: float, planned: float) -> bool:
        up = min(planned * self.options.rise, self.options.rise_by)
        return rate > planned + up or rate < planned * (1 - self.options.fall)
