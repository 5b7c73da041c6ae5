"""Hold what the supervisor knows of a lane: its state, its worker, and its standby worker."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from cotenant.control.events import StartLane
from cotenant.core.identity import DeviceId, LaneId


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
    after the first, and promotions of a standby worker. reason: of its last death. deaths: of workers that served.
    standby: "loading" or "ready"; "" where it has none."""

    lane: LaneId
    device: DeviceId
    state: LaneState
    incarnation: int
    restarts: int
    reason: str
    standby: str = ""
    promotions: int = 0
    deaths: int = 0


class Standby(msgspec.Struct):
    """Hold a lane's standby worker: one that has loaded its models and runs nothing until the lane's worker dies.

    wanted: the lane is to have one. incarnation: of the one that there is, 0 where there is none. killed: it was, and
    has not exited yet. spawned: when it was. since: when it was ready. due: when to start one, or to give up on one
    that loads. failures: in a row, of standbys that did not get ready, or not for long.
    """

    wanted: bool = False
    incarnation: int = 0
    ready: bool = False
    killed: bool = False
    spawned: float = 0.0
    since: float = 0.0
    due: float = math.inf
    failures: int = 0

    @property
    def usable(self) -> bool:
        """Whether it can take the place of a worker, now or once it has loaded."""
        return bool(self.incarnation) and not self.killed

    @property
    def word(self) -> str:
        if not self.usable:
            return ""
        return "ready" if self.ready else "loading"

    def clear(self) -> None:
        """Forget the one that there was: it exited, or is no standby any more."""
        self.incarnation, self.ready, self.killed, self.due = 0, False, False, math.inf


class LaneRecord:
    """Hold a lane's state; only the supervisor changes it."""

    def __init__(self, start: StartLane) -> None:
        self.id = start.lane
        self.device = start.device
        self.leaving = start.leaving
        self.retry = start.retry  # a worker that did not get ready is started again
        self.state = LaneState.STARTING
        self.worker = 0  # the incarnation that runs, 0 where none does
        self.up = False  # whether that one got ready
        self.last = 0  # the incarnation that was its worker last
        self.fresh = True  # its partition has to be opened (again) before the next worker starts
        self.due = math.inf  # when to check it again
        self.spawned = 0.0  # when its worker was; NaN for one that was a standby
        self.since = 0.0  # when it became ready
        self.took = 0.0  # seconds of its last start
        self.down_since = 0.0  # when its last worker that was ready died
        self.expected = math.inf  # when a restart will probably be over
        self.quick_deaths = 0  # in a row
        self.refusals = 0  # by the system, since it was ready
        self.restarts = 0
        self.promotions = 0  # those of them that were of a standby
        self.deaths = 0  # of workers that served
        self.killed = False  # its worker was, and has not exited yet
        self.reason = ""
        self.start_failed = False  # a failed start stops it, rather than a request
        self.standby = Standby()

    @property
    def has_process(self) -> bool:
        """Whether anything of it runs."""
        return bool(self.worker or self.standby.incarnation)

    def observed(self) -> SupervisedLane:
        return SupervisedLane(
            lane=self.id,
            device=self.device,
            state=self.state,
            incarnation=self.worker,
            restarts=self.restarts,
            reason=self.reason,
            standby=self.standby.word,
            promotions=self.promotions,
            deaths=self.deaths,
        )

    def invariants(self) -> None:
        """Raise AssertionError where its state contradicts itself."""
        where = (self.id, self.state)
        assert 0 <= self.worker <= self.last, where
        assert not self.worker or self.worker == self.last, where
        assert self.up <= bool(self.worker), where
        assert (self.state is LaneState.READY) <= self.up <= (self.state in (LaneState.READY, LaneState.STOPPING)), (
            where
        )
        match self.state:
            case LaneState.READY:
                assert self.worker and not self.fresh and self.due == math.inf, where
            case LaneState.STARTING:
                assert self.worker and self.fresh, where
            case LaneState.RESTARTING:
                assert self.worker or self.due < math.inf, where
            case LaneState.LOST | LaneState.FAILED:
                assert not self.worker and self.due == math.inf, where
            case LaneState.STOPPING:
                assert self.due == math.inf, where
        assert not self.start_failed or self.state is LaneState.STOPPING, where
        standby = self.standby
        assert standby.incarnation != self.worker or not self.worker, where
        assert not standby.usable or self.state is LaneState.READY, where
        assert standby.ready <= bool(standby.incarnation), where
        assert not standby.ready or standby.killed or standby.due == math.inf, where
