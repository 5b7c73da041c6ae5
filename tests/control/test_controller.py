"""What a controller decides, event by event, and what holds whatever happens."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.control.adaptation import (
    Acquire,
    AcquisitionFailed,
    Adopted,
    BatchLatency,
    Cause,
    ControllerCommand,
    ControllerEvent,
    CorrectProfile,
    DevicesFound,
    DevicesGone,
    Observed,
    Release,
    Roll,
    RollEnded,
    Solve,
    Solved,
    SolveStep,
)
from cotenant.control.controller import Controller
from cotenant.control.provider import DeviceOffer
from cotenant.control.revision import RolloutOutcome
from cotenant.core.plan import Partition, Placement, Plan
from tests.control.controller_world import GPU, PERIOD, World, plan_of

NOTHING = Plan(planner="hand", devices=())


def test_constant_rate_changes_nothing() -> None:
    world = World()
    assert world.observe(100.0, 600) == []


def test_doubled_rate_is_planned_for_with_headroom() -> None:
    world = World()
    world.observe(100.0, 30)
    solve = world.solve(200.0, 3.0)
    assert solve.step is SolveStep.KEEP
    assert solve.rates["a"] == pytest.approx(240.0, rel=0.1)
    assert solve.offered["a"] == pytest.approx(200.0, rel=0.05)
    assert solve.slowdowns == {}
    assert "a is offered 200/s, and its plan sustains 100/s" in solve.reason
    (roll,) = world.answer(solve, plan_of(1, 250.0))
    assert isinstance(roll, Roll)
    assert roll.plan == plan_of(1, 250.0)
    assert world.rolled(roll) == []
    assert world.observe(200.0, 300) == []
    assert world.controller.status().models["a"].planned == pytest.approx(240.0, rel=0.1)


def test_doubled_rate_needs_no_proof_of_its_excess_over_the_plan() -> None:
    world = World()
    world.tell(Adopted(plan=plan_of(1, 336.0), rates={"a": 336.0}))  # 84 % of the rate to come
    world.observe(200.0, 30)
    assert world.solve(400.0, PERIOD).rates["a"] == pytest.approx(480.0, rel=0.1)


def suspecting(**options: Any) -> tuple[World, Solve]:
    """A world whose rate may have risen beyond its plan, by a likelihood ratio of e^14."""
    world = World(**options)
    world.tell(Adopted(plan=plan_of(1, 150.0), rates={"a": 150.0}))
    world.observe(100.0, 60)
    return world, world.solve(158.0, 1.0)


def test_plan_for_a_change_that_may_be_chance_waits_for_proof() -> None:
    world, solve = suspecting()
    assert world.answer(solve, plan_of(1, 190.0)) == []
    assert world.controller.status().activity == "watching"
    (roll,) = world.observe(158.0, 1.0)
    assert isinstance(roll, Roll)
    assert roll.plan == plan_of(1, 190.0)


def test_plan_is_gone_over_to_at_once_where_proof_came_while_it_was_made() -> None:
    world, solve = suspecting()
    assert world.observe(158.0, 1.0) == []
    (roll,) = world.answer(solve, plan_of(1, 190.0))
    assert isinstance(roll, Roll)


def test_plan_for_a_change_that_was_chance_is_discarded() -> None:
    world, solve = suspecting()
    world.answer(solve, plan_of(1, 190.0))
    assert world.observe(100.0, 120.0) == []
    assert [each.action for each in world.controller.status().decisions] == ["plan again", "discard the plan"]


def test_plan_that_waits_for_proof_is_discarded_where_another_comes_into_force() -> None:
    world, solve = suspecting()
    world.answer(solve, plan_of(1, 190.0))
    world.tell(Adopted(plan=plan_of(1, 152.0), rates={"a": 152.0}))
    assert isinstance(world.solve(158.0, 10.0), Solve)


def test_plan_that_waits_for_proof_is_discarded_where_its_device_is_gone() -> None:
    world, solve = suspecting()
    world.answer(solve, plan_of(1, 190.0))
    (again,) = world.tell(DevicesGone(GPU[:1], "lost"))
    assert isinstance(again, Solve)
    assert again.cause is Cause.DEVICES


def test_missed_slo_does_not_wait_for_proof_of_a_change() -> None:
    world, solve = suspecting(changed_threshold=1000.0)
    world.answer(solve, plan_of(1, 190.0))
    (again,) = world.observe(158.0, 10.0, within=0.5)
    assert isinstance(again, Solve)
    assert again.cause is Cause.SLO


def test_few_requests_after_silence_are_no_proof_of_an_excess_over_the_plan() -> None:
    world = World()
    world.tell(Adopted(plan=plan_of(1, 4.0), rates={"a": 4.0}))
    world.observe(0.0, 60)
    assert world.observe(8.0, 1.0) == []
    assert world.controller._watches["a"].estimate.before == 0.0
    assert world.controller._watches["a"].estimate.rate > 4.0


def test_plan_that_serves_the_new_rate_is_kept() -> None:
    world = World()
    world.observe(100.0, 30)
    solve = world.solve(150.0)
    assert world.answer(solve, plan_of(1), SolveStep.KEEP) == []
    assert world.observe(150.0, 300) == []
    assert world.controller.status().models["a"].sustained > 180


def test_model_that_was_loaded_without_a_rate_keeps_its_place_in_the_next_plan() -> None:
    world = World()
    (device,) = plan_of(1).devices
    (held,) = device.partitions
    loaded = Placement(model="b", batch=1, rate=0.0, duty=0.1, latency=0.01)
    both = msgspec.structs.replace(held, placements=(*held.placements, loaded))
    plan = msgspec.structs.replace(plan_of(1), devices=(msgspec.structs.replace(device, partitions=(both,)),))
    world.tell(Adopted(plan=plan, rates={}))  # as after a load of a model whose rate nobody knows
    solve = world.solve(200.0)
    assert solve.rates["b"] == world.controller.options.idle_rate


def test_only_one_plan_is_asked_for_at_a_time() -> None:
    world = World()
    solve = world.solve(300.0)
    assert world.observe(600.0, 30) == []
    assert world.tell(DevicesFound(GPU[3:4])) == []
    again = world.answer(solve, plan_of(1, 360.0))
    assert [type(command) for command in again] == [Solve], "rates have risen beyond that plan while it was made"


def test_late_answer_is_ignored() -> None:
    world = World()
    solve = world.solve(300.0)
    (roll,) = world.answer(solve, plan_of(1, 360.0))
    assert world.answer(solve, plan_of(2)) == []
    world.rolled(roll)
    assert world.tell(RollEnded(number=solve.number, outcome=RolloutOutcome.ROLLED_BACK)) == []
    assert world.controller.status().activity == "watching"


def test_answer_to_an_earlier_question_is_ignored() -> None:
    world = World()
    first = world.solve(300.0)
    world.answer(first, None, error="the solver did not answer")
    second = world.solve(300.0, 100.0)
    assert world.answer(first, plan_of(1, 360.0)) == []
    assert world.controller.status().activity == "solving"
    assert [type(command) for command in world.answer(second, plan_of(1, 360.0))] == [Roll]


def test_failed_solver_is_asked_again_later_and_later() -> None:
    world = World(retry=2.0)
    asked = []
    for _ in range(4):
        solve = world.solve(300.0, 100.0)
        asked.append(world.now)
        assert world.answer(solve, None, error="the solver died") == []
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    assert gaps == [2.0, 4.0, 8.0]
    assert "the solver died" in world.controller.status().decisions[-1].reason


def test_failure_that_lasts_for_days_is_tried_again_as_seldom_as_before() -> None:
    world = World(devices=1)
    commands = world.tell(DevicesGone(GPU[:1], "it fell off the bus"))
    for _ in range(1_100):  # more than the doublings that a float can hold
        (solve,) = commands
        assert isinstance(solve, Solve)
        assert world.answer(solve, None, error="no device is left") == []
        world.now += 60.0
        commands = world.tell(Observed(seconds=PERIOD, offered={}))


def test_what_others_change_meanwhile_is_no_failure() -> None:
    world = World(retry=2.0)
    asked = []
    for _ in range(4):
        solve = world.solve(300.0, 100.0)
        asked.append(world.now)
        world.answer(solve, None, error="another revision is on its way", outdated=True)
    assert [after - before for before, after in itertools.pairwise(asked)] == [2.0, 2.0, 2.0]
    (roll,) = world.answer(world.solve(300.0, 100.0), plan_of(1, 360.0))
    begun = world.now
    world.rolled(roll, RolloutOutcome.OUTDATED)
    solve = world.solve(300.0, 100.0)
    assert world.now - begun == 2.0
    begun = world.now
    world.answer(solve, None, error="the solver died")
    world.solve(300.0, 100.0)
    assert world.now - begun == 2.0, "the first failure of its own"


def test_rollout_that_fails_leaves_the_plan_in_force() -> None:
    world = World()
    (roll,) = world.answer(world.solve(300.0), plan_of(1, 360.0))
    assert world.rolled(roll, RolloutOutcome.ROLLED_BACK) == []
    assert world.controller.status().models["a"].planned == 100.0
    assert world.solve(300.0).current == plan_of(1)


def test_rollout_that_fails_again_and_again_is_tried_later_and_later() -> None:
    world = World(retry=2.0, longest_retry=10.0)
    ended = []
    for _ in range(5):
        (roll,) = world.answer(world.solve(300.0), plan_of(1, 360.0))
        ended.append(world.now)
        world.rolled(roll, RolloutOutcome.ROLLED_BACK)
    assert [after - before for before, after in itertools.pairwise(ended)] == [2.0, 4.0, 8.0, 10.0]
    (roll,) = world.answer(world.solve(300.0), plan_of(1, 360.0))
    world.rolled(roll)
    (roll,) = world.answer(world.solve(600.0), plan_of(1, 720.0))
    world.rolled(roll, RolloutOutcome.ROLLED_BACK)
    begun = world.now
    world.solve(600.0)
    assert world.now - begun == 2.0, "the first since a plan came into force"


def test_slow_batches_are_planned_for() -> None:
    world = World()
    world.observe(100.0, 30)
    solve = world.solve(100.0, 10.0, slower=1.6)
    assert solve.slowdowns["a"] == pytest.approx(1.5, abs=0.15)
    (roll,) = world.answer(solve, plan_of(1, 120.0))
    world.rolled(roll)
    assert world.observe(100.0, 60, slower=1.6 / solve.slowdowns["a"]) == []
    back = world.solve(100.0, 20.0, slower=1 / solve.slowdowns["a"])
    assert back.slowdowns.get("a", 1.0) < 1.15


def test_plan_that_counts_with_no_slowdown_since_nobody_would_be_served_stands_for_a_while() -> None:
    """Batches stay slow, and to plan for that again and again would only take from those that serve."""
    world = World()
    world.observe(100.0, 30)
    solve = world.solve(100.0, 10.0, slower=50.0)
    (roll,) = world.answer(solve, plan_of(1, 120.0), slowed=False, short="too slow")
    assert isinstance(roll, Roll) and roll.slowdowns == {}
    world.rolled(roll)
    assert world.controller.status().models["a"].slowdown == 1.0
    since = world.now
    again = world.solve(100.0, 60.0, slower=50.0)
    assert world.now - since >= 10.0
    assert again.slowdowns["a"] > 10.0  # not of a plan that counts with them already
    assert world.answer(again, plan_of(1, 120.0), slowed=False, short="too slow") == []
    assert world.observe(100.0, 60.0) == []  # other programs have ended: what is in force is right
    assert world.controller.status().models["a"].slowdown == 1.0


def left_out(short_cooldown: float = 10.0, cooldown: float = 60.0) -> World:
    """A model that a plan leaves out since its batches took four times as long."""
    world = World(short_cooldown=short_cooldown, cooldown=cooldown)
    world.tell(Adopted(plan=NOTHING, rates={"a": 100.0}, slowdowns={"a": 4.0}))
    return world


def test_model_left_out_for_slow_batches_is_tried_again_later_and_later() -> None:
    world = left_out(short_cooldown=10.0)
    for patience, served in ((10.0, 0.0), (20.0, 0.0), (40.0, 20.0), (10.0, 0.0)):  # as at first, once it was served
        since = world.now
        solve = world.solve(100.0, 60.0, runs=False)
        assert world.now - since == pytest.approx(patience, abs=2 * PERIOD)
        assert solve.slowdowns == {} and "may be as fast" in solve.reason
        (roll,) = world.answer(solve, plan_of(1, 120.0))
        world.rolled(roll)
        assert world.observe(100.0, served) == []
        again = world.solve(100.0, 20.0, slower=4.0)  # it is as slow as before
        assert again.slowdowns["a"] == pytest.approx(4.0, abs=0.6)
        (roll,) = world.answer(again, NOTHING)
        world.rolled(roll)


def test_model_left_out_that_nobody_asks_for_is_not_tried_again() -> None:
    world = left_out(short_cooldown=10.0, cooldown=600.0)
    assert world.observe(0.0, 120.0, runs=False) == []


@pytest.mark.parametrize("split", [{}, {"a": {"stage": 0.1}}])
def test_slow_model_or_application_that_is_served_without_batches_is_no_reason_to_plan(
    split: dict[str, dict[str, float]],
) -> None:
    world = World(short_cooldown=10.0)
    plan = msgspec.structs.replace(NOTHING, split=split) if split else plan_of(1)
    world.tell(Adopted(plan=plan, rates={"a": 1.0}, slowdowns={"a": 1.5}))
    for _ in range(10):  # it is rarely asked for, but asked for
        assert world.observe(2.0, PERIOD, runs=False) == []
        assert world.observe(0.0, 15.0, runs=False) == []


def test_fast_batches_are_no_reason_to_plan() -> None:
    world = World()
    assert world.observe(100.0, 120, slower=0.5) == []


def test_profile_of_a_model_slow_on_a_quiet_machine_is_corrected_once() -> None:
    world = World(correct_after=30.0)
    solve = world.solve(100.0, slower=2.0, foreign=0.0)
    (roll,) = world.answer(solve, plan_of(1, 120.0))
    world.rolled(roll)
    left = 2.0 / solve.slowdowns["a"]  # predictions count with the slowdown now
    (correction,) = world.observe(100.0, 60, slower=left, foreign=0.0)
    assert isinstance(correction, CorrectProfile)
    assert correction.model == "a"
    assert correction.factor == pytest.approx(2.0, rel=0.01)
    assert correction.batches >= 200
    assert world.controller.decisions[-1].action == "correct the profile of a by × 2"
    assert world.observe(100.0, 600, slower=left, foreign=0.0) == []


def test_correction_is_taken_back_once_batches_are_as_fast_as_profiled() -> None:
    world = World(correct_after=30.0)
    world.tell(Adopted(plan=plan_of(1), rates={"a": 100.0}, corrections={"a": 1.5}))
    assert world.observe(100.0, 60, slower=0.9, foreign=0.0) == [CorrectProfile("a", 1.0, 600)]


@pytest.mark.parametrize("foreign", [0.5, None])
def test_profile_is_not_corrected_beside_other_programs(foreign: float | None) -> None:
    world = World(correct_after=30.0)
    (solve,) = world.observe(100.0, 60, slower=2.0, foreign=foreign)
    assert isinstance(solve, Solve)
    (roll,) = world.answer(solve, plan_of(1, 120.0))
    world.rolled(roll)
    assert world.observe(100.0, 120, foreign=foreign) == []


def test_profile_is_not_corrected_below_what_was_measured() -> None:
    assert World(correct_after=30.0).observe(100.0, 300, slower=0.5, foreign=0.0) == []


def test_what_is_late_because_a_worker_died_is_no_fault_of_the_plan() -> None:
    world = World()
    for _ in range(30):
        assert world.observe(100.0, 0.5, within=0.0, slower=3.0, interrupted=("a",)) == []
        assert world.observe(100.0, 0.5, within=0.5, slower=2.0) == []  # what had waited for it
        assert world.observe(100.0, 1.0) == []
    solve = world.solve(100.0, within=0.9)
    assert solve.reason == "SLO violated: a"


def test_worker_that_dies_again_and_again_hides_no_slo_missed_by_other_models() -> None:
    world = World()
    solve = world.solve(100.0, within=0.9, interrupted=("b",))
    assert solve.reason == "SLO violated: a"


def test_missed_slo_is_planned_for_with_more_headroom() -> None:
    world = World()
    solve = world.solve(100.0, within=0.9)
    assert "SLO violated: a" in solve.reason
    world.answer(solve, plan_of(1), SolveStep.KEEP)
    later = world.solve(100.0, within=0.9)
    assert later.rates["a"] > 1.1 * solve.rates["a"]


def test_target_of_a_model_that_was_loaded_later_is_known() -> None:
    world = World()
    world.tell(Adopted(plan=plan_of(1), rates={"a": 100.0}, targets={"a": 0.8}))
    assert world.observe(100.0, 60, within=0.9) == []


def test_plan_that_leaves_rates_unserved_is_not_said_to_sustain_them() -> None:
    world = World()
    short = msgspec.structs.replace(plan_of(1), unserved={"a": 200.0})
    solve = world.solve(300.0)
    world.answer(solve, short, SolveStep.KEEP, rates={"a": 300.0}, sustained={"a": 300.0}, short="a 200 of 300/s")
    assert world.controller.status().models["a"].sustained == 100.0
    assert world.observe(300.0, 20.0) == [], "nor is it made again and again"
    assert "and its plan sustains 100/s" in world.solve(600.0).reason
    world.tell(Adopted(plan=short, rates={"a": 300.0}))
    assert world.controller.status().models["a"].sustained == 100.0
    world.tell(Adopted(plan=plan_of(2), rates={"a": 150.0}))
    assert world.controller.status().models["a"].sustained == 150.0


def test_model_without_a_place_is_not_said_to_be_sustained() -> None:
    world = World()
    world.tell(Adopted(plan=plan_of(1), rates={"a": 100.0, "b": 1.0}))
    solve = world.solve(150.0)
    assert solve.rates["b"] == 1.0
    world.answer(solve, plan_of(1), SolveStep.KEEP, rates={"a": 150.0, "b": 0.0}, sustained={"a": 160.0, "b": 0.0})
    assert {name: model.sustained for name, model in world.controller.status().models.items()} == {"a": 160.0, "b": 0.0}


def test_short_plan_is_made_anew_soon_after_rates_fall() -> None:
    world = World(cooldown=60.0, short_cooldown=10.0)
    assert world.answer(world.solve(300.0), plan_of(1), rates={"a": 300.0}, short="a 200 of 300/s") == []
    assert world.observe(300.0, 30) == []
    begun = world.now
    world.solve(100.0)
    assert 10.0 <= world.now - begun <= 15.0


def test_rate_that_rises_is_planned_for_before_it_exceeds_the_plan() -> None:
    world = World()
    (roll,) = world.answer(world.solve(150.0), plan_of(1, 190.0), sustained={"a": 200.0})
    world.now += 15.0
    world.rolled(roll)
    world.observe(100.0, 100.0)
    begun, solve = world.now, None
    while world.now < begun + 200.0 and solve is None:
        commands = world.observe(100.0 + world.now - begun, PERIOD)
        solve = next((command for command in commands if isinstance(command, Solve)), None)
    assert solve is not None
    assert 150.0 < 100.0 + world.now - begun < 180.0, "it knows that a plan takes 15 s"
    assert solve.rates["a"] > 215.0
    assert "rising to" in solve.reason


def test_fewer_devices_are_looked_for_once_a_plan_has_turned_out_too_large() -> None:
    world = World(plan_of(3), devices=3, cooldown=20.0)
    (roll,) = world.answer(world.solve(200.0), plan_of(3, 260.0), rates={"a": 260.0})  # for a rise that ended early
    world.rolled(roll)
    solve = world.solve(200.0, 150.0)
    assert solve.cause is Cause.SAVING and solve.rates["a"] == pytest.approx(240.0, rel=0.02)
    (roll,) = world.answer(solve, plan_of(2, 245.0))
    assert isinstance(roll, Roll) and roll.plan.devices_used == 2
    world.rolled(roll)
    assert world.observe(200.0, 600.0) == []


@pytest.mark.parametrize(("unserved", "asked"), [({}, 1), ({"b": 5.0}, 0)])
def test_adopted_plan_that_leaves_rates_unserved_is_not_made_anew_for_a_small_fall(
    unserved: dict[str, float], asked: int
) -> None:
    world = World(cooldown=20.0)
    plan = msgspec.structs.replace(plan_of(3), unserved=unserved)
    world.tell(Adopted(plan=plan, rates={"a": 100.0}))
    assert len(world.observe(77.0, 150.0)) == asked


def test_model_that_an_adopted_plan_of_one_device_leaves_unserved_is_planned_for_once_rates_are_lower() -> None:
    world = World(cooldown=20.0)
    plan = msgspec.structs.replace(plan_of(1), unserved={"b": 50.0})
    world.tell(Adopted(plan=plan, rates={"a": 100.0, "b": 50.0}))
    begun = world.now
    solve = world.solve(100.0, 60.0)  # and nobody asks for `b`
    assert 20.0 <= world.now - begun < 22.0
    assert solve.cause is Cause.SAVING and solve.rates["b"] == world.controller.options.idle_rate
    assert world.answer(solve, plan, SolveStep.KEEP) == []
    assert world.observe(100.0, 600.0) == []


def test_plan_that_saves_nothing_is_not_moved_to() -> None:
    world = World(plan_of(3, price=1.0), devices=3, cooldown=20.0)
    solve = world.solve(30.0, 100.0)
    moved = plan_of(3, 36.0, price=1.0, first=1)
    assert world.answer(solve, moved) == []
    assert "no gain" in world.controller.status().decisions[-1].reason


def test_adopted_plan_is_the_one_in_force() -> None:
    world = World()
    world.tell(Adopted(plan=plan_of(1, 400.0), rates={"a": 400.0}))
    assert world.observe(390.0, 60) == []


def test_higher_rate_of_an_adopted_plan_is_believed_for_a_cooldown() -> None:
    world = World(plan_of(1), cooldown=60.0)
    world.observe(10.0, 5)
    world.tell(Adopted(plan=plan_of(3, 300.0), rates={"a": 300.0}))
    assert world.observe(10.0, 50) == []
    assert world.solve(10.0, 30).cause is Cause.SAVING


def test_model_that_an_adopted_plan_leaves_out_is_forgotten() -> None:
    world = World()
    world.observe(100.0, 5)
    other = plan_of(1)
    (device,) = other.devices
    placement = Placement(model="b", batch=8, rate=10.0, duty=0.1, latency=0.1)
    device = msgspec.structs.replace(device, partitions=(Partition(share=1000, placements=(placement,)),))
    world.tell(Adopted(plan=msgspec.structs.replace(other, devices=(device,)), rates={"b": 10.0}))
    for _ in range(20):
        world.now += PERIOD
        assert world.tell(Observed(seconds=PERIOD, offered={"b": 5})) == []


def test_plan_that_was_made_for_a_plan_no_more_in_force_is_discarded() -> None:
    world = World()
    solve = world.solve(200.0)
    adopted = plan_of(1, 50.0)
    world.tell(Adopted(plan=adopted, rates={"a": 50.0}))
    assert world.answer(solve, solve.current, SolveStep.KEEP) == []
    assert world.controller.status().models["a"].planned == 50.0
    assert world.controller.decisions[-1].action == "discard the plan"
    assert world.solve(200.0).current == adopted


def test_model_that_nobody_expected_is_planned_for() -> None:
    world = World()
    world.now += PERIOD
    commands: list[ControllerCommand] = []
    for _ in range(20):
        world.now += PERIOD
        commands += world.tell(Observed(seconds=PERIOD, offered={"a": 50, "b": 20}))
    assert isinstance(commands[0], Solve)
    assert commands[0].rates["b"] > 40


def test_clock_that_stands_still_or_jumps_back_is_survived() -> None:
    world = World()
    for seconds in (0.0, -5.0):
        assert world.tell(Observed(seconds=seconds, offered={"a": 10**9})) == []
    assert world.observe(100.0, 60) == []


@pytest.mark.parametrize("seconds", [3600.0, 1e9, math.inf, math.nan])
def test_clock_that_jumps_ahead_changes_nothing(seconds: float) -> None:
    world = World(devices=3)
    world.observe(100.0, 30)
    world.now += seconds if math.isfinite(seconds) else 0.0
    assert world.tell(Observed(seconds=seconds, offered={"a": 50})) == []
    assert world.observe(100.0, 50) == []


@pytest.mark.parametrize("garbage", [10**12, -5, math.nan, math.inf, -math.inf])
def test_garbage_counts_are_survived(garbage: float) -> None:
    world = World()
    world.now += PERIOD
    counts: Any = {"a": garbage}
    commands = world.tell(Observed(seconds=PERIOD, offered=counts, stayed=counts, within_target=counts))
    for command in commands:
        assert isinstance(command, Solve)
        world.answer(command, None, error="no plan for that")
    world.observe(100.0, 200)
    assert world.controller.status().models["a"].offered == pytest.approx(100.0, rel=0.1)


events = st.one_of(
    st.builds(
        Observed,
        seconds=st.sampled_from([0.5, 0.5, 0.5, 5.0, 0.0]),
        offered=st.dictionaries(st.sampled_from("ab"), st.integers(0, 2000)),
        stayed=st.just({"a": 100}),
        within_target=st.sampled_from([{"a": 100}, {"a": 0}]),
        latencies=st.sampled_from([{}, {"a": BatchLatency(50, 0.5, 0.5)}, {"a": BatchLatency(50, 0.5, 1.5)}]),
        foreign_load=st.sampled_from([None, 0.0, 0.9]),
    ),
    st.builds(DevicesFound, st.lists(st.sampled_from(GPU), min_size=1, max_size=2).map(tuple)),
    st.builds(DevicesGone, st.lists(st.sampled_from(GPU), min_size=1, max_size=2).map(tuple)),
    st.builds(AcquisitionFailed, st.just("gpu"), st.integers(1, 3), st.just("no")),
    st.just(Adopted(plan=plan_of(2), rates={"a": 100.0})),
    st.sampled_from(["solved", "unsolved", "rolled", "failed"]),
)


@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.5, 3.0, 100.0])), max_size=60))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_one_thing_is_under_way_and_all_is_answered(
    told: list[tuple[ControllerEvent | str, float]],
) -> None:
    controller = Controller(GPU[:2], {"a": 0.99})
    now, solving, rolling = 0.0, None, None
    controller.handle(Adopted(plan=plan_of(2), rates={"a": 100.0}), now)
    for event, later in told:
        now += later
        match event:
            case "solved" | "unsolved":
                if solving is None:
                    continue
                plan = plan_of(1, 500.0) if event == "solved" else None
                event = Solved(number=solving.number, plan=plan, rates=solving.rates, devices={"gpu": 3})
                solving = None
            case "rolled" | "failed":
                if rolling is None:
                    continue
                outcome = RolloutOutcome.COMPLETED if event == "rolled" else RolloutOutcome.REJECTED
                event = RollEnded(number=rolling.number, outcome=outcome)
                rolling = None
        assert not isinstance(event, str)
        for command in controller.handle(event, now):
            if isinstance(command, Solve):
                assert solving is None
                assert rolling is None
                solving = command
                assert all(rate >= 0 for rate in command.rates.values())
                assert all(slowdown > 1 for slowdown in command.slowdowns.values())
            elif isinstance(command, Roll):
                assert solving is None
                assert rolling is None
                rolling = command
            elif isinstance(command, Acquire):
                assert command.count > 0
            elif isinstance(command, Release):
                used = {device.id for device in plan_of(1).devices}
                assert not used & set(command.devices), "a device that serves is never given back"
        controller.invariants()
        status = controller.status()
        assert status.activity == ("solving" if solving else "rolling out" if rolling else "watching")


def test_models_that_fall_short_by_chance_get_headroom_with_those_that_do_not() -> None:
    controller = Controller(GPU[:1], {"a": 0.99, "b": 0.99, "c": 0.99})
    rates = dict.fromkeys("abc", 50.0)
    controller.handle(Adopted(plan=plan_of(1), rates=rates), 0.0)
    solve = None
    for n in range(1, 400):
        within = {"a": 25 if n < 260 else 20, "b": 24 if n % 3 == 0 else 25, "c": 25}
        seen = Observed(
            seconds=0.5, offered=dict.fromkeys("abc", 25), stayed=dict.fromkeys("abc", 25), within_target=within
        )
        for command in controller.handle(seen, n * 0.5):
            assert isinstance(command, Solve)
            solve = solve or command
    assert solve is not None
    assert solve.reason == "SLO violated: a"
    assert solve.rates["b"] > 1.1 * solve.rates["c"]


def test_device_that_is_being_released_is_in_no_plan() -> None:
    world = World(plan_of(3), devices=3, cooldown=20.0)
    (roll,) = world.answer(world.solve(20.0, 100.0), plan_of(1), devices={"gpu": 1})
    assert world.rolled(roll) == [Release(GPU[1:3][::-1])]
    (solve,) = world.tell(DevicesFound(GPU[3:4]))
    assert isinstance(solve, Solve)
    assert solve.devices == (GPU[0], GPU[3])
    commands = world.answer(solve, plan_of(1, 200.0), devices={"gpu": 4}, short="a 100 of 300/s")
    assert commands[0] == Acquire("gpu", 2)


def test_device_that_a_provider_does_not_take_back_is_used_again() -> None:
    world = World(plan_of(3), devices=3, cooldown=20.0)
    (roll,) = world.answer(world.solve(20.0, 100.0), plan_of(1), devices={"gpu": 1})
    assert world.rolled(roll) == [Release(GPU[1:3][::-1])]
    world.observe(20.0, 15.0)
    solve = world.solve(300.0)
    assert solve.devices == GPU[:3]
    assert isinstance(world.answer(solve, plan_of(3, 300.0), devices={"gpu": 3})[0], Roll), "none has to be acquired"


def test_devices_that_take_long_to_launch_are_kept_for_longer() -> None:
    def kept(launch: float) -> float:
        world = World(plan_of(3), devices=3, cooldown=20.0, offers=[DeviceOffer(kind="gpu", launch_seconds=launch)])
        world.observe(100.0, 30.0)
        begun = world.now
        world.solve(20.0, 600.0)
        return world.now - begun

    assert kept(0.0) < 40.0
    assert 300.0 < kept(20.0) < 330.0, "fifteen launches"
