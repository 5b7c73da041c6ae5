"""Standby workers: which lanes have one, how it takes over, and what it gives up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.control.events import (
    ClosePartition,
    DevicesLost,
    KeepStandbys,
    KillWorker,
    LaneFailed,
    LaneReady,
    LanesDown,
    PromoteWorker,
    RetireWorker,
    ReviveLane,
    SpawnWorker,
    StartLane,
    StopLane,
    WorkerReady,
    WorkerRefused,
    WorkersExited,
)
from cotenant.control.revision import MemoryPolicy, PlannedLane
from cotenant.control.standby import choose_standbys, fitting_standbys
from cotenant.control.supervised_lane import LaneState
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome
from tests.control.test_orchestrator import CAPACITY, CUTS, D0, D1, STEPS, Chance
from tests.control.test_supervisor import LANE, Watched, started
from tests.control.world import Cut, World, planned

NONE = "no standby is wanted any more"
KILLED = "it was killed by SIGKILL"


def standing_by(*, ready: bool = True, **options: Any) -> Watched:
    """A lane with a worker, incarnation 1, and a standby, incarnation 2."""
    watched = started(**options)
    assert watched.tell(KeepStandbys(frozenset({LANE}))) == [SpawnWorker(LANE, 2, False, standby=True)]
    if ready:
        assert watched.tell(WorkerReady(LANE, 2)) == []
    return watched


def standby(watched: Watched) -> str:
    return watched.supervisor.lanes()[LANE].standby


# One lane


def test_standby_that_is_ready_takes_over_at_once_and_another_is_started() -> None:
    watched = standing_by()
    watched.now = 5.0
    assert watched.exit(1) == [
        LanesDown((LANE,), KILLED, back={LANE: 5.0}),
        PromoteWorker(LANE, 2),
        LaneReady(LANE),
    ]
    lane = watched.supervisor.lanes()[LANE]
    assert (lane.state, lane.incarnation, lane.restarts) == (LaneState.READY, 2, 1)
    assert (lane.deaths, lane.promotions) == (1, 1)
    assert watched.until(10.0) == [(5.01, SpawnWorker(LANE, 3, False, standby=True))]


def test_standby_that_still_loads_goes_on_as_the_worker() -> None:
    watched = standing_by(ready=False)
    watched.now = 2.0
    assert watched.exit(1) == [LanesDown((LANE,), KILLED), PromoteWorker(LANE, 2)]
    assert watched.state() is LaneState.RESTARTING and standby(watched) == ""
    assert watched.tell(WorkerReady(LANE, 2)) == [LaneReady(LANE), SpawnWorker(LANE, 3, False, standby=True)]


def test_lane_whose_standby_still_loads_is_expected_when_it_will_have_loaded() -> None:
    watched = Watched()
    started_slowly(watched, 4.0)
    watched.tell(KeepStandbys(frozenset({LANE})))
    watched.now = 5.0
    (down, _) = watched.exit(1)
    assert isinstance(down, LanesDown) and down.back == {LANE: 8.0}
    assert [restart.time for restart in watched.expected] == [8.0]
    watched.now = 7.5
    watched.tell(WorkerReady(LANE, 2))
    assert watched.supervisor.start_seconds(LANE) == 4.0  # a start of its own is what the next one will take


def test_lane_whose_standby_loads_for_longer_than_a_start_is_expected_after_another_such_time() -> None:
    watched = Watched()
    started_slowly(watched, 4.0)
    watched.tell(KeepStandbys(frozenset({LANE})))
    watched.now = 30.0
    watched.exit(1)
    assert [restart.time for restart in watched.expected] == [34.0]


def test_lane_that_is_not_back_when_it_was_expected_is_expected_after_as_long_again() -> None:
    watched = Watched(start_timeout=60.0)
    started_slowly(watched, 4.0)
    watched.now = 10.0
    watched.exit(1)
    watched.until(40.0)
    assert [restart.time for restart in watched.expected] == pytest.approx([14.01, 18.02, 26.04, 42.08])
    watched.tell(WorkerReady(LANE, 2))
    watched.until(200.0)
    assert len(watched.expected) == 4  # it is back


def started_slowly(watched: Watched, seconds: float) -> None:
    watched.tell(StartLane(LANE, LANE.device))
    watched.now = seconds
    watched.tell(WorkerReady(LANE, 1))


def test_standby_that_was_killed_is_not_promoted() -> None:
    watched = standing_by()
    assert watched.tell(KeepStandbys(frozenset())) == [KillWorker(LANE, 2, NONE)]
    assert standby(watched) == "" and watched.supervisor.standbys == {LANE}
    assert watched.exit(1) == [LanesDown((LANE,), KILLED, back={})]
    assert watched.exit(2) == []
    assert watched.until(1.0) == [(0.01, SpawnWorker(LANE, 3, False))]


def test_standby_and_worker_that_exit_together_leave_nobody_to_promote() -> None:
    watched = standing_by()
    assert watched.tell(WorkersExited(((LANE, 1), (LANE, 2)), KILLED)) == [LanesDown((LANE,), KILLED)]
    assert watched.until(1.0) == [(0.01, SpawnWorker(LANE, 3, False))]


def test_standby_that_dies_is_started_again_ever_later_and_at_last_not_any_more() -> None:
    watched = standing_by(ready=False, lives=4)
    seen = []
    for _ in range(4):
        newest = watched.supervisor._incarnations
        watched.exit(newest)
        begun = watched.now
        seen += [(round(time - begun, 6), type(command)) for time, command in watched.until(begun + 100.0)]
    assert seen == [(0.01, SpawnWorker), (0.02, SpawnWorker), (0.04, SpawnWorker)]
    assert watched.state() is LaneState.READY
    assert watched.tell(KeepStandbys(frozenset({LANE}))) == []  # nothing has changed
    watched.tell(KeepStandbys(frozenset()))
    assert watched.tell(KeepStandbys(frozenset({LANE}))) == [SpawnWorker(LANE, 6, False, standby=True)]


def test_standby_that_is_not_started_any_more_is_when_its_lane_is_revived() -> None:
    watched = standing_by(ready=False, lives=2)
    assert watched.tell(ReviveLane(LANE)) == [], "it is there"
    watched.exit(2)
    assert watched.tell(ReviveLane(LANE)) == [], "it will be started"
    watched.until(1.0)
    watched.exit(3)
    assert watched.until(100.0) == []
    assert watched.tell(ReviveLane(LANE)) == [SpawnWorker(LANE, 4, False, standby=True)]


def test_standby_that_stood_by_for_long_did_not_die_quickly() -> None:
    watched = standing_by(lives=2)
    for incarnation in (2, 3, 4, 5):
        watched.now += 50.0
        watched.exit(incarnation)
        ((_, spawned),) = watched.until(watched.now + 1.0)
        assert spawned == SpawnWorker(LANE, incarnation + 1, False, standby=True)
        watched.tell(WorkerReady(LANE, incarnation + 1))


def test_standby_for_which_the_system_has_no_process_is_tried_again() -> None:
    watched = standing_by(ready=False)
    assert watched.tell(WorkerRefused(LANE, 2, "too many open files")) == []
    assert watched.until(1.0) == [(0.01, SpawnWorker(LANE, 3, False, standby=True))]


def test_standby_that_never_gets_ready_is_killed_and_started_again() -> None:
    watched = standing_by(ready=False, start_timeout=30.0)
    ((when, killed),) = watched.until(40.0)
    assert when == 30.0 and isinstance(killed, KillWorker) and killed.incarnation == 2
    assert "not ready after 30 s" in killed.reason
    watched.exit(2)
    assert [command for _, command in watched.until(41.0)] == [SpawnWorker(LANE, 3, False, standby=True)]


def test_stop_closes_the_partition_once_the_standby_is_gone_too() -> None:
    watched = standing_by()
    assert watched.tell(StopLane(LANE, 1.0)) == [KillWorker(LANE, 2, NONE), RetireWorker(LANE, 1, 1.0)]
    assert watched.exit(1) == [LanesDown((LANE,), KILLED, expected=True)]
    assert watched.exit(2) == [ClosePartition(LANE, 1)]


def test_stop_closes_the_partition_once_the_worker_is_gone_too() -> None:
    watched = standing_by()
    watched.tell(StopLane(LANE, 1.0))
    assert watched.exit(2) == []
    assert watched.exit(1) == [LanesDown((LANE,), KILLED, expected=True), ClosePartition(LANE, 1)]


def test_lane_that_dies_too_often_fails_although_it_has_a_standby() -> None:
    watched = standing_by(lives=3)
    watched.exit(1)
    watched.until(0.05)
    watched.tell(WorkerReady(LANE, 3))
    watched.exit(2)
    watched.until(0.1)
    watched.tell(WorkerReady(LANE, 4))
    assert watched.exit(3) == [LanesDown((LANE,), KILLED), KillWorker(LANE, 4, NONE), LaneFailed(LANE, KILLED, 3)]


def test_lost_device_takes_the_standby_with_it() -> None:
    watched = standing_by()
    commands = watched.tell(DevicesLost({LANE.device: "off the bus"}))
    assert [(c.incarnation, c.abandon) for c in commands if isinstance(c, KillWorker)] == [(1, True), (2, True)]
    assert watched.exit(2) == [] and watched.state() is LaneState.LOST


# Which lanes


def lane(device: DeviceId, slot: int, memory: int | None, rate: float) -> PlannedLane:
    return msgspec.structs.replace(planned(LaneId(device, slot), Cut(device, ("m",), memory)), rate=rate)


def chosen(*lanes: PlannedLane, capacity: dict[DeviceId, int], each: int = 1) -> list[str]:
    return sorted(map(str, choose_standbys(lanes, capacity, each, lambda lane: lane.rate)))


def test_standby_is_chosen_for_the_lane_whose_death_costs_most() -> None:
    lanes = lane(D0, 0, 2, 10.0), lane(D0, 1, 2, 30.0), lane(D1, 0, 1, 5.0)
    assert chosen(*lanes, capacity={D0: 10, D1: 2}) == ["d-0/1", "d-1/0"]
    assert chosen(*lanes, capacity={D0: 10, D1: 2}, each=2) == ["d-0/0", "d-0/1", "d-1/0"]
    assert chosen(*lanes, capacity={D0: 10, D1: 2}, each=0) == []


def test_standby_is_chosen_only_where_its_memory_is_left() -> None:
    lanes = lane(D0, 0, 1, 10.0), lane(D0, 1, 3, 30.0)
    assert chosen(*lanes, capacity={D0: 6}) == ["d-0/0"]
    assert chosen(*lanes, capacity={D0: 4}) == []
    assert chosen(*lanes, capacity={D0: 7}, each=2) == ["d-0/1"]
    assert chosen(*lanes, capacity={D0: 8}, each=2) == ["d-0/0", "d-0/1"]


def test_standby_is_not_chosen_on_a_device_of_unknown_memory() -> None:
    assert chosen(lane(D0, 0, 1, 10.0), capacity={D1: 9}) == []


def test_standbys_that_do_not_fit_beside_more_workers_are_told_from_those_that_do() -> None:
    held = lane(D0, 0, 2, 1.0), lane(D0, 1, 2, 1.0), lane(D1, 0, 2, 1.0)
    standbys = [LaneId(D0, 0), LaneId(D1, 0), LaneId(D1, 9)]
    assert fitting_standbys(standbys, held, {D0: 5, D1: 4}) == {LaneId(D1, 0)}
    assert fitting_standbys(standbys, held, {D0: 6, D1: 4}) == {LaneId(D0, 0), LaneId(D1, 0)}


# With rollouts


def settled(capacity: dict[DeviceId, int], *cuts: Cut, **options: Any) -> World:
    world = World(capacity, standbys=1, **options)
    world.request(1, *cuts)
    world.settle()
    return world


def test_rollout_waits_until_a_standby_has_given_up_the_memory_that_it_needs() -> None:
    first, second = Cut(D0, ("a",), 2), Cut(D0, ("b",), 2)
    world = settled({D0: 5}, first)
    (old,) = world.orchestrator.rollout.lanes
    leaving = world.standby(old)
    assert leaving
    world.request(2, second)
    assert world.workers[leaving].killed and world.in_force == [0, 1]
    assert len(world.workers) == 2, "the new worker starts only once there is room"
    world.exit(leaving, "killed")
    assert len(world.workers) == 2 and not any(worker.standby for worker in world.workers.values())
    world.settle()
    world.check_settled()
    (new,) = world.orchestrator.rollout.lanes
    assert world.in_force == [0, 1, 2] and world.standby(new)


def test_rollout_keeps_a_standby_for_which_there_is_room() -> None:
    world = settled({D0: 6}, Cut(D0, ("a",), 2))
    (old,) = world.orchestrator.rollout.lanes
    world.request(2, Cut(D0, ("b",), 2))
    assert world.standby(old) and not world.workers[world.standby(old)].killed
    world.exit(world.incarnation(old))
    assert world.supervisor.state(old) is LaneState.READY  # it took over in the middle of the rollout
    world.settle()
    world.check_settled()


def test_rollout_takes_the_memory_of_a_standby_that_was_about_to_start_again() -> None:
    world = settled({D0: 5}, Cut(D0, ("a",), 2))
    (old,) = world.orchestrator.rollout.lanes
    world.exit(world.standby(old))
    assert not world.standby(old)  # until its delay is over
    world.request(2, Cut(D0, ("b",), 2))
    while world.timers:
        world.wake()
    assert not world.standby(old)
    world.settle()
    world.check_settled()


def test_rollout_that_is_aborted_while_it_waits_for_memory_is_not_begun() -> None:
    world = settled({D0: 5}, Cut(D0, ("a",), 2))
    (old,) = world.orchestrator.rollout.lanes
    world.request(2, Cut(D0, ("b",), 2))
    world.abort(2)
    world.settle()
    world.check_settled()
    assert world.in_force == [0, 1] and world.standby(old)


def test_later_rollout_takes_the_place_of_one_that_waits_for_memory() -> None:
    world = settled({D0: 5}, Cut(D0, ("a",), 2))
    world.request(2, Cut(D0, ("b",), 2))
    world.abort(2)
    world.request(3, Cut(D0, ("c",), 2))
    world.settle()
    world.check_settled()
    assert world.in_force == [0, 1, 3]


def test_request_in_flight_is_run_again_by_the_standby_at_once() -> None:
    world = settled({D0: 6}, Cut(D0, ("a",), 2))
    (key,) = world.orchestrator.rollout.lanes
    number = world.arrive("a", within=0.11)  # its batch takes 0.1 s
    world.exit(world.incarnation(key))
    assert world.running[key].requests[0].id == number
    world.finish(key)
    assert world.replies[number] is Outcome.SERVED


@pytest.mark.parametrize("memory", MemoryPolicy)
@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(1, 2), st.booleans())
def test_standbys_over_random_events_keep_every_invariant(
    memory: MemoryPolicy, steps: list[tuple[int, int]], standbys: int, stops: bool
) -> None:
    world = World({device: 2 + size for device, size in CAPACITY.items()}, memory, standbys=standbys)
    world.request(1, CUTS[0], CUTS[5])
    world.settle()
    chance = Chance(world, failures=True)
    chance.requested = 1
    for kind, which in steps:
        chance.step(kind, which)
    if stops:
        world.shutdown()
    world.settle()
    world.check_settled()
