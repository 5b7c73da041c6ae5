"""A worker's life, rule by rule."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

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
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor import Supervisor
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import WorkerError

GPU = DeviceId("gpu")
LANE = LaneId(GPU, 0)


class Watched:
    """A supervisor whose timers fire when they are due, and that is checked after every event."""

    def __init__(self, **options: Any) -> None:
        self.supervisor = Supervisor(SupervisorOptions(**options))
        self.now = 0.0
        self.timers: list[WakeAt] = []
        self.expected: list[LaneRestarts] = []

    def tell(self, event: SupervisorEvent) -> list[SupervisorCommand]:
        """What is to be done about it, timers and expectations aside."""
        commands = self.supervisor.handle(event, self.now)
        self.supervisor.invariants()
        self.timers += [command for command in commands if isinstance(command, WakeAt)]
        self.expected += [command for command in commands if isinstance(command, LaneRestarts)]
        return [command for command in commands if not isinstance(command, WakeAt | LaneRestarts)]

    def until(self, time: float) -> list[tuple[float, SupervisorCommand]]:
        """What is done until then, and when."""
        done: list[tuple[float, SupervisorCommand]] = []
        while self.timers and min(timer.time for timer in self.timers) <= time:
            timer = min(self.timers, key=lambda timer: timer.time)
            self.timers.remove(timer)
            self.now = timer.time
            done += [(round(self.now, 6), command) for command in self.tell(Woke(timer.lane, timer.time))]
        self.now = time
        return done

    def exit(self, incarnation: int, lane: LaneId = LANE) -> list[SupervisorCommand]:
        return self.tell(WorkersExited(((lane, incarnation),), "it was killed by SIGKILL"))

    def state(self) -> LaneState | None:
        return self.supervisor.state(LANE)


def started(**options: Any) -> Watched:
    watched = Watched(**options)
    assert watched.tell(StartLane(LANE, GPU)) == [SpawnWorker(LANE, 1, True)]
    assert watched.tell(WorkerReady(LANE, 1)) == [LaneReady(LANE)]
    return watched


def test_start_hands_over_what_leaves_and_is_starting_until_ready() -> None:
    watched = Watched()
    start = StartLane(LANE, GPU, leaving=(LaneId(GPU, 7),))
    assert watched.tell(start) == [SpawnWorker(LANE, 1, True, (LaneId(GPU, 7),))]
    assert watched.state() is LaneState.STARTING
    watched.tell(WorkerReady(LANE, 1))
    assert watched.state() is LaneState.READY
    assert watched.tell(WorkerReady(LANE, 1)) == []


def test_start_of_a_lane_that_is_there_raises() -> None:
    with pytest.raises(WorkerError, match=r"^lane 'gpu-0/0' has a worker already; stop it first$"):
        started().tell(StartLane(LANE, GPU))


def test_first_start_that_fails_leaves_nothing_and_says_why() -> None:
    watched = Watched()
    watched.tell(StartLane(LANE, GPU))
    assert watched.exit(1) == [ClosePartition(LANE, 1)]
    assert watched.tell(PartitionClosed(LANE, 1)) == [StartFailed(LANE, "it was killed by SIGKILL")]
    assert watched.state() is None
    assert watched.until(1000.0) == []


def test_first_start_without_resources_fails() -> None:
    watched = Watched()
    watched.tell(StartLane(LANE, GPU))
    assert watched.tell(WorkerRefused(LANE, 1, "too many open files")) == [ClosePartition(LANE, 1)]
    assert watched.tell(PartitionClosed(LANE, 1)) == [StartFailed(LANE, "too many open files")]


def test_first_start_with_retry_is_tried_again() -> None:
    watched = Watched()
    watched.tell(StartLane(LANE, GPU, retry=True))
    assert watched.exit(1) == []
    assert watched.until(0.1) == [(0.01, SpawnWorker(LANE, 2, True))]


def test_start_that_takes_too_long_is_killed_once() -> None:
    watched = Watched(start_timeout=5.0)
    watched.tell(StartLane(LANE, GPU))
    reason = "it was not ready after 5 s; is a model too large, or its disk too slow?"
    assert watched.until(100.0) == [(5.0, KillWorker(LANE, 1, reason))]
    assert watched.tell(WorkerReady(LANE, 1)) == []  # too late
    assert watched.tell(WorkersExited(((LANE, 1),), reason)) == [ClosePartition(LANE, 1)]
    assert watched.tell(PartitionClosed(LANE, 1)) == [StartFailed(LANE, reason)]


def test_start_without_a_limit_may_take_for_ever() -> None:
    watched = Watched(start_timeout=math.inf)
    watched.tell(StartLane(LANE, GPU))
    assert watched.timers == [] and watched.tell(WorkerReady(LANE, 1)) == [LaneReady(LANE)]


def test_worker_that_dies_is_started_again_after_a_delay() -> None:
    watched = started()
    watched.now = 60.0
    assert watched.exit(1) == [LanesDown((LANE,), "it was killed by SIGKILL")]
    assert watched.state() is LaneState.RESTARTING
    assert watched.until(61.0) == [(60.01, SpawnWorker(LANE, 2, False))]
    assert watched.tell(WorkerReady(LANE, 2)) == [LaneReady(LANE)]
    lane = watched.supervisor.lanes()[LANE]
    assert (lane.restarts, lane.incarnation, lane.reason) == (1, 2, "it was killed by SIGKILL")


def test_delay_doubles_with_each_quick_death_up_to_a_limit() -> None:
    watched = started(first_delay=0.5, longest_delay=3.0, lives=100)
    delays = []
    for incarnation in range(1, 7):
        died = watched.now
        watched.exit(incarnation)
        ((time, _),) = watched.until(died + 4.0)
        delays.append(round(time - died, 6))
        watched.tell(WorkerReady(LANE, incarnation + 1))
    assert delays == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_delay_begins_anew_after_a_steady_life() -> None:
    watched = started(first_delay=0.5, steady=10.0)
    watched.exit(1)
    watched.until(1.0)
    watched.tell(WorkerReady(LANE, 2))
    watched.now = 11.0  # ready for 10 s
    watched.exit(2)
    assert watched.until(20.0) == [(11.5, SpawnWorker(LANE, 3, False))]


def test_worker_that_served_less_long_than_it_took_to_start_died_quickly() -> None:
    watched = started(first_delay=0.5, steady=1.0)
    watched.exit(1)
    watched.until(1.0)
    watched.now = 5.5  # it was spawned at 0.5
    watched.tell(WorkerReady(LANE, 2))
    watched.now = 10.0
    watched.exit(2)
    assert watched.until(20.0) == [(11.0, SpawnWorker(LANE, 3, False))]  # the second delay


def test_worker_that_died_is_expected_back_after_its_delay_and_its_last_start() -> None:
    watched = Watched(first_delay=0.5)
    watched.tell(StartLane(LANE, GPU))
    watched.now = 4.0
    watched.tell(WorkerReady(LANE, 1))
    watched.now = 60.0
    watched.exit(1)
    assert watched.expected == [LaneRestarts(LANE, 64.5)]


def test_worker_that_was_never_ready_is_not_expected_back() -> None:
    watched = Watched()
    watched.tell(StartLane(LANE, GPU, retry=True))
    watched.exit(1)
    assert watched.expected == []


def test_worker_killed_every_two_seconds_starts_again_at_once_for_ever() -> None:
    watched = started()
    for incarnation in range(1, 150):
        watched.now = 2.0 * incarnation
        watched.exit(incarnation)
        ((time, _),) = watched.until(watched.now + 0.1)
        assert time - 2.0 * incarnation < 0.02
        watched.now = 2.0 * incarnation + 0.6
        watched.tell(WorkerReady(LANE, incarnation + 1))


def test_worker_that_dies_too_often_fails_for_good() -> None:
    watched = started(lives=3)
    watched.exit(1)
    watched.until(1.0)
    assert watched.exit(2) == []  # while it loads
    watched.until(2.0)
    assert watched.exit(3) == [LaneFailed(LANE, "it was killed by SIGKILL", 3)]
    assert watched.state() is LaneState.FAILED
    assert watched.until(1000.0) == []
    assert watched.supervisor.lanes()[LANE].restarts == 2


def test_lack_of_resources_costs_time_and_no_life() -> None:
    watched = started(lives=2)
    watched.exit(1)
    times = []
    for incarnation in range(2, 30):
        ((time, spawned),) = watched.until(watched.now + 10.0)
        assert spawned == SpawnWorker(LANE, incarnation, False)
        times.append(time)
        watched.now = time
        assert watched.tell(WorkerRefused(LANE, incarnation, "too many open files")) == []
    assert [round(later - time, 6) for time, later in pairwise(times)][:4] == [0.02, 0.04, 0.08, 0.16]
    watched.until(watched.now + 10.0)
    assert watched.tell(WorkerReady(LANE, 30)) == [LaneReady(LANE)]
    watched.exit(30)
    assert watched.state() is LaneState.FAILED  # the second quick death


def test_lack_of_resources_is_forgotten_once_a_worker_is_ready() -> None:
    watched = started()
    watched.exit(1)
    watched.until(0.1)
    watched.tell(WorkerRefused(LANE, 2, "too many open files"))
    watched.until(0.4)
    watched.tell(WorkerReady(LANE, 3))
    watched.now = 100.0
    watched.exit(3)
    assert watched.until(200.0) == [(100.01, SpawnWorker(LANE, 4, False))]


def test_failed_lane_that_is_revived_starts_as_if_it_had_never_failed() -> None:
    watched = started(lives=1)
    watched.exit(1)
    assert watched.tell(ReviveLane(LaneId(GPU, 9))) == []
    assert watched.tell(ReviveLane(LANE)) == [SpawnWorker(LANE, 2, True)]
    assert watched.tell(ReviveLane(LANE)) == []
    assert watched.tell(WorkerReady(LANE, 2)) == [LaneReady(LANE)]


def test_failed_lane_that_is_revived_on_a_lost_device_waits_for_it() -> None:
    watched = started(lives=1)
    watched.exit(1)
    assert watched.tell(DevicesLost({GPU: "off the bus"})) == []
    assert watched.tell(ReviveLane(LANE)) == [LaneLost(LANE, "off the bus")]
    assert watched.tell(DeviceRestored(GPU)) == [SpawnWorker(LANE, 2, True)]


def test_batch_that_hangs_costs_its_worker_once() -> None:
    watched = started(hang_timeout=60.0)
    watched.now = 100.0
    assert watched.tell(WorkerBusy(LANE, 1, 40.0, "a batch of 3 of 'm'")) == []
    watched.now = 100.5
    busy = WorkerBusy(LANE, 1, 40.0, "a batch of 3 of 'm'")
    assert watched.tell(busy) == [KillWorker(LANE, 1, "a batch of 3 of 'm' took longer than 60 s")]
    assert watched.tell(busy) == []
    assert watched.exit(1) == [LanesDown((LANE,), "it was killed by SIGKILL")]
    assert watched.tell(busy) == []


def test_stop_lets_the_worker_finish_and_takes_the_partition_down() -> None:
    watched = started()
    assert watched.tell(StopLane(LANE, 5.0)) == [RetireWorker(LANE, 1, 5.0)]
    assert watched.state() is LaneState.STOPPING
    assert watched.tell(StopLane(LANE, 0.0)) == []
    assert watched.exit(1) == [
        LanesDown((LANE,), "it was killed by SIGKILL", expected=True),
        ClosePartition(LANE, 1),
    ]
    assert watched.tell(PartitionClosed(LANE, 1)) == [LaneStopped(LANE)]
    assert watched.state() is None and watched.until(1000.0) == []


def test_stop_while_it_starts_kills_the_worker() -> None:
    watched = Watched()
    watched.tell(StartLane(LANE, GPU))
    assert watched.tell(StopLane(LANE, 5.0)) == [KillWorker(LANE, 1, "it was stopped while it loaded its models")]
    assert watched.tell(WorkerReady(LANE, 1)) == []
    assert watched.exit(1) == [ClosePartition(LANE, 1)]
    assert watched.tell(PartitionClosed(LANE, 1)) == [LaneStopped(LANE)]


@pytest.mark.parametrize("state", ["restarting", "failed", "lost", "start failed"])
def test_stop_without_a_worker_takes_the_partition_down(state: str) -> None:
    watched = started(lives=1 if state == "failed" else 3) if state != "start failed" else Watched()
    match state:
        case "lost":
            watched.tell(DevicesLost({GPU: "off the bus"}))
        case "start failed":
            watched.tell(StartLane(LANE, GPU))
            watched.exit(1)
        case _:
            watched.exit(1)
    assert watched.tell(StopLane(LANE, 5.0)) == ([] if state == "start failed" else [ClosePartition(LANE, 1)])
    assert watched.tell(PartitionClosed(LANE, 1)) == [LaneStopped(LANE)]
    assert watched.tell(PartitionClosed(LANE, 1)) == [] and watched.until(1000.0) == []
    assert watched.tell(DeviceRestored(GPU)) == []


def test_stop_of_what_is_not_there_is_answered() -> None:
    assert Watched().tell(StopLane(LANE, 5.0)) == [LaneStopped(LANE)]


def test_lost_device_takes_its_workers_at_one_moment_and_gives_them_back() -> None:
    watched = started()
    for number, (lane, device) in enumerate(
        [(LaneId(GPU, 1), GPU), (LaneId(DeviceId("gpu", 1), 0), DeviceId("gpu", 1))], 2
    ):
        watched.tell(StartLane(lane, device))
        watched.tell(WorkerReady(lane, number))
    assert watched.tell(DevicesLost({GPU: "off the bus"})) == [
        KillWorker(LANE, 1, "off the bus", abandon=True),
        KillWorker(LaneId(GPU, 1), 2, "off the bus", abandon=True),
        LanesDown((LANE, LaneId(GPU, 1)), "off the bus"),
        LaneLost(LANE, "off the bus"),
        LaneLost(LaneId(GPU, 1), "off the bus"),
    ]
    assert watched.tell(DevicesLost({GPU: "off the bus"})) == []
    assert watched.exit(1) == []  # at last; nobody waits for it
    assert [lane.state for lane in watched.supervisor.lanes().values()] == ["lost", "lost", "ready"]
    assert watched.until(500.0) == []
    assert watched.tell(DeviceRestored(GPU)) == [SpawnWorker(LANE, 4, True), SpawnWorker(LaneId(GPU, 1), 5, True)]
    assert watched.tell(DeviceRestored(GPU)) == []


def test_lane_that_waits_for_its_restart_is_not_started_on_a_lost_device() -> None:
    watched = started()
    watched.exit(1)
    assert watched.tell(DevicesLost({GPU: "off the bus"})) == [LaneLost(LANE, "off the bus")]
    assert watched.until(1000.0) == []
    assert watched.tell(DeviceRestored(GPU)) == [SpawnWorker(LANE, 2, True)]


def test_first_start_on_a_lost_device_fails_unless_it_may_wait() -> None:
    watched = Watched()
    watched.tell(DevicesLost({GPU: "off the bus"}))
    assert watched.tell(StartLane(LANE, GPU)) == [StartFailed(LANE, "off the bus")]
    assert watched.state() is None
    assert watched.tell(StartLane(LANE, GPU, retry=True)) == [LaneLost(LANE, "off the bus")]
    assert watched.tell(DeviceRestored(GPU)) == [SpawnWorker(LANE, 1, True)]


def test_first_start_whose_device_is_lost_fails() -> None:
    watched = Watched()
    watched.tell(StartLane(LANE, GPU))
    assert watched.tell(DevicesLost({GPU: "off the bus"})) == [
        KillWorker(LANE, 1, "off the bus", abandon=True),
        ClosePartition(LANE, 1),
    ]
    assert watched.tell(PartitionClosed(LANE, 1)) == [StartFailed(LANE, "off the bus")]


def test_stop_on_a_device_that_is_lost_meanwhile_ends() -> None:
    watched = started()
    watched.tell(StopLane(LANE, 60.0))
    assert watched.tell(DevicesLost({GPU: "off the bus"})) == [
        KillWorker(LANE, 1, "off the bus", abandon=True),
        LanesDown((LANE,), "off the bus", expected=True),
        ClosePartition(LANE, 1),
    ]
    assert watched.tell(PartitionClosed(LANE, 1)) == [LaneStopped(LANE)]


def test_shared_process_that_ends_takes_all_its_lanes_down_before_anybody_hears_of_one() -> None:
    watched = started()
    watched.tell(StartLane(LaneId(GPU, 1), GPU))
    watched.tell(WorkerReady(LaneId(GPU, 1), 2))
    watched.tell(StartLane(LaneId.parse(LaneId(GPU, 2)), GPU))  # still loads
    watched.tell(StopLane(LaneId(GPU, 1), 5.0))
    workers = ((LANE, 1), (LaneId(GPU, 1), 2), (LaneId(GPU, 2), 3))
    assert watched.tell(WorkersExited(workers, "it was killed by SIGSEGV")) == [
        LanesDown((LANE,), "it was killed by SIGSEGV"),
        LanesDown((LaneId(GPU, 1),), "it was killed by SIGSEGV", expected=True),
        ClosePartition(LaneId(GPU, 1), 2),
        ClosePartition(LaneId.parse(LaneId(GPU, 2)), 3),
    ]


def test_late_news_of_an_earlier_worker_is_ignored() -> None:
    watched = started()
    watched.exit(1)
    assert watched.exit(0) == []  # of no worker
    watched.until(1.0)
    for late in (
        WorkerReady(LANE, 1),
        WorkersExited(((LANE, 1),), "late"),
        WorkerRefused(LANE, 1, "late"),
        WorkerBusy(LANE, 1, -1000.0, "late"),
        PartitionClosed(LANE, 1),
    ):
        assert watched.tell(late) == []
    assert watched.tell(WorkerReady(LANE, 2)) == [LaneReady(LANE)]


def test_lane_of_an_earlier_name_does_not_hear_its_news() -> None:
    watched = started()
    watched.tell(StopLane(LANE, 1.0))
    watched.exit(1)
    watched.tell(PartitionClosed(LANE, 1))
    assert watched.tell(StartLane(LANE, GPU)) == [SpawnWorker(LANE, 2, True)]
    assert watched.exit(1) == []
    watched.tell(StopLane(LANE, 1.0))
    watched.exit(2)
    assert watched.tell(PartitionClosed(LANE, 1)) == []
    assert watched.tell(PartitionClosed(LANE, 2)) == [LaneStopped(LANE)]


def test_stale_and_early_timers_are_harmless() -> None:
    watched = started()
    watched.exit(1)
    (_, timer) = watched.timers
    assert watched.tell(Woke(LANE, timer.time)) == []  # early: it is asked for again
    assert watched.timers[-1] == timer
    assert watched.tell(Woke(LANE, 0.05)) == [] and watched.tell(Woke(LaneId(GPU, 9), 1.0)) == []
    assert watched.until(1.0) == [(0.01, SpawnWorker(LANE, 2, False))]
