"""How quickly a controller follows."""

from __future__ import annotations

import msgspec

from cotenant.control.burst_monitor import BurstOptions
from cotenant.control.rate_forecast import ForecastOptions, TrendOptions
from cotenant.control.rate_monitor import RateOptions
from cotenant.control.slowdown_monitor import SlowdownOptions


class ControllerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Say how quickly a controller follows. Durations are in seconds.

    headroom: factor on an estimated rate that is planned for. deviations: of the estimate, that are added to it at
    least. tolerance: part by which a rate may exceed what its plan sustains. threshold: log-likelihood ratio beyond
    which it does not exceed that by chance. suspected_threshold: beyond which a rate may have changed, and a plan is
    looked for; changed_threshold: beyond which it surely has, and that it exceeds its plan needs no proof of its own.
    idle_rate: requests/s that a model is planned for that is hardly used. settle: after a change, until the next.
    cooldown: for which rates must be lower before devices are released; it grows up to longest_cooldown while devices
    are wanted again soon after, and to keep_launches times what a launch takes. lead: that a plan takes until it is in
    force, before any was timed. fall: part of the planned rates by which their sum must be lower before a plan of fewer
    devices is looked for; short_fall: the same while some rates are unserved; fall_alone: the same for a single rate.
    retry, longest_retry: after a failure, doubling with each in a row. launch_timeout: after which a device that was
    asked for is not expected any more, beyond three times what a launch takes. correct_after, correct_batches: of a
    quiet machine, that tell whether a profile is wrong. quiet: part of the machine that other programs use on a quiet
    one, at most. short_cooldown: the cool-down while not all that is offered can be served. forecast: of rates; None:
    none.
    """

    headroom: float = 1.2
    deviations: float = 2.0
    tolerance: float = 0.02
    threshold: float = 10.0
    suspected_threshold: float = 12.0
    changed_threshold: float = 15.0
    idle_rate: float = 1.0
    settle: float = 1.0
    cooldown: float = 30.0
    longest_cooldown: float = 960.0
    fall: float = 0.04
    short_fall: float = 0.2
    fall_alone: float = 0.4
    retry: float = 2.0
    longest_retry: float = 60.0
    launch_timeout: float = 60.0
    correct_after: float = 60.0
    correct_batches: int = 200
    short_cooldown: float = 10.0
    quiet: float = 0.05
    lead: float = 2.0
    keep_launches: float = 15.0
    rates: RateOptions = RateOptions()
    bursts: BurstOptions = BurstOptions()
    slowdowns: SlowdownOptions = SlowdownOptions()
    forecast: ForecastOptions | None = TrendOptions()
