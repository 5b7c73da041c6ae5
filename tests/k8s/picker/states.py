"""Servers in virtual time: a real dispatcher whose batches take exactly as long as predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.admission_state import AdmissionState, ModelTarget, read_lane
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Arrived, Command, Finished, LaneModel, LaneSpec, Ready, Reply, WakeAt, Woke

TARGET = 0.1  # seconds


def latencies(batch: int, scale: float = 1.0) -> tuple[float, ...]:
    """10 ms and 1 ms a row, times a scale."""
    return tuple(scale * (0.010 + 0.001 * rows) for rows in range(1, batch + 1))


class VirtualServer:
    """A server that runs in virtual time. lanes: for each, its models and how slow it is."""

    def __init__(self, *lanes: Mapping[str, float], batch: int = 4, target: float = TARGET) -> None:
        self.dispatcher = Dispatcher()
        self.target = target
        self.outcomes: dict[int, Outcome] = {}
        self.finished: dict[int, float] = {}
        self._wakes: list[tuple[float, LaneId]] = []
        specs = tuple(
            LaneSpec(
                id=LaneId(DeviceId("cpu"), slot),
                models=tuple(LaneModel(model=name, latencies=latencies(batch, slow)) for name, slow in models.items()),
            )
            for slot, models in enumerate(lanes)
        )
        self.models = {name for models in lanes for name in models}
        self.dispatcher.handle(Applied(specs), 0.0)
        for spec in specs:
            self.dispatcher.handle(Ready(spec.id), 0.0)

    def state(self, now: float, *, accepting: bool = True) -> AdmissionState:
        self.advance(now)
        return AdmissionState(
            accepting=accepting,
            models={name: ModelTarget(timeout=self.target) for name in self.models},
            lanes=tuple(read_lane(lane, now) for lane in self.dispatcher.lanes.values()),
        )

    def arrive(self, id: int, model: str, deadline: float, now: float) -> bool:
        """Let a request arrive; return whether it was admitted."""
        self.advance(now)
        self._take(self.dispatcher.handle(Arrived(Request(id, model, now, deadline)), now), now)
        return self.outcomes.get(id) is not Outcome.REJECTED

    def advance(self, now: float) -> None:
        """Let batches end, and timers fire, that are due by then, in order."""
        while True:
            ends = [(lane.free_at, 0, lane.id) for lane in self.dispatcher.lanes.values() if lane.batch is not None]
            due = min([*ends, *((at, 1, lane) for at, lane in self._wakes)], default=(math.inf, 0, None))
            at, kind, lane_id = due
            if at > now or lane_id is None:
                return
            if kind == 0:
                batch = self.dispatcher.lanes[lane_id].batch
                assert batch is not None
                self._take(self.dispatcher.handle(Finished(lane_id, batch.id), at), at)
            else:
                self._wakes.remove((at, lane_id))
                self._take(self.dispatcher.handle(Woke(lane_id, at), at), at)

    def _take(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Reply):
                for request in command.requests:
                    self.outcomes[request.id] = command.outcome
                    self.finished[request.id] = now
            elif isinstance(command, WakeAt):
                self._wakes.append((command.time, command.lane))
