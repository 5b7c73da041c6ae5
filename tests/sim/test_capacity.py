import math

import msgspec
import pytest

from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.sim.capacity import (
    Attainment,
    LoadLevel,
    SimulationTask,
    SizingResult,
    SizingTask,
    attainment_at,
    cheapest_result,
    find_capacity,
    peak_rates,
    run_simulation,
    size_fleet,
)
from cotenant.workload import Workload
from cotenant.workload.sources import ClosedLoop, Curve, Gamma, MarkovModulated
from tests.sim.test_run import PLAN, PROBLEM


def made_up(breaks: float, half: float = 0.0) -> list[float]:
    """Multiples that are looked at where attainment falls from 100 % at 0 to 99 % at `breaks`; and what is found."""
    asked: list[float] = []

    def at(multiple: float) -> LoadLevel:
        asked.append(multiple)
        mean = 1 - 0.01 * multiple / breaks
        return LoadLevel(multiple=multiple, models={"a": Attainment(mean, half, 0.99), "b": Attainment(1.0, 0.0, 0.9)})

    found = find_capacity(at)
    assert len(asked) == len(set(asked)) == len(found.levels)
    assert [it.multiple for it in found.levels] == sorted(asked)
    assert found.limit == "a"
    return [found.low, found.multiple, found.high]


@pytest.mark.parametrize("breaks", [0.05, 0.7, 1.0, 1.2, 9.0])
def test_bisection_finds_where_a_promise_breaks(breaks: float) -> None:
    low, multiple, high = made_up(breaks)
    assert multiple <= breaks * (1 + 1e-9) < multiple * 1.0101
    assert low == multiple == high


def test_what_is_not_sure_is_the_interval() -> None:
    low, multiple, high = made_up(1.5, half=0.002)
    assert low <= 1.5 * 0.8 < low * 1.0101
    assert multiple <= 1.5 < multiple * 1.0101
    assert high <= 1.5 * 1.2 < high * 1.0101


def test_what_never_breaks_and_what_always_does() -> None:
    def always(mean: float) -> float:
        found = find_capacity(lambda multiple: LoadLevel(multiple=multiple, models={"a": Attainment(mean, 0.0, 0.99)}))
        assert found.low == found.multiple == found.high
        return found.multiple

    assert always(1.0) == math.inf
    assert always(0.5) == 0.0


def test_a_level_is_the_mean_over_seeds_with_students_interval() -> None:
    workload = Workload.poisson({"a": 40.0})
    looks = [SimulationTask(problem=PROBLEM, plan=PLAN, workload=workload, seconds=3, seed=seed) for seed in range(3)]
    reports = [run_simulation(look) for look in looks]
    parts = [1.0, 0.98, 0.96]
    changed = []
    for part, report in zip(parts, reports, strict=True):
        a, b = report.models
        a = msgspec.structs.replace(a, attainment=part, outcomes={"served": 100, "cancelled": 7})
        changed.append(msgspec.structs.replace(report, models=(a, b)))
    found = attainment_at(2.0, changed)
    assert list(found.models) == ["a"]  # nobody asked for b
    assert found.models["a"].mean == pytest.approx(0.98)
    assert found.models["a"].half == pytest.approx(4.303 * 0.02 / math.sqrt(3), rel=1e-3)
    assert not found.kept and not found.surely_broken
    assert attainment_at(1.0, changed[:1]).models["a"].half == 0.0


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


def offer(asked: Problem, growth: float, *kinds: str) -> SizingResult:
    asks = Workload.poisson(asked.rates)
    return size_fleet(
        SizingTask(
            problem=asked, workload=asks, planner="elastic", growth=growth, kinds=kinds, seconds=5.0, seeds=(0, 1)
        )
    )


def test_devices_are_bought_as_many_as_the_simulator_asks_for() -> None:
    asked = problem(kind("fast", 3.0, 1.0), kind("cheap", 1.0, 2.0), kind("slow", 0.1, 100.0))
    fast, cheap, slow = (offer(asked, 2.0, name) for name in ("fast", "cheap", "slow"))
    assert fast.serves and cheap.serves
    assert {device.kind for device in fast.plan.devices} == {"fast"}
    assert fast.plan.rate("a") >= 1000
    assert 2 <= fast.plan.devices_used < cheap.plan.devices_used
    assert slow.plan.unserved and not slow.serves
    best = cheapest_result([fast, cheap, slow])
    assert best is min((fast, cheap), key=lambda it: it.plan.cost_per_hour or 0.0)
    assert cheapest_result([slow]) is None


def test_the_highest_rates_are_planned_for() -> None:
    workload = Workload(
        {
            "steady": Gamma(20.0, 2.0),
            "wave": Curve(((0.0, 10.0), (50.0, 90.0), (100.0, 10.0))),
            "bursts": MarkovModulated((1.0, 30.0), (10.0, 1.0)),
            "patient": ClosedLoop(3),
        }
    )
    assert peak_rates(workload, 200.0, 0) == {"steady": 20.0, "wave": 90.0, "bursts": 30.0}
    assert peak_rates(workload, 25.0, 0)["wave"] == pytest.approx(50.0)
    steps = Workload({"steps": Curve.steps([10.0, 900.0], 60.0)})
    assert peak_rates(steps, 60.0, 0)["steps"] == pytest.approx(10.0)  # the next step is not reached
    assert peak_rates(steps, 61.0, 0)["steps"] == 900.0


def test_without_prices_devices_are_counted() -> None:
    asked = problem(kind("fast", None, 1.0), kind("cheap", None, 2.0))
    fast, cheap = offer(asked, 1.0, "fast"), offer(asked, 1.0, "cheap")
    assert cheapest_result([cheap, fast]) is fast
