"""Keep count of the devices that a controller has, has asked for, and gives back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from cotenant.control.lead_time import LeadTime
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Plan

LAUNCHES = 3.0  # times what a launch takes, for which a device is waited for, and longer
MOST_LOST = 1000  # devices that are gone and remembered: those of a cloud have new names each time
RELEASED_WITHIN = 0.9  # seconds in which a provider takes a device back, if it does


class HeldDevices:
    """Hold devices, launches under way and refusals. Times are in seconds of any monotonic clock.

    wanted: how many by kind, as the last solution has it; None: as many as there are. lead: learns how long launches
    take. launch_timeout: seconds after which a device that was asked for is not expected any more, beyond LAUNCHES
    times what a launch takes. retry, longest_retry: seconds until devices that could not be had are asked for again,
    doubling with each refusal in a row.
    """

    def __init__(
        self, devices: Iterable[DeviceId], lead: LeadTime, launch_timeout: float, retry: float, longest_retry: float
    ) -> None:
        self.devices = dict.fromkeys(devices)  # in the order in which they came
        self.launching: Counter[str] = Counter()
        self.wanted: Mapping[str, int] | None = None
        self._lead = lead
        self._launch_timeout = launch_timeout
        self._retry = retry
        self._longest_retry = longest_retry
        self._releasing: dict[DeviceId, float] = {}  # since when those have been given back that are not gone yet
        self._lost: dict[DeviceId, None] = {}  # gone, though nobody gave them back; the latest last
        self._refusals = 0  # in a row
        self._ask_again = math.inf  # when

    def found(self, devices: Iterable[DeviceId], now: float) -> list[DeviceId]:
        """Take devices that can be used; return those that are new. One that was lost and is back is no launch."""
        fresh = [device for device in dict.fromkeys(devices) if device not in self.devices]
        for device in fresh:
            self.devices[device] = None
            if device in self._lost:
                del self._lost[device]
                continue
            self.launching[device.kind] = max(0, self.launching[device.kind] - 1)
            self._lead.found(device.kind, now)
            self._refusals = 0
        return fresh

    def gone(self, devices: Iterable[DeviceId]) -> list[DeviceId]:
        """Take devices that cannot be used any more; return those that were there."""
        gone = [device for device in dict.fromkeys(devices) if device in self.devices]
        for device in gone:
            del self.devices[device]
            if self._releasing.pop(device, None) is None:
                self._lost[device] = None
        for device in list(self._lost)[:-MOST_LOST]:
            del self._lost[device]
        return gone

    def describe_lost(self, plan: Plan) -> str:
        """Say which devices of a plan are gone though nobody gave them back; empty where none is."""
        lost = sorted(self._lost.keys() & {device.id for device in plan.devices})
        return f"{', '.join(lost)} is gone" if lost else ""

    def kept(self, now: float) -> set[DeviceId]:
        """Return the devices that can be planned for: not those just given back, which may yet stay where they are."""
        return {device for device in self.devices if now - self._releasing.get(device, -math.inf) >= RELEASED_WITHIN}

    def acquire(self, now: float) -> dict[str, int]:
        """Return how many of each kind are missing, and count them as asked for."""
        self._ask_again = math.inf
        there = Counter(device.kind for device in self.kept(now))
        asked = {}
        for kind, count in sorted((self.wanted or {}).items()):
            missing = count - there[kind] - self.launching[kind]
            if missing > 0:
                asked[kind] = missing
                self.launching[kind] += missing
                self._lead.acquired(kind, missing, now)
        return asked

    def overdue(self, now: float) -> dict[str, int]:
        """Return how many devices of each kind were asked for so long ago that they are not expected any more: a
        provider may give fewer than it was asked for, and say nothing."""
        return self._lead.acquired_before(now - LAUNCHES * self._lead.launch - self._launch_timeout)

    def refused(self, kind: str, count: int, now: float) -> bool:
        """Hear that devices that were asked for do not come; return whether this is the first refusal in a row."""
        self._lead.failed(kind, count)
        self.launching[kind] = max(0, self.launching[kind] - count)
        self._ask_again = now + min(self._retry * 2.0 ** min(self._refusals, 64), self._longest_retry)
        self._refusals += 1
        return self._refusals == 1

    def ask_again(self, now: float) -> bool:
        """Return whether it is time to ask once more for what could not be had."""
        return now >= self._ask_again

    def release(self, used: Collection[DeviceId], now: float) -> list[DeviceId]:
        """Return devices that neither the plan in force uses nor the last solution wants, and count them as given
        back."""
        if self.wanted is None:
            return []
        kept = self.kept(now)
        there = Counter(device.kind for device in kept)
        surplus = []
        for device in sorted(kept, reverse=True):
            if device not in used and there[device.kind] > self.wanted.get(device.kind, 0):
                there[device.kind] -= 1
                surplus.append(device)
        self._releasing |= dict.fromkeys(surplus, now)
        return surplus

    def launches(self) -> dict[str, int]:
        """Return by kind how many devices are on their way."""
        return {kind: count for kind, count in sorted(self.launching.items()) if count}

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert all(count >= 0 for count in self.launching.values())
        assert self._releasing.keys() <= self.devices.keys()
        assert not self._lost.keys() & self.devices.keys()
        assert len(self._lost) <= MOST_LOST
