"""When a controller acquires devices, releases them, and plans around those that are lost."""

from __future__ import annotations

import itertools

import pytest

from cotenant.control.adaptation import (
    Acquire,
    AcquisitionFailed,
    Adopted,
    DevicesFound,
    DevicesGone,
    Release,
    Roll,
    Solve,
    SolveStep,
)
from cotenant.control.held_devices import MOST_LOST, HeldDevices
from cotenant.control.lead_time import LeadTime
from cotenant.control.provider import DeviceOffer
from cotenant.control.revision import RolloutOutcome
from cotenant.core.identity import DeviceId
from tests.control.controller_world import GPU, World, plan_of


def test_lower_rate_releases_devices_after_the_cool_down_only() -> None:
    world = World(devices=3, cooldown=60.0)
    world.observe(100.0, 30)
    before = world.now
    solve = world.solve(30.0, 200.0)
    assert world.now - before >= 59.0
    assert solve.step is SolveStep.REPLAN
    assert 36.0 <= solve.rates["a"] < 50.0
    (roll,) = world.answer(solve, plan_of(1, 36.0), devices={"gpu": 1})
    assert world.rolled(roll) == [Release(GPU[1:3][::-1])]
    assert world.tell(DevicesGone(GPU[1:3], "released")) == []
    assert world.observe(30.0, 300) == []


def test_devices_that_are_wanted_again_soon_are_kept_for_longer_the_next_time() -> None:
    def released(world: World) -> float:
        """Seconds of a low rate until devices are released."""
        before = world.now
        (roll,) = world.answer(world.solve(30.0, 600.0), plan_of(1, 36.0), devices={"gpu": 1})
        assert world.rolled(roll) == [Release(GPU[1:3][::-1])]
        world.tell(DevicesGone(GPU[1:3], "released"))
        return world.now - before

    world = World(devices=3, cooldown=60.0)
    world.observe(100.0, 30)
    first = released(world)
    commands = world.answer(world.solve(100.0), plan_of(1, 40.0), devices={"gpu": 3}, short="a 60 of 100/s")
    assert commands[0] == Acquire("gpu", 2)
    world.rolled(commands[1])
    (again,) = world.tell(DevicesFound(GPU[1:3]))
    assert isinstance(again, Solve)
    (roll,) = world.answer(again, plan_of(3, 120.0), devices={"gpu": 3})
    world.rolled(roll)
    assert released(world) > first + 100.0


def test_more_devices_are_acquired_and_used_once_they_are_there() -> None:
    world = World()
    solve = world.solve(300.0)
    commands = world.answer(solve, plan_of(1, 200.0), devices={"gpu": 3}, short="a 100 of 300/s")
    assert commands[0] == Acquire("gpu", 2)
    assert isinstance(commands[1], Roll), "the best with what is there meanwhile"
    world.rolled(commands[1])
    assert world.controller.status().launching == {"gpu": 2}
    assert world.observe(300.0, 30) == []
    (again,) = world.tell(DevicesFound(GPU[1:3]))
    assert isinstance(again, Solve)
    assert again.devices == GPU[:3]
    assert again.launching == {}


def test_devices_on_their_way_are_not_acquired_twice() -> None:
    world = World()
    commands = world.answer(world.solve(300.0), plan_of(1, 200.0), devices={"gpu": 3}, short="a 100 of 300/s")
    world.rolled(commands[1])
    (again,) = world.tell(DevicesFound(GPU[1:2]))
    assert isinstance(again, Solve)
    assert again.launching == {"gpu": 1}
    commands = world.answer(again, plan_of(2, 300.0), devices={"gpu": 3}, short="a 50 of 300/s")
    assert [type(command) for command in commands] == [Roll]


def test_device_that_the_plan_uses_is_not_released() -> None:
    world = World(devices=3)
    commands = world.answer(world.solve(300.0), plan_of(2, 360.0), devices={"gpu": 1})
    assert world.rolled(commands[0]) == [Release(GPU[2:3])]


def test_devices_that_cannot_be_had_are_asked_for_again_later() -> None:
    world = World(retry=5.0)
    commands = world.answer(world.solve(300.0), plan_of(1), SolveStep.KEEP, devices={"gpu": 2})
    assert commands == [Acquire("gpu", 1)]
    assert world.tell(AcquisitionFailed("gpu", 1, "sold out")) == []
    assert world.controller.status().launching == {}
    assert "sold out" in world.controller.status().decisions[-1].reason


def test_devices_that_cannot_be_had_are_asked_for_ever_later_though_rates_stay_as_they_are() -> None:
    world = World(retry=2.0, longest_retry=10.0)
    solve = world.solve(130.0)
    assert world.answer(solve, plan_of(1), SolveStep.KEEP, devices={"gpu": 2}, sustained={"a": 500.0}) == [
        Acquire("gpu", 1)
    ]
    world.tell(AcquisitionFailed("gpu", 1, "sold out"))
    asked = [world.now]
    while len(asked) < 6:
        assert world.observe(130.0, 60.0) == [Acquire("gpu", 1)]
        asked.append(world.now)
        world.tell(AcquisitionFailed("gpu", 1, "sold out"))
    assert [later - earlier for earlier, later in itertools.pairwise(asked)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert world.observe(130.0, 60.0) == [Acquire("gpu", 1)]
    world.tell(DevicesFound((GPU[1],)))
    assert world.controller.status().launching == {}


def test_devices_of_which_the_provider_says_nothing_are_asked_for_again() -> None:
    world = World(offers=[DeviceOffer(kind="gpu", launch_seconds=20.0)])
    commands = world.answer(world.solve(300.0), plan_of(1, 200.0), devices={"gpu": 3}, short="a 100 of 300/s")
    assert commands[0] == Acquire("gpu", 2)
    world.rolled(commands[1])
    begun = world.now
    assert world.observe(300.0, 600.0) == [Acquire("gpu", 2)]
    assert 3 * 20.0 + 60.0 <= world.now - begun <= 3 * 20.0 + 60.0 + 4.0
    assert "the provider has not answered" in [each.reason for each in world.controller.status().decisions]
    (solve,) = world.tell(DevicesFound(GPU[1:2]))  # late, or the second try
    assert isinstance(solve, Solve) and solve.launching == {"gpu": 1}


def test_device_that_was_lost_and_is_back_is_not_the_one_that_was_launched() -> None:
    world = World(devices=2)
    (_, acquire) = sorted(
        world.answer(world.solve(300.0), plan_of(2, 300.0), devices={"gpu": 3}), key=lambda each: type(each).__name__
    )[::-1]
    assert acquire == Acquire("gpu", 1)
    world.tell(DevicesGone((GPU[1],), "it fell off the bus"))
    world.tell(DevicesFound((GPU[1],)))
    assert world.controller.status().launching == {"gpu": 1}
    world.tell(DevicesFound((GPU[2],)))
    assert world.controller.status().launching == {}


def test_lost_device_is_planned_around_at_once() -> None:
    world = World(plan_of(2), devices=2)
    (solve,) = world.tell(DevicesGone(GPU[1:2], "it fell off the bus"))
    assert isinstance(solve, Solve)
    assert solve.devices == GPU[:1]
    assert "it fell off the bus" in solve.reason


@pytest.mark.parametrize("outcome", [None, RolloutOutcome.OUTDATED, RolloutOutcome.ROLLED_BACK])
def test_lost_device_is_planned_around_though_the_first_try_comes_to_nothing(outcome: RolloutOutcome | None) -> None:
    world = World(plan_of(2), devices=2, retry=2.0)
    (solve,) = world.tell(DevicesGone(GPU[1:2], "it fell off the bus"))
    assert isinstance(solve, Solve)
    begun = world.now
    if outcome is None:
        assert world.answer(solve, None, error="the solver died") == []
    else:
        (roll,) = world.answer(solve, plan_of(1))
        assert world.rolled(roll, outcome) == []
    again = world.solve(100.0)
    assert world.now - begun == 2.0
    assert "it fell off the bus" in again.reason and again.step is SolveStep.REPLAN


def test_device_that_is_lost_while_the_first_plan_that_uses_it_is_rolled_out_is_planned_around() -> None:
    world = World(plan_of(1), devices=2)
    (roll,) = world.answer(world.solve(300.0), plan_of(2, 360.0))
    assert world.tell(DevicesGone(GPU[1:2], "it fell off the bus")) == []
    (solve,) = world.rolled(roll)  # the old workers drained, after the new ones had taken over
    assert isinstance(solve, Solve)
    assert solve.devices == GPU[:1] and "gpu-1 is gone" in solve.reason
    (roll,) = world.answer(solve, plan_of(1, 360.0))
    assert world.rolled(roll) == []


def test_device_that_is_lost_before_an_adopted_plan_that_uses_it_is_planned_around() -> None:
    world = World(plan_of(1), devices=2)
    assert world.tell(DevicesGone(GPU[1:2], "it fell off the bus")) == []
    assert world.tell(Adopted(plan=plan_of(2), rates={"a": 100.0})) == []
    solve = world.solve(100.0, 10.0)
    assert solve.devices == GPU[:1] and "gpu-1 is gone" in solve.reason


def test_device_that_no_plan_uses_may_go() -> None:
    world = World(plan_of(1), devices=2)
    assert world.tell(DevicesGone(GPU[1:2], "it fell off the bus")) == []


def test_lost_devices_of_a_cloud_that_names_each_anew_are_forgotten_in_the_end() -> None:
    held = HeldDevices((), LeadTime(), 60.0, 1.0, 60.0)
    for number in range(3 * MOST_LOST):
        device = DeviceId("cloud", number)
        held.found([device], float(number))
        assert held.gone([device]) == [device]
        held.invariants()
    assert len(held._lost) == MOST_LOST
    held.launching["cloud"] = 1
    assert held.found([device], 1e9) and held.launching["cloud"] == 1, "it is back, and was not launched"
