"""Fake a backend: a worker sleeps for as long as the profile says, and runs nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cotenant.backends import Launch
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE


class Fake:
    name = "fake"
    divides = True

    def __init__(self, kinds: tuple[Kind, ...] = (Kind(name="fake", cuts=tuple(range(50, WHOLE + 1, 50))),)) -> None:
        self._kinds = kinds

    def fleet(self) -> tuple[Kind, ...]:
        return self._kinds

    def capacity_fingerprint(self) -> str:
        return "none"

    def isolation(self) -> str:
        return "no isolation: workers sleep for the profiled time"

    def hardware_ids(self) -> tuple[str, ...]:
        return ()

    def with_ceilings(self) -> Fake:
        return self

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(fake=True)

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        return dict.fromkeys(shares, Launch(fake=True))

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        pass

    def close(self, lane: LaneId) -> None:
        pass

    def open_job(self, device: DeviceId) -> Launch:
        return Launch(fake=True)

    def lost(self) -> dict[DeviceId, str]:
        return {}

    def stop(self) -> None:
        pass
