"""The baseline that does not scale."""

from __future__ import annotations

import msgspec

from cotenant.control.scaling.context import ScalingContext


class StaticScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Want the same devices at all times. devices: by kind."""

    devices: dict[str, int]
    horizon: float = 0.0

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        return dict(self.devices)
