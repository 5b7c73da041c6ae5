from __future__ import annotations

from collections.abc import Mapping

from cotenant.control.adaptation import BatchLatency, Observed
from cotenant.control.events import StartLane, Woke, WorkerReady, WorkersExited
from cotenant.control.observed_totals import ModelTotals, ObservedTotals
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor import Supervisor, SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId


def observe(totals: ObservedTotals, counts: Mapping[str, ModelTotals], seconds: float) -> Observed:
    """Observe beside workers of which none has died."""
    return totals.observe(counts, seconds, Supervisor())


def test_observation_is_what_is_new_since_the_last_one() -> None:
    totals = ObservedTotals()
    first = ModelTotals(arrived=5, rows=20, ended=4, stayed=4, within_target=3, batches=2, predicted=0.25, observed=0.5)
    observe(totals, {"a": first}, 1.0)
    then = ModelTotals(arrived=8, rows=50, ended=6, stayed=5, within_target=4, batches=5, predicted=1.0, observed=1.5)
    assert observe(totals, {"a": then}, 0.5) == Observed(
        seconds=0.5,
        offered={"a": 30},
        stayed={"a": 1},
        within_target={"a": 1},
        waiting={"a": 2},
        latencies={"a": BatchLatency(3, 0.75, 1.0)},
    )


def test_model_that_appears_later_is_new_from_its_start() -> None:
    totals = ObservedTotals()
    observe(totals, {"a": ModelTotals()}, 1.0)
    assert observe(totals, {"a": ModelTotals(), "b": ModelTotals(rows=3)}, 1.0) == Observed(
        seconds=1.0, offered={"b": 3}
    )


def test_stage_that_ends_more_often_than_callers_ask_waits_for_nothing() -> None:
    assert observe(ObservedTotals(), {"a": ModelTotals(arrived=1, ended=4)}, 1.0).waiting == {}


def test_interval_in_which_a_worker_died_or_was_away_is_interrupted() -> None:
    totals, supervisor = ObservedTotals(), Supervisor(SupervisorOptions(lives=2, first_delay=0.5))
    lane = LaneId(DeviceId("gpu"), 0)

    def interrupted() -> bool:
        return totals.observe({}, 0.5, supervisor).interrupted

    supervisor.handle(StartLane(lane, lane.device), 0.0)
    assert not interrupted()  # while it starts for the first time, the plan before serves
    supervisor.handle(WorkerReady(lane, 1), 1.0)
    assert not interrupted()
    supervisor.handle(WorkersExited(((lane, 1),), "it was killed"), 60.0)
    assert interrupted()
    assert interrupted()
    supervisor.handle(Woke(lane, 60.5), 60.5)
    supervisor.handle(WorkerReady(lane, 2), 60.6)
    assert not interrupted()
    supervisor.handle(WorkersExited(((lane, 2),), "it was killed"), 60.7)
    assert supervisor.state(lane) is LaneState.FAILED
    assert interrupted()
    assert not interrupted()  # nothing is expected back: a plan without it may serve


def test_worker_that_was_back_before_anybody_looked_interrupted_all_the_same() -> None:
    totals, supervisor = ObservedTotals(), Supervisor()
    lane = LaneId(DeviceId("gpu"), 0)
    supervisor.handle(StartLane(lane, lane.device), 0.0)
    supervisor.handle(WorkerReady(lane, 1), 1.0)
    assert not totals.observe({}, 0.5, supervisor).interrupted
    supervisor.handle(WorkersExited(((lane, 1),), "it was killed"), 60.0)
    supervisor.handle(Woke(lane, 60.01), 60.01)
    supervisor.handle(WorkerReady(lane, 2), 60.1)
    assert not supervisor.restarting
    assert totals.observe({}, 0.5, supervisor).interrupted


def test_worker_that_does_not_come_back_interrupts_for_some_seconds_only() -> None:
    """One that is refused for want of resources is tried again for ever."""
    totals, supervisor = ObservedTotals(), Supervisor()
    lane = LaneId(DeviceId("gpu"), 0)
    supervisor.handle(StartLane(lane, lane.device), 0.0)
    supervisor.handle(WorkerReady(lane, 1), 1.0)
    supervisor.handle(WorkersExited(((lane, 1),), "it was killed"), 60.0)
    seen = [totals.observe({}, 0.5, supervisor).interrupted for _ in range(40)]
    assert supervisor.restarting
    assert seen == [True] * 20 + [False] * 20
