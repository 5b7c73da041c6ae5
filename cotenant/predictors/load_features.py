"""Derive features of a load from its profile alone: sensitivity to batch and share, operating point, utilisation.

A load that waits for its host rather than for the device has a latency that hardly changes with batch and share, and
interference affects it differently from a load that keeps the device busy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import Profile
from cotenant.predictors import Load

# Columns of a profile, in percent; a profile may have any of them.
UTILISATION_COLUMNS = ("l2_util_pct", "dram_util_pct", "sm_util_pct", "sm_throughput_pct", "dram_throughput_pct")
FEATURES = ("floor", "by_batch", "by_share", "batch", "share", *UTILISATION_COLUMNS)
# Indices in FEATURES.
SENSITIVITY = range(3)
BATCH_SENSITIVITY = range(2)
OPERATING_POINT = range(3, 5)
SHARE = range(4, 5)
UTILISATION = range(5, len(FEATURES))
MIN_PERCENT = 0.01  # lower utilisations count as this


def load_features(profile: Profile, load: Load) -> NDArray[np.float64]:
    """Return the FEATURES of a load; NaN for what the profile lacks.

    floor: log of the latency of one row on the largest share over this load's. by_batch, by_share: exponents by which
    the latency grows with rows, and falls with the share. batch: log. share: fraction. The rest: logs of percentages.
    """
    batch = min(load.batch, profile.max_batch)
    shares = [share for share in profile.shares if math.isfinite(profile.latency(batch, share))] or [load.share]
    share = min(max(load.share, shares[0]), shares[-1])
    latency = profile.latency(batch, share)
    fewer, more = max(1, batch // 2), min(profile.max_batch, 2 * batch)
    if not math.isfinite(profile.latency(more, share)):
        more = batch
    below = max((other for other in shares if other < share), default=share)
    above = min((other for other in shares if other > share), default=share)
    used = profile.features(batch, share)
    return np.array(
        [
            math.log(profile.latency(1, shares[-1]) / latency),
            _exponent(profile.latency(fewer, share), profile.latency(more, share), more / fewer),
            -_exponent(profile.latency(batch, below), profile.latency(batch, above), above / below),
            math.log(load.batch),
            load.share / 1000,
            *(math.log(max(used[name], MIN_PERCENT)) if name in used else math.nan for name in UTILISATION_COLUMNS),
        ]
    )


def _exponent(low: float, high: float, times: float) -> float:
    return math.log(high / low) / math.log(times) if times > 1 else 0.0
