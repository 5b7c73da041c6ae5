from __future__ import annotations

import msgspec

from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.planning.fleet_sizing import SizingResult, SizingTask, cheapest_result, size_fleet
from cotenant.workload import Workload
from tests.sim.test_run import PROBLEM


def kind(name: str, price: float | None, slower: float) -> tuple[Kind, Profile]:
    points = [
        Point(share=share, batch=rows, latency=slower * (0.004 + 0.002 * rows) * 1000 / share, memory=0)
        for share in (500, 1000)
        for rows in (1, 8)
    ]
    return Kind(name=name, count=0, price=price, cuts=(500, 1000)), Profile("a", name, points)


def problem(*kinds: tuple[Kind, Profile]) -> Problem:
    model = msgspec.structs.replace(PROBLEM.models[0], slo=0.1)
    return Problem(
        models=(model,),
        rates={"a": 500.0},
        fleet=tuple(kind for kind, _ in kinds),
        profiles={("a", profile.kind): profile for _, profile in kinds},
    )


def sized(asked: Problem, growth: float, *kinds: str) -> SizingResult:
    workload = Workload.poisson(asked.rates)
    return size_fleet(
        SizingTask(
            problem=asked, workload=workload, planner="elastic", growth=growth, kinds=kinds, seconds=5.0, seeds=(0, 1)
        )
    )


def test_size_fleet_buys_as_many_devices_as_the_simulator_asks_for() -> None:
    asked = problem(kind("fast", 3.0, 1.0), kind("cheap", 1.0, 2.0), kind("slow", 0.1, 100.0))
    fast, cheap, slow = (sized(asked, 2.0, name) for name in ("fast", "cheap", "slow"))
    assert fast.serves and cheap.serves
    assert {device.kind for device in fast.plan.devices} == {"fast"}
    assert fast.plan.rate("a") >= 1000
    assert 2 <= fast.plan.devices_used < cheap.plan.devices_used
    assert slow.plan.unserved and not slow.serves
    best = cheapest_result([fast, cheap, slow])
    assert best is min((fast, cheap), key=lambda it: it.plan.cost_per_hour or 0.0)
    assert cheapest_result([slow]) is None


def test_cheapest_result_without_prices_has_fewest_devices() -> None:
    asked = problem(kind("fast", None, 1.0), kind("cheap", None, 2.0))
    fast, cheap = sized(asked, 1.0, "fast"), sized(asked, 1.0, "cheap")
    assert cheapest_result([cheap, fast]) is fast
