"""Describe failures of devices and workers during a simulated run."""

from __future__ import annotations

import math

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import ConfigError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Let several parts fail together at `time`, and recover `back` seconds later, or never; workers then start anew.

    parts: a worker by its lane (``v100-0/1``), a device by its name (``v100-0``), a node by the names of its devices.
    """

    parts: tuple[DeviceId | LaneId, ...]
    time: float
    back: float = math.inf

    def __post_init__(self) -> None:
        where = f"a failure of {', '.join(self.parts)}"
        if not self.parts:
            raise ConfigError("a failure of nothing; name a worker such as v100-0/1, or devices such as v100-0")
        if not (math.isfinite(self.time) and self.time >= 0):
            raise ConfigError(f"{where} at {self.time:g} s; take 0 or more")
        if not self.back >= 0:
            raise ConfigError(f"{where} that ends after {self.back:g} s; take 0 or more")

    def hits(self, lane: LaneId) -> bool:
        """Return whether a lane is on a failed part."""
        return lane in self.parts or lane.device in self.parts

    def covers(self, time: float) -> bool:
        """Return whether the failure lasts at a time."""
        return self.time <= time < self.time + self.back
