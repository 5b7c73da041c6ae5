"""Compare plans of mixed, priced fleets with a small integer program that puts one model on each partition."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

from benchmarks.planner_problems import Recipe, one_model_each, problem
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.planners import Problem, geometry
from cotenant.planners.check import check
from cotenant.planners.geometry import large_fleet
from cotenant.planners.geometry.budget import COUNTED, WorkBudget
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.covering import ColumnPool, CoverProgram, CoverSolution, Fleet, memory_parts
from cotenant.predictors import ConstantMargin
from tests.planners.problems import EVERY_5, MIB, linear

# On MIG devices the simple program counts legal layouts; elsewhere only that shares add up, which may not pack.
RECIPES = [
    (Recipe(seed=11, models=4, devices=60, kinds=2, geometry="all", load=0.5), 1.0),
    (Recipe(seed=12, models=8, devices=30, kinds=2, geometry="all", load=0.5), 1.0),
    (Recipe(seed=14, models=10, devices=60, kinds=2, geometry="none", load=0.6), 1.005),
]


# The first is the quickest; the others take ten seconds and more.
@pytest.mark.parametrize(
    ("recipe", "allowed", "seconds"),
    [
        pytest.param(recipe, allowed, seconds, id=str(recipe.seed), marks=[pytest.mark.slow] if number else [])
        for number, ((recipe, allowed), seconds) in enumerate(zip(RECIPES, (2.0, 10.0, 10.0), strict=True))
    ],
)
def test_plan_of_mixed_fleet_costs_no_more_than_one_model_a_partition(
    recipe: Recipe, allowed: float, seconds: float
) -> None:
    asked = msgspec.structs.replace(problem(recipe), time_limit=seconds)
    plan = geometry.plan(asked)
    assert check(plan, asked) == []
    assert plan.unserved == {}
    assert plan.cost_per_hour is not None and plan.bound is not None
    assert plan.bound <= plan.cost_per_hour * (1 + 1e-9)
    simple = one_model_each(asked, 10.0)
    assert simple.cost is not None
    assert plan.cost_per_hour <= simple.cost * allowed * (1 + 3e-4)


def test_plan_of_many_models_serves_all_within_few_percent_of_the_bound() -> None:
    asked = msgspec.structs.replace(problem(Recipe(seed=15, models=40, devices=200, load=0.6)), time_limit=1.5)
    plan = geometry.plan(asked)
    assert check(plan, asked) == []
    assert plan.unserved == {}
    assert plan.cost_per_hour is not None and plan.bound is not None
    assert plan.cost_per_hour <= 1.06 * plan.bound


def test_plan_under_a_memory_limit_serves_all() -> None:
    """Twelve models whose workers fill devices of 12 GiB before time does."""
    recipe = Recipe(seed=16, models=12, devices=24, kinds=2, geometry="none", memory=12, load=0.3)
    asked = msgspec.structs.replace(problem(recipe), time_limit=1.5)
    plan = geometry.plan(asked)
    assert check(plan, asked) == []
    assert plan.unserved == {}


def test_plan_of_large_fleet_is_the_same_in_every_run() -> None:
    asked = msgspec.structs.replace(problem(RECIPES[2][0]), time_limit=0.5)
    assert geometry.plan(asked) == geometry.plan(asked)


def test_integer_program_ends_after_so_many_interrupt_checks() -> None:
    asked = problem(RECIPES[2][0])
    context = PlanningContext(asked)
    singles = context.planning_modes(context.catalog)
    fleet = Fleet(
        context.slots, context.patterns, context.counts, context.prices, context.memory_limits, 1e3 / context.rates
    )
    pool = ColumnPool(context.slots, context.memory_limits, singles)

    def solved(checks: float) -> CoverSolution | None:
        columns = np.arange(len(pool.modes))
        program = CoverProgram(fleet, pool, columns, context.rates, integer=True, serve_all=True)
        return program.solve(checks=checks)

    enough = solved(1000)
    assert enough is not None and not enough.unserved.any()
    assert solved(0) is None


def test_plan_stops_by_the_clock_where_the_machine_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of this clock takes a tenth of the limit: after ten of them hardly any more work is done."""
    ticks, late = itertools.count(), list[float]()
    spend = WorkBudget.spend

    def spend_late(budget: WorkBudget, seconds: float) -> None:
        if budget.deadline.passed:
            late.append(seconds)
        spend(budget, seconds)

    monkeypatch.setattr(WorkBudget, "spend", spend_late)
    asked = msgspec.structs.replace(problem(RECIPES[2][0]), time_limit=10.0, clock=lambda: float(next(ticks)))
    plan = geometry.plan(asked)
    assert check(plan, asked) == []
    assert late and sum(late) < 0.05 * COUNTED * asked.time_limit


def test_infeasible_rates_are_proven_and_feasible_ones_are_not() -> None:
    asked = msgspec.structs.replace(problem(RECIPES[0][0]), time_limit=0.5)
    plan = geometry.plan(asked)
    assert plan.provenance is not None and plan.provenance.proven != "infeasible"
    more = msgspec.structs.replace(asked, rates={name: 10 * rate for name, rate in asked.rates.items()})
    short = geometry.plan(more)
    assert short.unserved and short.provenance is not None
    assert short.provenance.proven == "infeasible"


def test_kind_for_which_there_is_no_profile_is_left_alone() -> None:
    cuts = tuple(range(50, 1001, 50))
    points = [Point(share=share, batch=1, latency=10.0 / share, memory=0) for share in cuts]
    asked = Problem(
        models=(Model(name="m", slo=0.5, max_batch=1),),
        rates={"m": 631.0},
        fleet=(Kind(name="k", count=None, cuts=cuts), Kind(name="l", count=None, cuts=cuts)),
        profiles={("m", "l"): Profile("m", "l", points)},
    )
    plan = geometry.plan(asked)
    assert check(plan, asked) == [] and not plan.unserved
    assert {device.kind for device in plan.devices} == {"l"}


def test_plan_that_reaches_its_bound_is_proven_optimal() -> None:
    kind = Kind(name="k", count=None, price=2.0)
    profile = Profile("m", "k", [Point(share=1000, batch=1, latency=0.01, memory=0)])
    asked = Problem(
        models=(Model(name="m", slo=1.0),), rates={"m": 250.0}, fleet=(kind,), profiles={("m", "k"): profile}
    )
    plan = geometry.plan(asked)
    assert plan.provenance is not None
    assert (plan.cost_per_hour, plan.bound, plan.provenance.proven) == (6.0, 6.0, "optimal")


def test_plan_with_many_procs_and_batches_keeps_the_options_few() -> None:
    """Eight numbers of workers and batches to 512 on ten shares: 4,096 choices, of which few are not dominated."""
    cuts = tuple(range(100, 1001, 100))
    profiles = {}
    for name, work in (("a", 0.001), ("b", 0.0004)):
        points = [
            Point(share=s, batch=b, latency=(0.004 + work * b) * 1000 / s * (1 + 0.6 * (n - 1)), memory=b, procs=n)
            for s in cuts
            for b in (1, 8, 64, 512)
            for n in range(1, 9)
        ]
        profiles[name, "k"] = Profile(name, "k", points)
    asked = Problem(
        models=(Model(name="a", slo=1.0), Model(name="b", slo=0.7)),
        rates={"a": 900.0, "b": 2500.0},
        fleet=(Kind(name="k", count=8, cuts=cuts),),
        profiles=profiles,
    )
    context = PlanningContext(asked)
    assert context.catalog.options.latency.shape[2] <= 128
    exact = {
        (mode.slot, mode.models[0]): mode.rates[0] for mode in context.catalog.single_model_modes(low_memory=False)
    }
    for s, share in enumerate(cuts):
        for i, (name, slo) in enumerate((("a", 1.0), ("b", 0.7))):
            curves = [(n, profiles[name, "k"].curve(share, n)) for n in range(1, 9)]
            rates = [n * b / took for n, curve in curves for b, took in enumerate(curve, 1) if 2 * took <= slo]
            assert exact.get((s, i), 0.0) == pytest.approx(max(rates, default=0.0))
    plan = geometry.plan(asked)
    assert check(plan, asked) == [] and plan.unserved == {}


def test_memory_parts_count_two_large_workers_as_more_than_a_device() -> None:
    large = memory_parts(0, [100, None], 60)
    assert [sum(part for row, part in large.items() if row == n * 2) for n in range(4)] == [
        0.6,
        1.0,
        0.5,
        pytest.approx(2 / 3),
    ]
    assert memory_parts(1, [100, None], 60) == {}


def test_budget_part_counts_for_the_whole() -> None:
    whole = WorkBudget(Problem(models=(), rates={}, fleet=(), profiles={}, time_limit=2.0 / COUNTED))
    part = whole.part(0.5)
    part.spend(0.75)
    assert (part.left(), whole.left()) == pytest.approx((0.25, 1.25))
    part.spend(5.0)
    assert (part.left(), whole.left()) == (0.0, 0.0)
    assert math.isinf(part.deadline.seconds_left())


@pytest.mark.parametrize("rates", [{"a": 1e6, "b": 0.0}, {"a": 2e6, "b": 5.0}])
def test_rates_that_take_thousands_of_devices_are_served(rates: dict[str, float]) -> None:
    """Leaving a model unserved never costs less than the devices that serve it."""
    cuts = (500, 1000)
    asked = Problem(
        models=(Model(name="a", slo=0.1), Model(name="b", slo=0.1)),
        rates=rates,
        fleet=(Kind(name="k", count=None, cuts=cuts),),
        profiles={(name, "k"): linear(name, "k", 0.002, 0.001, cuts, (1, 32), MIB) for name in "ab"},
        interference=ConstantMargin(1.3),
        arrivals="even",
    )
    plan = geometry.plan(asked)
    assert plan.unserved == {} and check(plan, asked) == []
    assert plan.bound is not None and plan.bound > 1000
    assert plan.devices_used <= plan.bound * 1.01


def test_model_left_unserved_costs_far_more_than_the_devices_that_serve_it() -> None:
    """2,000 devices for one model: at a thousand times the price of one, dives would leave it unserved."""
    profile = Profile("m", "k", [Point(share=1000, batch=1, latency=0.01, memory=0)])
    asked = Problem(
        models=(Model(name="m", slo=1.0),),
        rates={"m": 200_000.0},
        fleet=(Kind(name="k", count=None, price=2.0),),
        profiles={("m", "k"): profile},
    )
    context = PlanningContext(asked)
    assert context.relaxation is not None
    assert context.relaxation.value == pytest.approx(4000.0)
    assert large_fleet._unserved_cost(context) > 10 * 4000.0


@pytest.mark.slow
def test_largest_rates_of_many_models_on_few_devices_are_near_the_bound() -> None:
    """Ruin and recreate alone reaches three quarters, in five times the work."""
    rng = np.random.default_rng(0)
    models, profiles = [], {}
    for name in (f"m{n}" for n in range(14)):
        fixed, each = 0.002 + 0.01 * rng.random(), 0.0005 + 0.003 * rng.random()
        profiles[name, "k"] = linear(name, "k", fixed * rng.uniform(1, 1.5), each, batches=(1, 2, 4, 8, 16))
        models.append(Model(name=name, slo=(fixed + 16 * each) * rng.uniform(3, 20)))
    problem = Problem(
        models=tuple(models),
        rates={model.name: float(rng.uniform(1.5, 6)) for model in models},
        fleet=(Kind(name="k", cuts=EVERY_5, count=4),),
        profiles=profiles,
        objective="rate",
        time_limit=2,
    )
    plan = geometry.plan(problem)
    assert not check(plan, problem)
    assert plan.bound is not None
    assert plan.scale > 0.85 * plan.bound


def test_rates_that_need_more_devices_than_a_plan_lists_are_refused_with_the_highest() -> None:
    problem = Problem(
        models=(Model(name="a", slo=0.1), Model(name="b", slo=0.1)),
        rates={"a": 1e9, "b": 1.0},
        fleet=(Kind(name="k", cuts=EVERY_5, count=None),),
        profiles={(name, "k"): linear(name, "k", 0.002, 0.001) for name in ("a", "b")},
        time_limit=0.1,
    )
    with pytest.raises(PlanError, match=r"1e\+09 requests/s, of a: lower it, or give each kind a count"):
        geometry.plan(problem)
    limited = geometry.plan(msgspec.structs.replace(problem, fleet=(Kind(name="k", cuts=EVERY_5, count=2),)))
    assert limited.unserved["a"] > 9e8
