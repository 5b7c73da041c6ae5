"""Describe failures of devices and workers during a simulated run."""

from __future__ import annotations

import math

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import ConfigError

NOTICED = 0.8  # seconds until a server notices that it does not hear a node any more: 0.7 to 0.9


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Let several parts fail together at `time`, and recover `back` seconds later, or never; workers then start anew.

    parts: a worker by its lane (``v100-0/1``), a device by its name (``v100-0``). nodes: are cut off with all of their
    devices. What is sent to one after `time` gets no answer, and the server notices `noticed` seconds later; where a
    node is back by then, its answers come late, and nothing is lost.
    """

    parts: tuple[DeviceId | LaneId, ...] = ()
    time: float
    back: float = math.inf
    nodes: tuple[str, ...] = ()
    noticed: float = NOTICED

    def __post_init__(self) -> None:
        where = f"a failure of {self.names}"
        if not self.parts and not self.nodes:
            raise ConfigError(
                "a failure of nothing; name a worker such as v100-0/1, devices such as v100-0, or nodes such as node-a"
            )
        if not (math.isfinite(self.noticed) and self.noticed >= 0):
            raise ConfigError(f"{where} that is noticed after {self.noticed:g} s; use 0 or more")
        if not (math.isfinite(self.time) and self.time >= 0):
            raise ConfigError(f"{where} at {self.time:g} s; use 0 or more")
        if not self.back >= 0:
            raise ConfigError(f"{where} that ends after {self.back:g} s; use 0 or more")

    @property
    def names(self) -> str:
        """What fails, in words."""
        return ", ".join((*self.parts, *self.nodes))

    def hits(self, lane: LaneId) -> bool:
        """Return whether a lane is on a failed part."""
        return lane in self.parts or self.loses(lane.device)

    def loses(self, device: DeviceId) -> bool:
        """Return whether a device is a failed part, or on a node that is cut off."""
        return device in self.parts or device.node in self.nodes

    @property
    def is_noticed(self) -> bool:
        """Whether a server notices that nodes are cut off, before they are back."""
        return self.back > self.noticed

    def silences(self, lane: LaneId, time: float) -> bool:
        """Return whether an answer from a lane at that time does not arrive then."""
        return lane.device.node in self.nodes and self.covers(time)

    def covers(self, time: float) -> bool:
        """Return whether the failure lasts at a time."""
        return self.time <= time < self.time + self.back
