"""Where devices come from: a provider is asked for what a controller acquires and releases, and answers in its time."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from cotenant.control.adaptation import Acquire, AcquisitionFailed, DevicesFound, DevicesGone, Release
from cotenant.core.identity import DeviceId

ProviderEvent = DevicesFound | DevicesGone | AcquisitionFailed


class DeviceOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider says of a kind of device. price: of one, an hour; None where it has none. launch_seconds: until
    one can be used. quota: how many it gives at most; None: any number."""

    kind: str
    price: float | None = None
    launch_seconds: float = 0.0
    quota: int | None = None


class DeviceProvider(Protocol):
    """Give and take devices. It reads no clock: its driver says what time it is, and asks for news in time."""

    def offers(self) -> tuple[DeviceOffer, ...]:
        """Return the kinds that may be asked for."""
        ...

    def handle(self, command: Acquire | Release, now: float) -> None:
        """Take a command; what comes of it is among `news`, now or later. now: never before that of an earlier call."""
        ...

    @property
    def due(self) -> float:
        """When there is news next; `inf` where there will be none without another command."""
        ...

    def news(self, now: float) -> list[ProviderEvent]:
        """Return what happened up to `now` and was not told yet, in the order in which it happened."""
        ...


class FixedProvider:
    """Give the devices of a fixed set, at once, and take them back: a machine's own, or a reserved cluster.

    devices: all there are. used: those of them that are in use from the beginning.
    """

    def __init__(self, devices: Iterable[DeviceId], used: Iterable[DeviceId] = ()) -> None:
        self._free = sorted(set(devices) - set(used))
        self._used = set(used)
        self._news: deque[ProviderEvent] = deque()
        self._now = 0.0

    @property
    def devices(self) -> set[DeviceId]:
        """All that there are."""
        return self._used.union(self._free)

    @property
    def used(self) -> frozenset[DeviceId]:
        """Those that are in use."""
        return frozenset(self._used)

    def use(self, devices: Iterable[DeviceId]) -> tuple[DeviceId, ...]:
        """Have devices in use from now on, which need not be of the set so far; return those that were not in use."""
        fresh = tuple(device for device in devices if device not in self._used)
        self._free = [device for device in self._free if device not in fresh]
        self._used.update(fresh)
        return fresh

    def drop(self, devices: Collection[DeviceId]) -> None:
        """Have devices in the set no more, whether in use or not."""
        self._free = [device for device in self._free if device not in devices]
        self._used.difference_update(devices)

    def offers(self) -> tuple[DeviceOffer, ...]:
        counts = Counter(device.kind for device in sorted(self.devices))
        return tuple(DeviceOffer(kind=kind, quota=count) for kind, count in counts.items())

    def handle(self, command: Acquire | Release, now: float) -> None:
        self._now = now
        match command:
            case Acquire(kind, count):
                self._acquire(kind, count)
            case Release(devices):
                self._release(devices)

    @property
    def due(self) -> float:
        return self._now if self._news else math.inf

    def news(self, now: float) -> list[ProviderEvent]:
        told = list(self._news)
        self._news.clear()
        return told

    def _acquire(self, kind: str, count: int) -> None:
        given = tuple(device for device in self._free if device.kind == kind)[:count]
        if given:
            self._free = [device for device in self._free if device not in given]
            self._used.update(given)
            self._news.append(DevicesFound(given))
        if count > len(given):
            there = sum(1 for device in self.devices if device.kind == kind)
            reason = (
                f"all {there} devices of kind {kind!r} are in use or lost"
                if there
                else f"there is no device of kind {kind!r}"
            )
            self._news.append(AcquisitionFailed(kind, count - len(given), reason))

    def _release(self, devices: tuple[DeviceId, ...]) -> None:
        known = tuple(device for device in devices if device in self._used)
        self._used.difference_update(known)
        self._free = sorted((*self._free, *known))
        if known:
            self._news.append(DevicesGone(known, "released"))
