"""The devices of a backend as a provider: given at once, and gone while the backend says that they are lost."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.backends import Backend
from cotenant.control.adaptation import Acquire, DevicesFound, DevicesGone, Release
from cotenant.control.controller_built import known_devices
from cotenant.control.provider import DeviceOffer, FixedProvider, ProviderEvent
from cotenant.core.identity import DeviceId
from cotenant.core.plan import Plan
from cotenant.errors import DeviceError
from cotenant.planners import Problem

POLL_SECONDS = 0.5  # between questions to the backend, which is made for two a second


class LocalProvider:
    """Offer the devices of a backend that the problem in force has, all of which are in use from the beginning.

    A device that is lost is told as gone, and as found again when it is back. One that the problem did not have before,
    as of a node that has joined, is told as found, and so is one that was given back and that the plan in force uses
    nevertheless, as after a reload. A device that the backend has and the problem has not is nobody's to plan for: it
    would be released at once, and the rates taken for what can be served without it. One that the problem has no more
    is told as gone, and is none that can be asked for.

    in_force: returns the problem and the plan in force. Raises DeviceError for a kind of which the backend does not
    know how many there are.
    """

    def __init__(self, backend: Backend, in_force: Callable[[], tuple[Problem, Plan]]) -> None:
        self._backend = backend
        self._in_force = in_force
        _devices(backend)  # known to be countable from here on
        devices = known_devices(*in_force())
        self._fixed = FixedProvider(devices, used=devices)
        self._lost: dict[DeviceId, str] = {}
        self._due = 0.0

    def offers(self) -> tuple[DeviceOffer, ...]:
        return self._fixed.offers()

    def handle(self, command: Acquire | Release, now: float) -> None:
        self._fixed.handle(command, now)
        self._due = now

    @property
    def due(self) -> float:
        return self._due

    def news(self, now: float) -> list[ProviderEvent]:
        self._due = now + POLL_SECONDS
        told: list[ProviderEvent] = []
        for event in self._fixed.news(now):
            match event:
                case DevicesFound(devices):
                    working = tuple(device for device in devices if device not in self._lost)
                    told += [DevicesFound(working)] if working else []
                case _:
                    told.append(event)
        return told + self._changes()

    def _changes(self) -> list[ProviderEvent]:
        """Compare what can be used with what could be when last asked."""
        problem, plan = self._in_force()
        known = set(known_devices(problem, plan))
        before, self._lost = self._lost, self._unusable(known)
        gone = sorted(self._fixed.used & self._lost.keys() - before.keys())
        self._fixed.drop(self._fixed.devices - known)
        back = self._fixed.used & before.keys()
        fresh = self._fixed.use(sorted(known - self._fixed.devices | {device.id for device in plan.devices}))
        told: list[ProviderEvent] = [DevicesGone((device,), self._lost[device]) for device in gone]
        found = tuple(sorted(back.union(fresh) - self._lost.keys()))
        return [*told, DevicesFound(found)] if found else told

    def _unusable(self, known: set[DeviceId]) -> dict[DeviceId, str]:
        """Return why devices cannot be used now. known: those of the problem in force."""
        reasons = self._backend.lost()
        left_out = dict.fromkeys(self._fixed.devices - known, "no plan is made for it any more")
        missing = dict.fromkeys(known.difference(_devices(self._backend)), "it is not there any more")
        return left_out | missing | reasons


def _devices(backend: Backend) -> list[DeviceId]:
    devices = []
    for kind in backend.fleet():
        if kind.count is None:
            raise DeviceError(f"the machine does not say how many devices of kind {kind.name!r} it has; set a count")
        devices += [DeviceId(kind.name, index) for index in range(kind.count)]
    return devices
