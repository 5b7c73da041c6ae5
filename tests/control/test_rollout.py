"""The way from one revision to the next, step by step, with a dispatcher behind it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from cotenant.control.events import (
    Assign,
    Assigned,
    Dispatch,
    LaneFailed,
    LaneReady,
    Requested,
    ResizeLanes,
    RetireWorker,
    RolloutCommand,
    RolloutEnded,
    SpawnWorker,
    Switch,
    Switched,
)
from cotenant.control.revision import MemoryPolicy, Phase, RolloutDurations, RolloutOutcome
from cotenant.control.rollout import Rollout
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome
from cotenant.runtime.events import Applied, LaneModel, LaneSpec, Ready
from tests.control.world import Cut, World, planned, revision

D0, D1 = (DeviceId("d", index) for index in range(2))

A, B, C = Cut(D0, ("a",)), Cut(D0, ("b",)), Cut(D0, ("c",))
OTHER = Cut(D1, ("a",))


def serving(
    *cuts: Cut, memory: MemoryPolicy = MemoryPolicy.REFUSE, capacity: dict[DeviceId, int] | None = None
) -> World:
    """Revision 1 with these partitions, in force."""
    world = World(capacity, memory)
    world.request(1, *cuts)
    for incarnation in list(world.workers):
        world.ready(incarnation)
    assert world.ended[1].outcome is RolloutOutcome.COMPLETED
    world.take()
    return world


def spawned(world: World) -> list[str]:
    """Lanes whose workers were started since the last look."""
    return [str(command.lane) for command in world.take() if isinstance(command, SpawnWorker)]


def end_of(world: World, number: int) -> tuple[str, str]:
    return world.ended[number].outcome.value, world.ended[number].reason


def test_first_revision_starts_the_largest_share_first_and_serves_when_all_are_ready() -> None:
    world = World()
    world.request(1, A, Cut(D0, ("b",), 1, 500), Cut(D1, ("c",), 1, 300))
    assert spawned(world) == [LaneId(D0, 1), LaneId(D1, 2), LaneId(D0, 0)]
    world.ready(1)
    world.ready(2)
    assert not world.dispatcher.lanes
    world.ready(3)
    assert {lane.id for lane in world.dispatcher.lanes.values() if lane.up} == {
        LaneId(D0, 0),
        LaneId(D0, 1),
        LaneId(D1, 2),
    }
    world.check_settled()


def test_new_lanes_take_over_at_one_moment_and_the_old_drain() -> None:
    world = serving(A, B)
    world.request(2, B, C)
    assert spawned(world) == [LaneId(D0, 2)]
    assert world.dispatcher.lanes.keys() == {LaneId(D0, 0), LaneId(D0, 1)}
    world.ready(3)
    a, b, c = planned(LaneId(D0, 0), A).spec, planned(LaneId(D0, 1), B).spec, planned(LaneId(D0, 2), C).spec
    said = world.take()
    assert [word for word in said if isinstance(word, Switch | RetireWorker)] == [
        Switch(2, Applied((a, b, c)), (Ready(LaneId(D0, 2)),), Applied((b, c))),
        RetireWorker(LaneId(D0, 0), 1, 1.0),
    ]
    world.settle()
    world.check_settled()


def test_old_lane_stops_only_after_its_batch() -> None:
    world = serving(A)
    running = world.arrive("a")
    world.request(2, OTHER)
    world.ready(2)
    assert world.orchestrator.rollout.status().phase is Phase.DRAIN
    assert not [word for word in world.take() if isinstance(word, RetireWorker)]
    world.finish(LaneId(D0, 0))
    assert world.replies == {running: Outcome.SERVED}
    assert [word.lane for word in world.take() if isinstance(word, RetireWorker)] == [LaneId(D0, 0)]
    world.settle()
    world.check_settled()


def test_waiting_requests_move_to_the_new_lanes() -> None:
    world = serving(A)
    for _ in range(5):
        world.arrive("a")
    world.request(2, OTHER)
    world.ready(2)
    world.settle()
    assert set(world.replies.values()) == {Outcome.SERVED}


def test_same_partitions_switch_at_once_and_start_nothing() -> None:
    world = serving(A, B)
    world.request(2, A, B)
    assert end_of(world, 2) == ("completed", "")
    assert spawned(world) == []


def test_durations_of_each_phase_are_told() -> None:
    world = serving(A)
    world.arrive("a")
    world.now = 10.0
    world.request(2, OTHER)
    world.now = 11.0
    world.request(3, A)
    world.now = 13.0
    world.ready(2)
    world.now = 13.5
    world.finish(LaneId(D0, 0))
    world.now = 14.0
    world.exit(1)
    world.close()
    assert world.ended[2].durations == RolloutDurations(queued=0.0, prepare=3.0, switch=0.0, drain=1.0)
    world.now = 15.0
    world.exit(3)
    world.close()
    assert world.ended[3].durations == RolloutDurations(queued=3.0, prepare=1.0, rollback=0.0)


@pytest.mark.parametrize("how", ["exit", "refuse", "timeout", "device", "failed"])
def test_shadow_that_does_not_come_up_leaves_the_old_revision(how: str) -> None:
    world = serving(A)
    world.request(2, A, B, OTHER)
    assert list(world.workers) == [1, 2, 3]
    world.ready(3 if how != "failed" else 2)
    match how:
        case "exit":
            world.exit(2)
        case "refuse":
            world.refuse(2)
        case "timeout":
            while not world.workers[2].killed:
                world.wake()
            world.exit(2)
        case "device":
            world.lose(D1)
        case "failed":  # it was ready, and dies again and again while others start
            for _ in range(3):
                world.exit(world.incarnation(LaneId(D0, 1)))
                while LaneId(D0, 1) not in [worker.lane for worker in world.workers.values()] and world.timers:
                    world.wake()
    assert 2 not in world.ended  # not before nothing is left
    world.settle()
    outcome, reason = end_of(world, 2)
    assert outcome == "rolled-back"
    assert reason.startswith("the worker of d-1/2" if how == "device" else "the worker of d-0/1 did not start: ")
    assert world.orchestrator.rollout.status().in_force == revision(1)
    world.check_settled()


def test_shadow_that_dies_after_it_was_ready_is_waited_for() -> None:
    world = serving(A)
    world.request(2, B, C)
    world.ready(2)
    world.exit(2)
    world.ready(3)
    assert world.orchestrator.rollout.status().phase is Phase.PREPARE
    assert world.dispatcher.lanes.keys() == {LaneId(D0, 0)}
    world.settle()
    assert end_of(world, 2) == ("completed", "")
    world.check_settled()


def test_old_lane_that_dies_while_new_ones_start_is_started_again() -> None:
    world = serving(A, B)
    world.request(2, B, C)
    running = world.arrive("b")
    world.exit(2)
    world.wake()
    world.ready(4)
    world.ready(3)
    world.settle()
    assert world.replies == {running: Outcome.SERVED}
    world.check_settled()


def test_old_lane_that_dies_while_it_drains_gives_its_batch_to_the_new() -> None:
    world = serving(A)
    running = world.arrive("a")
    world.request(2, OTHER)
    world.ready(2)
    world.exit(1)
    world.settle()
    assert world.replies == {running: Outcome.SERVED}
    assert end_of(world, 2) == ("completed", "")
    world.check_settled()


@pytest.mark.parametrize("shared", [False, True])
def test_batch_of_a_lost_device_is_not_tried_again_on_its_other_lanes(shared: bool) -> None:
    world = serving(A, Cut(D0, ("a", "b")), OTHER)
    running = [world.arrive("a") for _ in range(2)]
    if shared:
        world.crash([1, 2])
    else:
        world.lose(D0)
    assert [request.id for request in world.running[LaneId(D1, 2)].requests] == running[:1]
    world.settle()
    assert set(world.replies.values()) == {Outcome.SERVED}
    world.check_settled()


def test_kept_lane_that_is_down_does_not_hold_the_rollout_up() -> None:
    world = serving(A, B)
    world.exit(1)
    world.request(2, A, C)
    world.ready(3)
    world.settle()
    assert end_of(world, 2) == ("completed", "")
    world.check_settled()


def test_last_of_the_revisions_requested_meanwhile_is_next() -> None:
    world = serving(A)
    world.request(2, B)
    world.request(3, C)
    world.request(4, OTHER)
    assert end_of(world, 3) == ("superseded", "revision 4 was requested before it began")
    assert world.orchestrator.rollout.desired == revision(4)
    world.ready(2)
    world.settle()
    assert world.in_force == [0, 1, 2, 4]
    world.check_settled()


def test_revision_that_was_requested_already_is_ignored() -> None:
    world = serving(A)
    world.feed(Requested(revision(1)))
    assert world.take() == []


def test_revision_that_builds_on_one_that_failed_is_outdated() -> None:
    world = serving(A)
    world.request(2, A, B, base=1)
    world.request(3, A, B, C, base=2)
    world.exit(2)
    world.close()
    assert end_of(world, 3)[0] == "outdated"
    assert end_of(world, 3)[1].startswith("it builds on revision 2, which did not come into force: the worker of d-0/1")
    world.settle()
    world.check_settled()


def test_revision_that_builds_on_one_that_is_not_wanted_any_more_is_outdated() -> None:
    world = serving(A)
    world.request(2, B)
    world.request(3, C, base=1)
    assert end_of(world, 3) == ("outdated", "it builds on revision 1, which is not the one that is wanted any more")
    world.request(4, C, base=2)
    world.settle()
    assert world.in_force == [0, 1, 2, 4]


def test_revision_without_lanes_is_rejected() -> None:
    world = serving(A)
    world.unassignable.add(2)
    world.request(2, B)
    assert end_of(world, 2) == ("rejected", "no such device")
    world.check_settled()


@pytest.mark.parametrize("queued", [False, True])
def test_operator_that_aborts_returns_to_the_old_revision(queued: bool) -> None:
    world = serving(A)
    if queued:
        world.request(2, C)
    world.request(3, B)
    world.abort(3)
    world.settle()
    assert end_of(world, 3) == ("aborted", "the operator said so")
    assert world.in_force == ([0, 1, 2] if queued else [0, 1])
    world.check_settled()


def test_abort_after_the_switch_changes_nothing() -> None:
    world = serving(A)
    world.arrive("a")
    world.request(2, OTHER)
    world.ready(2)
    world.abort(2)
    world.settle()
    assert end_of(world, 2) == ("completed", "")


def test_memory_that_does_not_hold_both_is_refused_before_anything_starts() -> None:
    world = serving(Cut(D0, ("a",), 3 << 30), capacity={D0: 4 << 30})
    world.request(2, Cut(D0, ("b",), 2 << 30))
    assert end_of(world, 2) == (
        "rejected",
        "d-0 has 4 GiB of memory, and its workers need 5 GiB, old and new together; "
        'plan for fewer workers, or allow a gap by `rollout_memory = "gap"`',
    )
    assert spawned(world) == []
    world.check_settled()


def test_memory_that_holds_both_exactly_is_enough() -> None:
    world = serving(Cut(D0, ("a",), 3), capacity={D0: 5})
    world.request(2, Cut(D0, ("b",), 2))
    world.settle()
    assert end_of(world, 2) == ("completed", "")


def test_memory_that_is_not_known_refuses_nothing() -> None:
    cases: list[tuple[dict[DeviceId, int], int | None]] = [({}, 9), ({D0: 4}, None)]
    for capacity, memory in cases:
        world = serving(Cut(D0, ("a",), memory), capacity=capacity)
        world.request(2, Cut(D0, ("b",), memory))
        world.settle()
        assert end_of(world, 2) == ("completed", "")


def test_oversubscribe_starts_all_the_same() -> None:
    world = serving(Cut(D0, ("a",), 3), memory=MemoryPolicy.OVERSUBSCRIBE, capacity={D0: 4})
    world.request(2, Cut(D0, ("b",), 2))
    world.settle()
    assert end_of(world, 2) == ("completed", "")


FULL, NEW = Cut(D0, ("a",), 3), Cut(D0, ("b",), 3)


def test_gap_stops_the_old_of_a_full_device_before_the_new_start() -> None:
    world = serving(FULL, OTHER, memory=MemoryPolicy.GAP, capacity={D0: 4, D1: 4})
    running = world.arrive("a")
    world.request(2, NEW, OTHER, Cut(D1, ("c",)))
    assert spawned(world) == [LaneId(D1, 3)]  # where there is room
    assert world.dispatcher.lanes[LaneId(D0, 0)].draining
    world.finish(LaneId(D0, 0))
    assert world.replies == {running: Outcome.SERVED}
    assert spawned(world) == []
    world.exit(1)
    assert spawned(world) == []
    world.close()
    assert spawned(world) == [LaneId(D0, 2)]
    world.ready(4)
    assert world.orchestrator.rollout.revision == revision(1)
    world.ready(3)
    world.settle()
    assert end_of(world, 2) == ("completed", "")
    world.check_settled()


def test_gap_does_not_help_a_plan_that_does_not_fit_by_itself() -> None:
    world = serving(FULL, memory=MemoryPolicy.GAP, capacity={D0: 4})
    world.request(2, NEW, Cut(D0, ("c",), 2))
    outcome, reason = end_of(world, 2)
    assert outcome == "rejected" and reason.endswith("need 5 B; plan for fewer or smaller workers")
    assert spawned(world) == [] and world.dispatcher.lanes[LaneId(D0, 0)].up


Step = Callable[[World], None]


def _drains(world: World) -> None:
    """The old lane is still at work."""


def _stops(world: World) -> None:
    world.finish(LaneId(D0, 0))


def _starts(world: World) -> None:
    world.finish(LaneId(D0, 0))
    world.exit(1)
    world.close()


@pytest.mark.parametrize("then", [_drains, _stops, _starts])
@pytest.mark.parametrize("how", ["abort", "device"])
def test_gap_that_fails_brings_the_old_back(then: Step, how: str) -> None:
    world = serving(FULL, OTHER, memory=MemoryPolicy.GAP, capacity={D0: 4, D1: 4})
    world.arrive("a")
    world.request(2, NEW, OTHER, Cut(D1, ("c",)))
    then(world)
    if how == "abort":
        world.abort(2)
    else:
        world.lose(D1)
    world.settle()
    assert end_of(world, 2)[0] == ("aborted" if how == "abort" else "rolled-back")
    assert set(world.replies.values()) == {Outcome.SERVED}
    world.check_settled()
    served = world.arrive("a")
    world.settle()
    assert world.replies[served] is Outcome.SERVED


def test_gap_that_fails_ends_once_the_old_serve_again() -> None:
    world = serving(FULL, memory=MemoryPolicy.GAP, capacity={D0: 4})
    world.request(2, NEW)
    _stops_alone(world, 1)
    _stops_alone(world, 2)
    assert 2 not in world.ended
    world.ready(3)
    assert end_of(world, 2)[0] == "rolled-back"


def _stops_alone(world: World, incarnation: int) -> None:
    world.exit(incarnation)
    world.close()


def test_gap_that_fails_before_the_drained_old_stopped_keeps_them() -> None:
    world = serving(FULL, memory=MemoryPolicy.GAP, capacity={D0: 4})
    world.lose(D1)
    world.request(2, NEW, OTHER)  # a worker that cannot start, at the very moment in which the old lane drains
    assert end_of(world, 2)[0] == "rolled-back"
    assert spawned(world) == [] and world.dispatcher.lanes[LaneId(D0, 0)].up
    world.settle()
    world.check_settled()


def test_gap_that_fails_on_a_lost_device_ends_although_the_old_cannot_return_yet() -> None:
    world = serving(FULL, memory=MemoryPolicy.GAP, capacity={D0: 4})
    world.request(2, NEW)
    world.exit(1)
    world.close()
    world.lose(D0)
    world.close()
    assert end_of(world, 2)[0] == "rolled-back"
    assert world.orchestrator.supervisor.state(LaneId(D0, 0)) is LaneState.LOST
    world.settle()
    world.check_settled()


def test_gap_that_fails_ends_although_the_old_failed_for_good() -> None:
    world = World({D0: 4}, MemoryPolicy.GAP, SupervisorOptions(lives=1))
    world.request(1, FULL)
    world.ready(1)
    world.request(2, NEW)
    world.exit(1)
    world.close()
    world.exit(2)
    world.close()
    world.exit(3)
    assert any(isinstance(word, LaneFailed) for word in world.take())
    assert end_of(world, 2)[0] == "rolled-back"
    world.check_settled()


@pytest.mark.parametrize("when", ["idle", "prepare", "drain", "rollback", "queued"])
def test_shutdown_in_any_phase_ends_everything(when: str) -> None:
    world = serving(A)
    running = world.arrive("a")
    if when != "idle":
        world.request(2, OTHER)
    match when:
        case "drain":
            world.ready(2)
        case "rollback":
            world.ready(2)
            world.request(3, C)
            world.finish(LaneId(D0, 0))
            world.exit(1)
            world.close()
            world.abort(3)
        case "queued":
            world.request(3, C)
    world.shutdown()
    world.settle()
    world.check_settled()
    assert world.replies == {running: Outcome.SERVED}
    assert not world.workers and not world.open
    expected = {"drain": "completed", "rollback": "completed"}.get(when, "aborted")
    assert when == "idle" or end_of(world, 2)[0] == expected
    world.request(9, A)
    assert end_of(world, 9) == ("aborted", "the server stops")


def test_batch_that_outlasts_a_shutdown_fails_and_is_not_lost_silently() -> None:
    world = serving(A)
    running = world.arrive("a")
    world.shutdown()
    world.exit(1, "it did not stop within 1 s")
    assert world.replies == {running: Outcome.FAILED}


def test_desired_requested_and_observed_can_be_read_at_any_time() -> None:
    world = serving(A)
    world.request(2, B)
    status = world.orchestrator.rollout.status()
    assert (status.desired, status.in_force, status.phase, status.rolling_out) == (
        revision(2),
        revision(1),
        Phase.PREPARE,
        2,
    )
    assert status.requested == {LaneId(D0, 0), LaneId(D0, 1)}
    assert status.observed == {LaneId(D0, 0)}
    world.abort(2)
    assert world.orchestrator.rollout.desired == revision(1)


def test_late_news_of_another_rollout_is_ignored() -> None:
    world = serving(A)
    world.request(2, B)
    before = world.orchestrator.rollout.status()
    world.take()
    world.feed(Switched(1))
    world.feed(Switched(2))
    assert world.take() == [] and world.orchestrator.rollout.status() == before


def test_dispatcher_hears_only_of_lanes_that_it_has() -> None:
    world = serving(A)
    world.request(2, A, B, C)
    world.ready(2)
    world.exit(2)
    assert not [word for word in world.take() if isinstance(word, Dispatch)]
    assert not [word for word in world.take() if isinstance(word, RolloutEnded)]


def in_place(*cuts: Cut, capacity: dict[DeviceId, int] | None = None) -> World:
    """Revision 1 with these partitions, in force on devices whose workers go on with other shares."""
    world = World(capacity, in_place=True)
    world.request(1, *cuts)
    for incarnation in list(world.workers):
        world.ready(incarnation)
    world.take()
    return world


def test_shares_change_in_place_at_the_switch_and_nothing_starts() -> None:
    world = in_place(A, B)
    world.request(2, A.at(300), B)
    said = world.take()
    assert [type(word) for word in said] == [Assign, ResizeLanes, Switch, RolloutEnded]
    assert said[1] == ResizeLanes((LaneId(D0, 0),))
    assert len(world.workers) == 2 and end_of(world, 2) == ("completed", "")
    world.check_settled()


def test_shares_change_no_earlier_than_new_workers_are_ready() -> None:
    world = in_place(A)
    world.request(2, A.at(300), C)
    assert not any(isinstance(word, ResizeLanes) for word in world.take())
    world.ready(2)
    said = [word for word in world.take() if isinstance(word, ResizeLanes | Switch)]
    assert [type(word) for word in said] == [ResizeLanes, Switch]
    world.settle()
    world.check_settled()


def test_rollback_leaves_shares_as_they_were() -> None:
    world = in_place(A)
    world.request(2, A.at(300), C)
    world.exit(2, "no such file")
    world.settle()
    assert end_of(world, 2)[0] == "rolled-back"
    assert not any(isinstance(word, ResizeLanes) for word in world.take())
    assert world.orchestrator.rollout.lanes[LaneId(D0, 0)].share == A.share
    world.request(3, A.at(300))
    assert [word.lanes for word in world.take() if isinstance(word, ResizeLanes)] == [(LaneId(D0, 0),)]
    world.check_settled()


def test_worker_that_grows_in_place_has_to_fit_the_memory_beside_the_others() -> None:
    """And is taken for as large as it ever was: it does not give memory back."""
    rollout = Rollout()
    lane, key = planned(LaneId(D0, 0), A), LaneId(D0, 0)

    def roll(number: int, memory: int, batch: int) -> list[RolloutCommand]:
        spec = LaneSpec(id=key, models=(LaneModel(model="a", latencies=(0.1,) * batch),))
        wanted = msgspec.structs.replace(lane, memory=memory, spec=spec)
        rollout.handle(Requested(revision(number)), 0.0)
        commands = rollout.handle(Assigned(number, (wanted,), {D0: 4}), 0.0)
        return commands + rollout.handle(LaneReady(key), 0.0) + rollout.handle(Switched(number), 0.0)

    roll(1, memory=2, batch=2)
    assert ResizeLanes((key,)) in roll(2, memory=4, batch=4)
    assert not any(isinstance(word, ResizeLanes) for word in roll(3, memory=2, batch=2))
    assert rollout._workers[key].memory == 4
    (ended,) = (word for word in roll(4, memory=5, batch=8) if isinstance(word, RolloutEnded))
    assert ended.outcome is RolloutOutcome.REJECTED
