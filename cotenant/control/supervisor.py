"""Decide when workers start, restart, are killed or declared permanently failed, also when their device is lost.

One supervisor serves the simulator and the live server: events in, commands out. It never waits, reads no clock and
owns no process. Every `StartLane` ends in `LaneReady`, `StartFailed`, `LaneLost`, `LaneFailed` or, where it was stopped
before, `LaneStopped`; every `StopLane` in `LaneStopped`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cotenant.control.events import (
    ClosePartition,
    DeviceRestored,
    DevicesLost,
    KeepStandbys,
    KillWorker,
    LaneFailed,
    LaneLost,
    LaneReady,
    LaneRestarts,
    LanesDown,
    LaneStopped,
    PartitionClosed,
    PromoteWorker,
    RetireWorker,
    ReviveLane,
    SpawnWorker,
    StartFailed,
    StartLane,
    StopLane,
    SupervisorCommand,
    SupervisorEvent,
    WakeAt,
    Woke,
    WorkerBusy,
    WorkerReady,
    WorkerRefused,
    WorkersExited,
)
from cotenant.control.supervised_lane import LaneRecord, LaneState, SupervisedLane
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import WorkerError

HANGING = "took longer than"  # in the reason for which a worker that hangs is killed


class Supervisor:
    """Decide the life of workers. Feed it events in order of time; carry out its commands in order."""

    def __init__(self, options: SupervisorOptions | None = None) -> None:
        self.options = options or SupervisorOptions()
        self._lanes: dict[LaneId, LaneRecord] = {}
        self._lost: dict[DeviceId, str] = {}  # device → why nothing can run on it
        self._incarnations = 0

    def handle(self, event: SupervisorEvent, now: float) -> list[SupervisorCommand]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock. Raises WorkerError
        for a start of a lane that is there already."""
        match event:
            case WorkerBusy():
                return self._busy(event, now)
            case WorkerReady(lane, incarnation):
                return self._ready(lane, incarnation, now)
            case WorkersExited(workers, reason):
                return self._exited(workers, reason, now)
            case WorkerRefused(lane, incarnation, reason):
                return self._refused(lane, incarnation, reason, now)
            case Woke(lane, time):
                return self._woke(lane, time, now)
            case StartLane():
                return self._start(event, now)
            case StopLane(lane, grace):
                return self._stop(lane, grace)
            case PartitionClosed(lane, incarnation):
                return self._closed(lane, incarnation)
            case DevicesLost(devices):
                return self._devices_lost(devices)
            case DeviceRestored(device):
                return self._device_restored(device, now)
            case ReviveLane(lane):
                return self._revive(lane, now)
            case KeepStandbys(lanes):
                return self._keep_standbys(lanes, now)

    def lanes(self) -> dict[LaneId, SupervisedLane]:
        """Return the observed lanes by name."""
        return {lane.id: lane.observed() for lane in self._lanes.values()}

    def state(self, lane: LaneId) -> LaneState | None:
        """Return the state of a lane; None where there is no such lane."""
        known = self._lanes.get(lane)
        return None if known is None else known.state

    def start_seconds(self, lane: LaneId) -> float:
        """Return how long the last start of a lane's worker took; 0 where it never started."""
        return self._lanes[lane].took if lane in self._lanes else 0.0

    @property
    def standbys(self) -> frozenset[LaneId]:
        """Return the lanes that have a standby worker, those included that were killed and are not gone yet."""
        return frozenset(lane.id for lane in self._lanes.values() if lane.standby.incarnation)

    @property
    def lost(self) -> dict[DeviceId, str]:
        """Return by device why nothing can run on it."""
        return dict(self._lost)

    # Requests

    def _start(self, start: StartLane, now: float) -> list[SupervisorCommand]:
        if start.lane in self._lanes:
            raise WorkerError(f"lane '{start.lane}' has a worker already; stop it first")
        lane = LaneRecord(start)
        reason = self._lost.get(lane.device)
        if reason is not None and not lane.retry:
            return [StartFailed(lane.id, reason)]
        self._lanes[lane.id] = lane
        if reason is not None:
            return self._lose(lane, reason)
        return self._spawn(lane, now)

    def _stop(self, lane_id: LaneId, grace: float) -> list[SupervisorCommand]:
        lane = self._lanes.get(lane_id)
        if lane is None:
            return [LaneStopped(lane_id)]
        was, lane.state = lane.state, LaneState.STOPPING
        lane.start_failed = False
        lane.due = math.inf
        if was is LaneState.STOPPING:
            return []
        commands = self._end_standby(lane)
        if not lane.worker:
            return commands or self._closed_once_empty(lane)
        if was is LaneState.READY:
            return [*commands, RetireWorker(lane.id, lane.worker, grace)]
        return [*commands, *self._kill(lane, "it was stopped while it loaded its models")]

    def _revive(self, lane_id: LaneId, now: float) -> list[SupervisorCommand]:
        lane = self._lanes.get(lane_id)
        if lane is not None and lane.standby.failures >= self.options.lives:
            lane.standby.failures = 0
            if lane.state is LaneState.READY:
                return self._stand_by(lane, now)
        if lane is None or lane.state is not LaneState.FAILED:
            return []
        lane.quick_deaths = lane.refusals = 0
        lane.fresh = True
        reason = self._lost.get(lane.device)
        return self._restart(lane, now) if reason is None else self._lose(lane, reason)

    # Workers

    def _current(self, lane_id: LaneId, incarnation: int) -> LaneRecord | None:
        """Return the lane that this incarnation serves; None for late events."""
        lane = self._lanes.get(lane_id)
        return lane if lane is not None and lane.worker and lane.worker == incarnation else None

    def _spawn(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        self._incarnations += 1
        lane.worker = lane.last = self._incarnations
        lane.killed = False
        lane.spawned = now
        lane.due = now + self.options.start_timeout
        commands: list[SupervisorCommand] = [SpawnWorker(lane.id, lane.worker, lane.fresh, lane.leaving)]
        return [*commands, WakeAt(lane.id, lane.due)] if lane.due < math.inf else commands

    def _ready(self, lane_id: LaneId, incarnation: int, now: float) -> list[SupervisorCommand]:
        if (stands := self._standby_of(lane_id, incarnation)) is not None:
            return self._standby_ready(stands, now)
        lane = self._current(lane_id, incarnation)
        if lane is None or lane.killed or lane.state not in (LaneState.STARTING, LaneState.RESTARTING):
            return []
        lane.state = LaneState.READY
        lane.up = True
        lane.retry = True
        lane.fresh = False
        lane.leaving = ()
        lane.due = math.inf
        lane.since = now
        if not math.isnan(lane.spawned):
            lane.took = now - lane.spawned
        lane.refusals = 0
        return [LaneReady(lane.id), *self._stand_by(lane, now)]

    def _exited(self, workers: tuple[tuple[LaneId, int], ...], reason: str, now: float) -> list[SupervisorCommand]:
        stood_by = [lane for worker in workers if (lane := self._standby_of(*worker)) is not None]
        lanes = [lane for worker in workers if (lane := self._current(*worker)) is not None]
        after: list[SupervisorCommand] = []
        for lane in stood_by:
            after += self._standby_exited(lane, now)
        down = self._without_workers(lanes, reason)
        for lane in lanes:
            after += self._after_exit(lane, now)
        back = {command.lane: command.time for command in after if isinstance(command, LaneRestarts)}
        back |= {command.lane: now for command in after if isinstance(command, LaneReady)}
        return [*(_with_back(each, back) for each in down), *after]

    def _without_workers(self, lanes: list[LaneRecord], reason: str) -> list[LanesDown]:
        """Take down the workers of lanes, all before any is reported: no batch may be retried on them."""
        down: dict[bool, list[LaneId]] = {False: [], True: []}
        for lane in lanes:
            if lane.up:
                down[lane.state is LaneState.STOPPING].append(lane.id)
            lane.worker, lane.up = 0, False
            lane.reason = reason
        return [LanesDown(tuple(ids), reason, expected) for expected, ids in down.items() if ids]

    def _after_exit(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        if lane.state is LaneState.STOPPING:
            return self._closed_once_empty(lane)
        if lane.state is LaneState.READY:
            lane.deaths += 1
            lane.down_since = now
            lane.quick_deaths = lane.quick_deaths + 1 if now - lane.since < self._steady(lane) else 1
            if lane.standby.usable and lane.quick_deaths < self.options.lives:
                return self._promote(lane, now)
            return self._back_off(lane, now)
        lane.quick_deaths += 1
        return self._not_started(lane, now)

    def _refused(self, lane_id: LaneId, incarnation: int, reason: str, now: float) -> list[SupervisorCommand]:
        if (stands := self._standby_of(lane_id, incarnation)) is not None:
            return self._standby_exited(stands, now)
        lane = self._current(lane_id, incarnation)
        if lane is None:
            return []
        lane.worker = 0
        lane.reason = reason
        if lane.state is LaneState.STOPPING:
            return self._closed_once_empty(lane)
        lane.refusals += 1
        return self._not_started(lane, now)

    def _closed_once_empty(self, lane: LaneRecord) -> list[SupervisorCommand]:
        """Close the partition of a lane that stops, once nothing of it runs any more."""
        return [] if lane.has_process else [ClosePartition(lane.id, lane.last)]

    def _steady(self, lane: LaneRecord) -> float:
        return max(self.options.steady, lane.took)

    def _not_started(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        if lane.retry:
            return self._back_off(lane, now)
        return self._give_back(lane)

    def _give_back(self, lane: LaneRecord) -> list[SupervisorCommand]:
        """Close the partition of a lane whose first start failed."""
        lane.state = LaneState.STOPPING
        lane.start_failed = True
        lane.due = math.inf
        return [ClosePartition(lane.id, lane.last)]

    def _back_off(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        """Restart a lane's worker after a back-off delay, or declare it permanently failed."""
        if lane.quick_deaths >= self.options.lives:
            lane.state = LaneState.FAILED
            lane.due = math.inf
            return [*self._end_standby(lane), LaneFailed(lane.id, lane.reason, lane.quick_deaths)]
        lane.state = LaneState.RESTARTING
        lane.due = now + self.options.delay(lane.quick_deaths + lane.refusals)
        return [*self._expect(lane, lane.due + lane.took), WakeAt(lane.id, lane.due)]

    def _expect(self, lane: LaneRecord, time: float) -> list[SupervisorCommand]:
        """Say when a lane that restarts will probably be ready, as far as earlier starts tell."""
        if not lane.took:
            return []
        lane.expected = time
        return [LaneRestarts(lane.id, time), WakeAt(lane.id, time)]

    def _restart(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        lane.state = LaneState.RESTARTING
        lane.restarts += 1
        return self._spawn(lane, now)

    def _woke(self, lane_id: LaneId, time: float, now: float) -> list[SupervisorCommand]:
        lane = self._lanes.get(lane_id)
        if lane is None or time not in (lane.due, lane.standby.due, lane.expected):
            return []
        if now < time:
            return [WakeAt(lane.id, time)]
        commands: list[SupervisorCommand] = []
        if time == lane.expected and lane.state is LaneState.RESTARTING:
            commands += self._expect(lane, now + max(now - lane.down_since, lane.took))  # as long again, if not longer
        if time == lane.standby.due:
            commands += self._standby_due(lane, now)
        if time == lane.due:
            commands += self._worker_due(lane, now)
        return commands

    def _worker_due(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        lane.due = math.inf
        if not lane.worker:
            return self._restart(lane, now)
        return self._kill(lane, self._not_ready())

    def _not_ready(self) -> str:
        limit = self.options.start_timeout
        return f"it was not ready after {limit:g} s; is a model too large, or its disk too slow?"

    def _busy(self, busy: WorkerBusy, now: float) -> list[SupervisorCommand]:
        lane = self._current(busy.lane, busy.incarnation)
        limit = self.options.hang_limit(busy.predicted)
        if lane is None or now - busy.since <= limit:
            return []
        return self._kill(lane, f"{busy.batch} {HANGING} {limit:g} s")

    def _kill(self, lane: LaneRecord, reason: str) -> list[SupervisorCommand]:
        if lane.killed:
            return []
        lane.killed = True
        return [KillWorker(lane.id, lane.worker, reason)]

    def _closed(self, lane_id: LaneId, incarnation: int) -> list[SupervisorCommand]:
        lane = self._lanes.get(lane_id)
        if lane is None or lane.last != incarnation or lane.has_process or lane.state is not LaneState.STOPPING:
            return []
        del self._lanes[lane.id]
        return [StartFailed(lane.id, lane.reason) if lane.start_failed else LaneStopped(lane.id)]

    # Standby workers

    def _keep_standbys(self, wanted: frozenset[LaneId], now: float) -> list[SupervisorCommand]:
        """Let these lanes have standby workers, and no others."""
        commands: list[SupervisorCommand] = []
        for lane in self._lanes.values():
            before, lane.standby.wanted = lane.standby.wanted, lane.id in wanted
            if not lane.standby.wanted:
                commands += self._end_standby(lane)
            elif not before:
                lane.standby.failures = 0
                commands += self._stand_by(lane, now)
        return commands

    def _standby_of(self, lane_id: LaneId, incarnation: int) -> LaneRecord | None:
        """Return the lane whose standby worker is of this incarnation."""
        lane = self._lanes.get(lane_id)
        return lane if lane is not None and incarnation and lane.standby.incarnation == incarnation else None

    def _stand_by(self, lane: LaneRecord, now: float, delay: float = 0.0) -> list[SupervisorCommand]:
        """Start a standby worker after a delay, where the lane is to have one and has none."""
        standby = lane.standby
        missing = standby.wanted and not standby.incarnation and standby.failures < self.options.lives
        if not missing or lane.state is not LaneState.READY:
            return []
        if delay:
            standby.due = now + delay
            return [WakeAt(lane.id, standby.due)]
        self._incarnations += 1
        standby.incarnation, standby.spawned = self._incarnations, now
        standby.due = now + self.options.start_timeout
        spawn = SpawnWorker(lane.id, standby.incarnation, fresh=False, standby=True)
        return [spawn, WakeAt(lane.id, standby.due)] if standby.due < math.inf else [spawn]

    def _standby_ready(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        if lane.standby.usable and not lane.standby.ready:
            lane.standby.ready, lane.standby.since, lane.standby.due = True, now, math.inf
        return []

    def _standby_due(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        lane.standby.due = math.inf
        return self._end_standby(lane, self._not_ready()) if lane.standby.usable else self._stand_by(lane, now)

    def _end_standby(self, lane: LaneRecord, reason: str = "no standby is wanted any more") -> list[SupervisorCommand]:
        lane.standby.due = math.inf
        if not lane.standby.usable:
            return []
        lane.standby.killed = True
        return [KillWorker(lane.id, lane.standby.incarnation, reason)]

    def _standby_exited(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        standby = lane.standby
        lasted = standby.ready and now - standby.since >= self._steady(lane)
        standby.failures = 1 if lasted else standby.failures + 1
        standby.clear()
        if lane.state is LaneState.STOPPING:
            return [] if lane.worker else self._closed_once_empty(lane)
        return self._stand_by(lane, now, self.options.delay(standby.failures))

    def _promote(self, lane: LaneRecord, now: float) -> list[SupervisorCommand]:
        """Put the standby worker in the place of the one that died, even if it is still loading."""
        standby = lane.standby
        lane.worker = lane.last = standby.incarnation
        lane.restarts += 1
        lane.promotions += 1
        lane.killed, lane.spawned = False, math.nan
        begun, ready = standby.spawned, standby.ready
        standby.clear()
        promoted = PromoteWorker(lane.id, lane.worker)
        if ready:
            lane.up, lane.since, lane.refusals = True, now, 0
            return [promoted, LaneReady(lane.id), *self._stand_by(lane, now, self.options.delay(lane.quick_deaths))]
        lane.state = LaneState.RESTARTING
        lane.due = now + self.options.start_timeout
        commands: list[SupervisorCommand] = [promoted]
        commands += self._expect(lane, begun + lane.took if begun + lane.took > now else now + lane.took)
        return [*commands, WakeAt(lane.id, lane.due)] if lane.due < math.inf else commands

    # Devices

    def _devices_lost(self, devices: Mapping[DeviceId, str]) -> list[SupervisorCommand]:
        """Give up all workers of lost devices at once: one that is blocked in a driver may not exit for long, killed or
        not."""
        lost = {device: reason for device, reason in devices.items() if device not in self._lost}
        self._lost |= lost
        lanes = [lane for lane in self._lanes.values() if lane.device in lost]
        with_worker = [lane for lane in lanes if lane.worker]
        with_process = [lane for lane in lanes if lane.has_process]
        commands: list[SupervisorCommand] = [
            KillWorker(lane.id, incarnation, lost[lane.device], abandon=True)
            for lane in lanes
            for incarnation in (lane.worker, lane.standby.incarnation)
            if incarnation
        ]
        for lane in lanes:
            lane.standby.clear()
        commands += self._without_workers(with_worker, "; ".join(dict.fromkeys(lost.values())))
        for lane in lanes:
            if lane.state is LaneState.STOPPING and lane in with_process:
                commands.append(ClosePartition(lane.id, lane.last))
            elif lane.state not in (LaneState.STOPPING, LaneState.FAILED):
                commands += self._lose(lane, lost[lane.device])
        return commands

    def _lose(self, lane: LaneRecord, reason: str) -> list[SupervisorCommand]:
        lane.reason = reason
        lane.due = math.inf
        if not lane.retry:
            return self._give_back(lane)
        lane.state = LaneState.LOST
        lane.fresh = True
        return [LaneLost(lane.id, reason)]

    def _device_restored(self, device: DeviceId, now: float) -> list[SupervisorCommand]:
        if self._lost.pop(device, None) is None:
            return []
        commands: list[SupervisorCommand] = []
        for lane in self._lanes.values():
            if lane.device == device and lane.state is LaneState.LOST:
                lane.quick_deaths = lane.refusals = 0
                commands += self._restart(lane, now)
        return commands

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        workers = [
            number for lane in self._lanes.values() for number in (lane.worker, lane.standby.incarnation) if number
        ]
        assert len(workers) == len(set(workers)), workers
        for lane in self._lanes.values():
            lane.invariants()
            where = (lane.id, lane.state)
            assert max(lane.last, lane.standby.incarnation) <= self._incarnations, where
            assert (lane.state is LaneState.FAILED) <= (lane.quick_deaths >= self.options.lives), where
            assert (lane.state is LaneState.LOST) <= (lane.device in self._lost), where
            assert lane.device not in self._lost or not lane.has_process, where


def _with_back(down: LanesDown, back: Mapping[LaneId, float]) -> LanesDown:
    return msgspec.structs.replace(down, back={lane: back[lane] for lane in down.lanes if lane in back})
