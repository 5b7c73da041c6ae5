"""Decide when workers start, restart, are killed or declared permanently failed, also when their device is lost.

One supervisor serves the simulator and the live server: events in, commands out. It never waits, reads no clock and
owns no process. Every `StartLane` ends in `LaneReady`, `StartFailed`, `LaneLost`, `LaneFailed` or, where it was stopped
before, `LaneStopped`; every `StopLane` in `LaneStopped`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from cotenant.control.events import (
    ClosePartition,
    DeviceRestored,
    DevicesLost,
    KillWorker,
    LaneFailed,
    LaneLost,
    LaneReady,
    LaneRestarts,
    LanesDown,
    LaneStopped,
    PartitionClosed,
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
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import WorkerError

HANGING = "took longer than"  # in the reason for which a worker that hangs is killed


class SupervisorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Configure the supervisor. Durations are in seconds.

    first_delay: until a dead worker is started again; doubles with each quick death in a row, up to longest_delay.
    steady: a worker that was ready for this long, and for longer than it took to start, did not die quickly: whoever
    serves more than it starts is worth starting again. lives: quick deaths in a row after which a lane has permanently
    failed. start_timeout: that a worker has to become ready. hang_factor, hang_timeout: a worker whose batch takes
    longer than so many times its prediction, and than that, is killed. Batches of longer or rarer inputs than were
    profiled may take many times their prediction; nobody waits for one that takes more.
    """

    first_delay: float = 0.01
    longest_delay: float = 10.0
    steady: float = 1.0
    lives: int = 13
    start_timeout: float = 120.0
    hang_factor: float = 20.0
    hang_timeout: float = 5.0

    def hang_limit(self, predicted: float) -> float:
        """Return the seconds after which a batch that was predicted to take `predicted` seconds hangs."""
        return max(self.hang_timeout, self.hang_factor * predicted)


class LaneState(StrEnum):
    """Name the state of a lane.

    starting: never ready so far. restarting: waits for its back-off delay, or its worker loads again. lost: its device
    is. failed: permanently. stopping: leaves, or what a failed start left is taken down.
    """

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    LOST = "lost"
    FAILED = "failed"
    STOPPING = "stopping"


class SupervisedLane(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a lane as the supervisor sees it. incarnation: of its worker, 0 where it has none. restarts: starts
    after the first. reason: of its last death."""

    lane: LaneId
    device: DeviceId
    state: LaneState
    incarnation: int
    restarts: int
    reason: str


class _Lane:
    def __init__(self, start: StartLane) -> None:
        self.id = start.lane
        self.device = start.device
        self.leaving = start.leaving
        self.retry = start.retry  # a worker that did not get ready is started again
        self.state = LaneState.STARTING
        self.worker = 0  # the incarnation that runs, 0 where none does
        self.up = False  # whether that one got ready
        self.last = 0  # the incarnation that was spawned last
        self.fresh = True  # its partition has to be opened (again) before the next worker starts
        self.due = math.inf  # when to check it again
        self.spawned = 0.0  # when its worker was
        self.since = 0.0  # when it became ready
        self.took = 0.0  # seconds of its last start
        self.quick_deaths = 0  # in a row
        self.refusals = 0  # by the system, since it was ready
        self.restarts = 0
        self.killed = False  # its worker was, and has not exited yet
        self.reason = ""
        self.start_failed = False  # a failed start stops it, rather than a request


class Supervisor:
    """Decide the life of workers. Feed it events in order of time; carry out its commands in order.

    deaths: how often workers that served have died so far.
    """

    def __init__(self, options: SupervisorOptions | None = None) -> None:
        self.options = options or SupervisorOptions()
        self._lanes: dict[LaneId, _Lane] = {}
        self._lost: dict[DeviceId, str] = {}  # device → why nothing can run on it
        self._incarnations = 0
        self.deaths = 0

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

    def lanes(self) -> dict[LaneId, SupervisedLane]:
        """Return the observed lanes by name."""
        return {
            lane.id: SupervisedLane(
                lane=lane.id,
                device=lane.device,
                state=lane.state,
                incarnation=lane.worker,
                restarts=lane.restarts,
                reason=lane.reason,
            )
            for lane in self._lanes.values()
        }

    def state(self, lane: LaneId) -> LaneState | None:
        """Return the state of a lane; None where there is no such lane."""
        known = self._lanes.get(lane)
        return None if known is None else known.state

    @property
    def restarting(self) -> bool:
        """Whether a worker that died is expected back."""
        return any(lane.state is LaneState.RESTARTING for lane in self._lanes.values())

    @property
    def lost(self) -> dict[DeviceId, str]:
        """Return by device why nothing can run on it."""
        return dict(self._lost)

    # Requests

    def _start(self, start: StartLane, now: float) -> list[SupervisorCommand]:
        if start.lane in self._lanes:
            raise WorkerError(f"lane '{start.lane}' has a worker already; stop it first")
        lane = _Lane(start)
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
        if not lane.worker:
            return [ClosePartition(lane.id, lane.last)]
        if was is LaneState.READY:
            return [RetireWorker(lane.id, lane.worker, grace)]
        return self._kill(lane, "it was stopped while it loaded its models")

    def _revive(self, lane_id: LaneId, now: float) -> list[SupervisorCommand]:
        lane = self._lanes.get(lane_id)
        if lane is None or lane.state is not LaneState.FAILED:
            return []
        lane.quick_deaths = lane.refusals = 0
        lane.fresh = True
        reason = self._lost.get(lane.device)
        return self._restart(lane, now) if reason is None else self._lose(lane, reason)

    # Workers

    def _current(self, lane_id: LaneId, incarnation: int) -> _Lane | None:
        """Return the lane that this incarnation serves; None for late events."""
        lane = self._lanes.get(lane_id)
        return lane if lane is not None and lane.worker and lane.worker == incarnation else None

    def _spawn(self, lane: _Lane, now: float) -> list[SupervisorCommand]:
        self._incarnations += 1
        lane.worker = lane.last = self._incarnations
        lane.killed = False
        lane.spawned = now
        lane.due = now + self.options.start_timeout
        commands: list[SupervisorCommand] = [SpawnWorker(lane.id, lane.worker, lane.fresh, lane.leaving)]
        return [*commands, WakeAt(lane.id, lane.due)] if lane.due < math.inf else commands

    def _ready(self, lane_id: LaneId, incarnation: int, now: float) -> list[SupervisorCommand]:
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
        lane.took = now - lane.spawned
        lane.refusals = 0
        return [LaneReady(lane.id)]

    def _exited(self, workers: tuple[tuple[LaneId, int], ...], reason: str, now: float) -> list[SupervisorCommand]:
        lanes = [lane for worker in workers if (lane := self._current(*worker)) is not None]
        commands = self._without_workers(lanes, reason)
        for lane in lanes:
            commands += self._after_exit(lane, now)
        return commands

    def _without_workers(self, lanes: list[_Lane], reason: str) -> list[SupervisorCommand]:
        """Take down the workers of lanes, all before any is reported: no batch may be retried on them."""
        down: dict[bool, list[LaneId]] = {False: [], True: []}
        for lane in lanes:
            if lane.up:
                down[lane.state is LaneState.STOPPING].append(lane.id)
            lane.worker, lane.up = 0, False
            lane.reason = reason
        return [LanesDown(tuple(ids), reason, expected) for expected, ids in down.items() if ids]

    def _after_exit(self, lane: _Lane, now: float) -> list[SupervisorCommand]:
        if lane.state is LaneState.STOPPING:
            return [ClosePartition(lane.id, lane.last)]
        if lane.state is LaneState.READY:
            self.deaths += 1
            steady = max(self.options.steady, lane.took)
            lane.quick_deaths = lane.quick_deaths + 1 if now - lane.since < steady else 1
            return self._back_off(lane, now)
        lane.quick_deaths += 1
        return self._not_started(lane, now)

    def _refused(self, lane_id: LaneId, incarnation: int, reason: str, now: float) -> list[SupervisorCommand]:
        lane = self._current(lane_id, incarnation)
        if lane is None:
            return []
        lane.worker = 0
        lane.reason = reason
        if lane.state is LaneState.STOPPING:
            return [ClosePartition(lane.id, lane.last)]
        lane.refusals += 1
        return self._not_started(lane, now)

    def _not_started(self, lane: _Lane, now: float) -> list[SupervisorCommand]:
        if lane.retry:
            return self._back_off(lane, now)
        return self._give_back(lane)

    def _give_back(self, lane: _Lane) -> list[SupervisorCommand]:
        """Close the partition of a lane whose first start failed."""
        lane.state = LaneState.STOPPING
        lane.start_failed = True
        lane.due = math.inf
        return [ClosePartition(lane.id, lane.last)]

    def _back_off(self, lane: _Lane, now: float) -> list[SupervisorCommand]:
        """Restart a lane's worker after a back-off delay, or declare it permanently failed."""
        if lane.quick_deaths >= self.options.lives:
            lane.state = LaneState.FAILED
            lane.due = math.inf
            return [LaneFailed(lane.id, lane.reason, lane.quick_deaths)]
        lane.state = LaneState.RESTARTING
        doublings = min(lane.quick_deaths + lane.refusals - 1, 64)
        lane.due = now + min(self.options.first_delay * 2**doublings, self.options.longest_delay)
        expected = [LaneRestarts(lane.id, lane.due + lane.took)] if lane.took else []
        return [*expected, WakeAt(lane.id, lane.due)]

    def _restart(self, lane: _Lane, now: float) -> list[SupervisorCommand]:
        lane.state = LaneState.RESTARTING
        lane.restarts += 1
        return self._spawn(lane, now)

    def _woke(self, lane_id: LaneId, time: float, now: float) -> list[SupervisorCommand]:
        lane = self._lanes.get(lane_id)
        if lane is None or time != lane.due:
            return []
        if now < time:
            return [WakeAt(lane.id, time)]
        lane.due = math.inf
        if not lane.worker:
            return self._restart(lane, now)
        limit = self.options.start_timeout
        return self._kill(lane, f"it was not ready after {limit:g} s; is a model too large, or its disk too slow?")

    def _busy(self, busy: WorkerBusy, now: float) -> list[SupervisorCommand]:
        lane = self._current(busy.lane, busy.incarnation)
        limit = self.options.hang_limit(busy.predicted)
        if lane is None or now - busy.since <= limit:
            return []
        return self._kill(lane, f"{busy.batch} {HANGING} {limit:g} s")

    def _kill(self, lane: _Lane, reason: str) -> list[SupervisorCommand]:
        if lane.killed:
            return []
        lane.killed = True
        return [KillWorker(lane.id, lane.worker, reason)]

    def _closed(self, lane_id: LaneId, incarnation: int) -> list[SupervisorCommand]:
        lane = self._lanes.get(lane_id)
        if lane is None or lane.last != incarnation or lane.worker or lane.state is not LaneState.STOPPING:
            return []
        del self._lanes[lane.id]
        return [StartFailed(lane.id, lane.reason) if lane.start_failed else LaneStopped(lane.id)]

    # Devices

    def _devices_lost(self, devices: Mapping[DeviceId, str]) -> list[SupervisorCommand]:
        """Give up all workers of lost devices at once: one that is blocked in a driver may not exit for long, killed or
        not."""
        lost = {device: reason for device, reason in devices.items() if device not in self._lost}
        self._lost |= lost
        lanes = [lane for lane in self._lanes.values() if lane.device in lost]
        with_worker = [lane for lane in lanes if lane.worker]
        commands: list[SupervisorCommand] = [
            KillWorker(lane.id, lane.worker, lost[lane.device], abandon=True) for lane in with_worker
        ]
        commands += self._without_workers(with_worker, "; ".join(dict.fromkeys(lost.values())))
        for lane in lanes:
            if lane.state is LaneState.STOPPING and lane in with_worker:
                commands.append(ClosePartition(lane.id, lane.last))
            elif lane.state not in (LaneState.STOPPING, LaneState.FAILED):
                commands += self._lose(lane, lost[lane.device])
        return commands

    def _lose(self, lane: _Lane, reason: str) -> list[SupervisorCommand]:
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
        workers = [lane.worker for lane in self._lanes.values() if lane.worker]
        assert len(workers) == len(set(workers)), workers
        for lane in self._lanes.values():
            where = (lane.id, lane.state)
            assert 0 <= lane.worker <= lane.last <= self._incarnations, where
            assert not lane.worker or lane.worker == lane.last, where
            assert lane.up <= bool(lane.worker), where
            assert (
                (lane.state is LaneState.READY) <= lane.up <= (lane.state in (LaneState.READY, LaneState.STOPPING))
            ), where
            match lane.state:
                case LaneState.READY:
                    assert lane.worker and not lane.fresh and lane.due == math.inf, where
                case LaneState.STARTING:
                    assert lane.worker and lane.fresh, where
                case LaneState.RESTARTING:
                    assert lane.worker or lane.due < math.inf, where
                case LaneState.LOST | LaneState.FAILED:
                    assert not lane.worker and lane.due == math.inf, where
                case LaneState.STOPPING:
                    assert lane.due == math.inf, where
            assert (lane.state is LaneState.FAILED) <= (lane.quick_deaths >= self.options.lives), where
            assert (lane.state is LaneState.LOST) <= (lane.device in self._lost), where
            assert lane.device not in self._lost or not lane.worker, where
            assert not lane.start_failed or lane.state is LaneState.STOPPING, where
