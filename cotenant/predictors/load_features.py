"""What a profile tells of a load before anything ran beside it: how it reacts to rows and share, and what it uses.

A load that waits for its host rather than for the device is one whose latency hardly moves with batch and share, and a
neighbour costs it other things than a load that keeps the device busy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cotenant.core.profile import Profile
from cotenant.predictors import Load

# Columns of a profile, in percent. A profile may have any of them.
USE = ("l2_util_pct", "dram_util_pct", "sm_util_pct", "sm_throughput_pct", "dram_throughput_pct")
TRAITS = ("floor", "by_batch", "by_share", "batch", "share", *USE)
# Places in TRAITS.
REACTION = range(3)
TO_ROWS = range(2)
PLACE = range(3, 5)
SHARE = range(4, 5)
USED = range(5, len(TRAITS))
LEAST = 0.01  # percent: below, a use is none


def load_features(profile: Profile, load: Load) -> NDArray[np.float64]:
    """One number for each of TRAITS; NaN for what the profile does not tell.

    floor: log of the latency of one row on the largest share over this one's. by_batch, by_share: exponents by which
    the latency grows with rows, and falls with the share. batch: log. share: of the whole. The rest: logs of percents.
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
            *(math.log(max(used[name], LEAST)) if name in used else math.nan for name in USE),
        ]
    )


def _exponent(low: float, high: float, times: float) -> float:
    return math.log(high / low) / math.log(times) if times > 1 else 0.0
