"""A simulated cloud: devices take time to launch and cost money, and what the cloud says is not always so.

It may give fewer devices than asked for and say nothing, give them late, give another kind, say that it gave a device
that does not work, or take one away. All of that is drawn from one seed, so a run can be repeated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from cotenant.control.adaptation import Acquire, AcquisitionFailed, DevicesFound, DevicesGone, Release
from cotenant.control.provider import DeviceOffer, ProviderEvent
from cotenant.core.identity import DeviceId
from cotenant.errors import ConfigError

_NEVER_CAME = "it was never there"


class CloudKind(msgspec.Struct, frozen=True, kw_only=True):
    """How a cloud gives devices of one kind.

    price: of one, an hour. launch_seconds: median until one is ready; launch_cv: standard deviation over mean of the
    lognormal that it is drawn from. quota: devices at most, launching ones included; None: any number.

    Probabilities, for each device that is asked for: failure, it is not given, and the cloud says so when it would have
    been ready; silent_failure: the same, unsaid; wrong_kind: one of `other` is given instead; broken: it is announced
    and does not work, which the cloud notices and says after `broken_seconds`; late: it takes `late_factor` times as
    long. lifetime: mean seconds until the cloud takes a device away, exponentially distributed; `inf`: never.
    """

    kind: str
    price: float = 0.0
    launch_seconds: float = 0.0
    launch_cv: float = 0.0
    quota: int | None = None
    failure: float = 0.0
    silent_failure: float = 0.0
    wrong_kind: float = 0.0
    other: str = ""
    broken: float = 0.0
    broken_seconds: float = 120.0
    late: float = 0.0
    late_factor: float = 5.0
    lifetime: float = math.inf

    def __post_init__(self) -> None:
        """Raise ConfigError for values that make no sense."""
        where = f"cloud devices of kind {self.kind!r}"
        for name in ("failure", "silent_failure", "wrong_kind", "broken", "late"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{where}: {name} = {getattr(self, name):g} is a probability, from 0 to 1")
        if self.failure + self.silent_failure + self.wrong_kind + self.broken > 1:
            raise ConfigError(f"{where}: the probabilities of all that may go wrong exceed 1; lower one")
        for name in ("price", "launch_seconds", "launch_cv", "broken_seconds", "late_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{where}: {name} = {getattr(self, name):g} must be finite and at least 0")
        if not self.lifetime > 0:
            raise ConfigError(f"{where}: a lifetime of {self.lifetime:g} s must be above 0")
        if self.wrong_kind and not self.other:
            raise ConfigError(f"{where}: wrong_kind needs `other`, the kind that is given instead")


class _Device(msgspec.Struct):
    """since: when it began to cost. announced: whether the cloud said that it is there."""

    since: float
    announced: bool = False


class SimulatedCloud:
    """Give devices as `CloudKind`s say. used: devices that are there from the beginning.

    Raises ConfigError for a kind that stands twice, for another kind that the cloud does not have, and for a used
    device of neither.
    """

    def __init__(self, kinds: Iterable[CloudKind], *, seed: int, used: Sequence[DeviceId] = ()) -> None:
        self._kinds: dict[str, CloudKind] = {}
        for kind in kinds:
            if kind.kind in self._kinds:
                raise ConfigError(f"two entries for cloud devices of kind {kind.kind!r}; each may stand once")
            self._kinds[kind.kind] = kind
        for name in [kind.other for kind in self._kinds.values() if kind.other] + [device.kind for device in used]:
            if name not in self._kinds:
                raise ConfigError(f"the cloud has no devices of kind {name!r}; it has {', '.join(self._kinds)}")
        self._random = np.random.default_rng(seed)
        self._devices = {device: _Device(0.0, announced=True) for device in used}
        self._broken: set[DeviceId] = set()
        self._agenda: list[tuple[float, int, ProviderEvent]] = []
        self._order = itertools.count()
        self._paid: dict[str, float] = dict.fromkeys(self._kinds, 0.0)  # device-seconds of devices that are gone
        self._numbers = {
            name: itertools.count(max([-1, *(device.index for device in self._devices if device.kind == name)]) + 1)
            for name in self._kinds
        }
        for device in self._devices:
            self._plan_end(device, 0.0)

    def offers(self) -> tuple[DeviceOffer, ...]:
        return tuple(
            DeviceOffer(kind=each.kind, price=each.price, launch_seconds=each.launch_seconds, quota=each.quota)
            for each in self._kinds.values()
        )

    def handle(self, command: Acquire | Release, now: float) -> None:
        match command:
            case Acquire(kind, count):
                self._acquire(kind, count, now)
            case Release(devices):
                self._release(devices, now)

    @property
    def due(self) -> float:
        return self._agenda[0][0] if self._agenda else math.inf

    def news(self, now: float) -> list[ProviderEvent]:
        told: list[ProviderEvent] = []
        while self._agenda and self._agenda[0][0] <= now:
            time, _, event = heapq.heappop(self._agenda)
            told += self._happen(event, time)
        return told

    def make_honest(self) -> None:
        """From now on give all that is asked for, when it is said to be there, and take nothing away any more."""
        honest = {
            "launch_cv": 0.0,
            "lifetime": math.inf,
            **dict.fromkeys(("failure", "silent_failure", "wrong_kind", "broken", "late"), 0.0),
        }
        for name, kind in self._kinds.items():
            self._kinds[name] = msgspec.structs.replace(kind, **honest)

    def works(self, device: DeviceId) -> bool:
        """Tell whether a device is there and runs anything, whatever the cloud has said of it."""
        return device in self._devices and self._devices[device].announced and device not in self._broken

    def device_seconds(self, now: float) -> dict[str, float]:
        """Return by kind the seconds of devices so far, from the request for each until it was gone."""
        seconds = dict(self._paid)
        for device, state in self._devices.items():
            seconds[device.kind] += now - state.since
        return seconds

    def cost(self, now: float) -> float:
        """Return what the devices have cost so far."""
        return math.fsum(seconds / 3600 * self._kinds[kind].price for kind, seconds in self.device_seconds(now).items())

    def _acquire(self, name: str, count: int, now: float) -> None:
        kind = self._kinds.get(name)
        if kind is None:
            self._later(now, AcquisitionFailed(name, count, f"the cloud has no devices of kind {name!r}"))
            return
        there = sum(device.kind == name for device in self._devices)
        given = count if kind.quota is None else max(0, min(count, kind.quota - there))
        if given < count:
            reason = f"the quota of {kind.quota} devices of kind {name!r} is used up"
            self._later(now, AcquisitionFailed(name, count - given, reason))
        for _ in range(given):
            self._launch(kind, now)

    def _launch(self, kind: CloudKind, now: float) -> None:
        ready = now + self._launch_seconds(kind)
        outcome = self._outcome(kind)
        if outcome == "failure":
            self._later(ready, AcquisitionFailed(kind.kind, 1, "the cloud has no capacity now"))
        if outcome in ("failure", "silent_failure"):
            return
        device = self._number(kind.other if outcome == "wrong_kind" else kind.kind)
        self._devices[device] = _Device(now)
        self._later(ready, DevicesFound((device,)))
        if outcome == "broken":
            self._broken.add(device)
            self._later(ready + kind.broken_seconds, DevicesGone((device,), _NEVER_CAME))
        else:
            self._plan_end(device, ready)

    def _outcome(self, kind: CloudKind) -> str:
        draw = float(self._random.random())
        for outcome in ("failure", "silent_failure", "wrong_kind", "broken"):
            probability: float = getattr(kind, outcome)
            if draw < probability:
                return outcome
            draw -= probability
        return "given"

    def _plan_end(self, device: DeviceId, start: float) -> None:
        mean = self._kinds[device.kind].lifetime
        if mean < math.inf:
            end = start + float(self._random.exponential(mean))
            self._later(end, DevicesGone((device,), "the cloud took it away"))

    def _launch_seconds(self, kind: CloudKind) -> float:
        sigma = math.sqrt(math.log1p(kind.launch_cv**2))
        seconds = kind.launch_seconds * math.exp(sigma * float(self._random.standard_normal()))
        return seconds * (kind.late_factor if float(self._random.random()) < kind.late else 1.0)

    def _number(self, kind: str) -> DeviceId:
        """Return a name that was never given to another device: late news of one must not be taken for another's."""
        return DeviceId(kind, next(self._numbers[kind]))

    def _release(self, devices: tuple[DeviceId, ...], now: float) -> None:
        gone = tuple(device for device in devices if device in self._devices)
        for device in gone:
            self._remove(device, now)
        if gone:
            self._later(now, DevicesGone(gone, "released"))

    def _happen(self, event: ProviderEvent, time: float) -> list[ProviderEvent]:
        """Carry out what was planned for a time. News of a device that was released meanwhile is void."""
        match event:
            case DevicesFound((device,)):
                if device not in self._devices:
                    return []
                self._devices[device].announced = True
            case DevicesGone((device,), reason) if reason != "released":
                if device not in self._devices:
                    return []
                self._remove(device, time)
            case _:
                pass
        return [event]

    def _remove(self, device: DeviceId, now: float) -> None:
        self._paid[device.kind] += now - self._devices.pop(device).since
        self._broken.discard(device)

    def _later(self, time: float, event: ProviderEvent) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), event))
