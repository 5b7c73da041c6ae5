from __future__ import annotations

from collections.abc import Mapping

from cotenant.control.adaptation import BatchLatency, Observed
from cotenant.control.observed_totals import ModelTotals, ObservedTotals
from cotenant.control.orchestrator import Orchestrator
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.application import Fixed
from cotenant.core.identity import DeviceId, LaneId
from cotenant.runtime.events import ApplicationSpec, StageSpec
from tests.control.world import Cut, World


def observe(totals: ObservedTotals, counts: Mapping[str, ModelTotals], seconds: float) -> Observed:
    """Observe beside workers of which none has died."""
    return totals.observe(counts, seconds, Orchestrator())


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


LANE = LaneId(DeviceId("gpu"), 0)
OTHER = DeviceId("gpu", 1)


def interrupted(totals: ObservedTotals, world: World) -> tuple[str, ...]:
    return totals.observe({}, 0.5, world.orchestrator).interrupted


def serving(*cuts: Cut, lives: int = 13) -> World:
    """Workers of these partitions, incarnations from 1 on."""
    world = World(options=SupervisorOptions(lives=lives))
    world.request(1, *cuts)
    for incarnation in range(1, len(cuts) + 1):
        world.ready(incarnation)
    return world


def test_interval_in_which_a_worker_died_or_was_away_is_interrupted() -> None:
    totals, world = ObservedTotals(), World(options=SupervisorOptions(lives=2, first_delay=0.5))
    world.request(1, Cut(LANE.device, ("a",)))
    assert interrupted(totals, world) == ()  # while it starts for the first time, the plan before serves
    world.now = 1.0
    world.ready(1)
    assert interrupted(totals, world) == ()
    world.now = 60.0
    world.exit(1)
    assert interrupted(totals, world) == interrupted(totals, world) == ("a",)
    world.wake()
    world.ready(2)
    assert interrupted(totals, world) == ()
    world.exit(2)
    assert world.supervisor.state(LANE) is LaneState.FAILED
    assert interrupted(totals, world) == ("a",)
    assert interrupted(totals, world) == ()  # nothing is expected back: a plan without it may serve


def test_models_of_lanes_that_warm_up_are_interrupted() -> None:
    totals, world = ObservedTotals(), serving(Cut(LANE.device, ("a",)), Cut(OTHER, ("b",)))
    assert totals.observe({}, 0.5, world.orchestrator, [LANE]).interrupted == ("a",)
    assert totals.observe({}, 0.5, world.orchestrator).interrupted == ()


def test_worker_that_was_back_before_anybody_looked_interrupted_all_the_same() -> None:
    totals, world = ObservedTotals(), serving(Cut(LANE.device, ("a",)))
    assert interrupted(totals, world) == ()
    world.exit(1)
    world.wake()
    world.ready(2)
    assert world.supervisor.state(LANE) is LaneState.READY
    assert interrupted(totals, world) == ("a",)


def test_worker_that_does_not_come_back_interrupts_for_some_seconds_only() -> None:
    """One that is refused for want of resources is tried again for ever."""
    totals, world = ObservedTotals(), serving(Cut(LANE.device, ("a",)))
    world.exit(1)
    seen = [bool(interrupted(totals, world)) for _ in range(40)]
    assert world.supervisor.state(LANE) is LaneState.RESTARTING
    assert seen == [True] * 20 + [False] * 20


def test_death_of_a_worker_interrupts_who_gets_its_requests_and_nobody_else() -> None:
    """Requests of `a` go to the partition that `a` shares with `b` meanwhile, and make those of `b` late."""
    totals = ObservedTotals()
    world = serving(Cut(LANE.device, ("a",)), Cut(LANE.device, ("a", "b")), Cut(LANE.device, ("c", "d")))
    world.exit(1)
    assert interrupted(totals, world) == ("a", "b")
    world.wake()
    world.ready(4)
    assert interrupted(totals, world) == ()
    world.exit(3)
    assert interrupted(totals, world) == ("c", "d")


def test_application_is_interrupted_with_a_model_of_its_stages() -> None:
    def interrupted_by(incarnation: int) -> tuple[str, ...]:
        world = serving(Cut(LANE.device, ("a",)), Cut(LANE.device, ("b",)))
        stage = StageSpec(name="only", model="a", fanout=Fixed(1))
        world.orchestrator.rollout.applications = (ApplicationSpec("app", 1.0, (stage,)),)
        world.exit(incarnation)
        return interrupted(ObservedTotals(), world)

    assert interrupted_by(1) == ("a", "app")
    assert interrupted_by(2) == ("b",)
