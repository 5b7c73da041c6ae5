"""The devices of this machine as a provider: given at once, and gone while the backend says that they are lost."""

from __future__ import annotations

from cotenant.backends import Backend
from cotenant.control.adaptation import Acquire, DevicesFound, DevicesGone, Release
from cotenant.control.provider import DeviceOffer, FixedProvider, ProviderEvent
from cotenant.core.identity import DeviceId
from cotenant.errors import DeviceError

POLL_SECONDS = 0.5  # between questions to the backend, which is made for two a second


class LocalProvider:
    """Offer the devices of a backend, all of which are in use from the beginning.

    A device that is lost is told as gone, and as found again when it is back. One that was not there before, as of a
    node that has joined, is told as found. Raises DeviceError for a kind of which
    the backend does not know how many there are.
    """

    def __init__(self, backend: Backend) -> None:
        devices = _devices(backend)
        self._backend = backend
        self._fixed = FixedProvider(devices, used=devices)
        self._used = set(devices)
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
                    self._used.update(devices)
                    working = tuple(device for device in devices if device not in self._lost)
                    told += [DevicesFound(working)] if working else []
                case DevicesGone(devices):
                    self._used.difference_update(devices)
                    told.append(event)
                case _:
                    told.append(event)
        return told + self._joined() + self._health()

    def _joined(self) -> list[ProviderEvent]:
        """Take in devices that there are now and were not before."""
        fresh = tuple(device for device in _devices(self._backend) if not self._fixed.knows(device))
        self._fixed.add(fresh)
        self._used.update(fresh)
        return [DevicesFound(fresh)] if fresh else []

    def _health(self) -> list[ProviderEvent]:
        """Compare what is lost with what was lost when last asked."""
        before, self._lost = self._lost, self._backend.lost()
        told: list[ProviderEvent] = [
            DevicesGone((device,), reason)
            for device, reason in self._lost.items()
            if device not in before and device in self._used
        ]
        back = tuple(device for device in before if device not in self._lost and device in self._used)
        return [*told, DevicesFound(back)] if back else told


def _devices(backend: Backend) -> list[DeviceId]:
    devices = []
    for kind in backend.fleet():
        if kind.count is None:
            raise DeviceError(f"the machine does not say how many devices of kind {kind.name!r} it has; set a count")
        devices += [DeviceId(kind.name, index) for index in range(kind.count)]
    return devices
