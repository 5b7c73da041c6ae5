"""One model beside one neighbour on a device: what predictors of interference learn from."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cotenant.core.profile import Profile
from cotenant.predictors import Load


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """alone, together: seconds that a batch of the victim takes without and with the neighbour."""

    victim: Load
    neighbour: Load
    alone: float
    together: float


def measured(profiles: Iterable[Profile]) -> dict[Load, float]:
    """Seconds alone as they were measured, which a profile's curves are not where they had to be made monotone."""
    return {Load(each.model, point.batch, point.share): point.latency for each in profiles for point in each.points}
