"""Have no devices here: those of nodes are all there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cotenant.backends import Launch
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.errors import DeviceError


class NoDevices:
    name = "none"
    divides = True

    def fleet(self) -> tuple[Kind, ...]:
        return ()

    def capacity_fingerprint(self) -> str:
        return "none"

    def isolation(self) -> str:
        return "no devices of this machine"

    def hardware_ids(self) -> tuple[str, ...]:
        return ()

    def with_ceilings(self) -> NoDevices:
        return self

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        raise DeviceError(f'{lane}: this machine gives no device (backend = "none"); plan again')

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        return {}

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        pass

    def close(self, lane: LaneId) -> None:
        pass

    def open_job(self, device: DeviceId) -> Launch:
        raise DeviceError(f'{device}: this machine gives no device (backend = "none"); jobs run on those of its own')

    def lost(self) -> dict[DeviceId, str]:
        return {}

    def stop(self) -> None:
        pass
