"""What a controller does about requests that come in bursts."""

from __future__ import annotations

import msgspec

from cotenant.control.adaptation import (
    Acquire,
    Adopted,
    Cause,
    ControllerCommand,
    DevicesFound,
    Solve,
    SolveStep,
)
from cotenant.control.controller import Controller
from tests.control.controller_world import GPU, World, plan_of


def bursts(world: World, times: int) -> list[ControllerCommand]:
    """Observe bursts of 100 requests/s for 5 s, and nothing for 25 s after each, or until something is commanded."""
    for _ in range(times):
        commands = world.observe(100.0, 5.0) or world.observe(0.0, 25.0)
        if commands:
            return commands
    return []


def test_capacity_for_bursts_is_kept_through_the_gaps_between_them() -> None:
    world = World(devices=2, cooldown=60.0)
    assert bursts(world, 20) == [], "what each burst needs is there, and no device is given back in a gap"
    solve = world.solve(0.0, 900.0)
    assert solve.cause is Cause.SAVING, "until they are forgotten"


def test_bursts_that_need_more_than_the_plan_sustains_are_planned_for_in_a_gap() -> None:
    world = World(plan_of(1, 20.0))
    world.controller = Controller(GPU[:1], {"a": 0.99})
    world.tell(Adopted(plan=plan_of(1, 20.0), rates={"a": 20.0}))
    asked = []
    while world.now < 600.0:
        for command in bursts(world, 1):
            if isinstance(command, Solve):
                asked.append(command)
                world.answer(command, plan_of(1, 20.0), step=SolveStep.KEEP, sustained={"a": 1.01 * command.rates["a"]})
    assert asked[-1].rates["a"] > 90.0
    assert len(asked) < 12


def test_device_that_comes_after_its_burst_is_kept_for_the_next_one() -> None:
    """It takes 20 s to come, and a burst 5: whoever gives it back at once never has it when it is needed."""
    world = World(plan_of(2, 40.0), devices=2)
    bursts(world, 20)
    solve = world.solve(400.0, 10.0)
    assert solve.bursts
    (acquire, roll) = world.answer(solve, plan_of(2, 160.0), devices={"gpu": 3})
    assert acquire == Acquire("gpu", 1)
    assert world.rolled(roll) == []
    world.observe(0.0, 15.0)
    (again,) = world.tell(DevicesFound(GPU[2:3]))
    assert isinstance(again, Solve)
    assert again.rates["a"] > 350.0


def test_plan_that_left_some_of_a_burst_unserved_is_made_anew_once_the_burst_is_over() -> None:
    """It gave a model that bursts what others need a moment later, which is in no proportion to their bursts."""
    world = World(plan_of(2, 40.0), devices=2)
    bursts(world, 20)
    solve = world.solve(400.0, 10.0)
    short = msgspec.structs.replace(plan_of(2, 300.0), unserved={"a": 100.0})
    (roll,) = world.answer(solve, short, sustained={"a": 300.0}, short="a 100 of 400/s", devices={})
    assert world.rolled(roll) == []
    assert world.observe(400.0, 3.0) == []
    since = world.now
    again = world.solve(0.0, 30.0)
    assert 10.0 <= world.now - since < 15.0
    assert again.cause is Cause.SAVING
    assert world.answer(again, plan_of(2, 300.0), sustained={"a": 300.0}) == []
    assert world.observe(0.0, 60.0) == [], "nothing is short any more"
