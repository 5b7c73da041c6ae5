"""Hold a search to its count of work: the same plan whatever the clock says, and a word on what ended it."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest

from benchmarks.planner_problems import Recipe, problem
from cotenant.planners import Problem, geometry
from cotenant.planners.check import check
from cotenant.planners.geometry.budget import COUNTED, Deadline, WorkBudget
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.covering import Fleet
from cotenant.planners.geometry.diving import Diver

EMPTY = Problem(models=(), rates={}, fleet=(), profiles={}, time_limit=2.0)
LARGE = Recipe(seed=21, models=12, devices=60, kinds=2, load=0.6)
SMALL = Recipe(seed=22, models=4, devices=6, kinds=2, load=0.5)


def ended_by(asked: Problem) -> tuple[bytes, str | None]:
    plan = geometry.plan(asked)
    assert check(plan, asked) == []
    assert plan.provenance is not None
    return plan.to_json(), plan.provenance.ended_by


@pytest.mark.parametrize("recipe", [LARGE, SMALL], ids=["integer programs", "ruin and recreate"])
def test_plan_is_the_same_for_every_clock_that_does_not_run_out(recipe: Recipe) -> None:
    """A clock that runs ten times as fast is a machine that is ten times as busy."""
    asked = msgspec.structs.replace(problem(recipe), time_limit=0.2)
    plans = []
    for seconds_per_check in (None, 1e-7, 1e-6):
        ticks = itertools.count()
        clock = None if seconds_per_check is None else lambda s=seconds_per_check, t=ticks: s * next(t)
        plans.append(ended_by(msgspec.structs.replace(asked, clock=clock)))
        assert clock is None or 10 < next(ticks) < 0.2 / 1e-6
    assert len(set(plans)) == 1
    assert plans[0][1] != "clock"


def test_search_ended_by_a_clock_says_so() -> None:
    ticks = itertools.count()
    asked = msgspec.structs.replace(problem(LARGE), time_limit=2.0, clock=lambda: 0.1 * next(ticks))
    assert ended_by(asked)[1] == "clock"


def test_search_ended_by_a_proof_says_so() -> None:
    """At a tenth of the rates that fill a device, one device of the cheapest kind is the least there is."""
    asked = problem(msgspec.structs.replace(SMALL, load=0.01, kinds=1))
    assert ended_by(asked)[1] == "proof"
    assert geometry.plan(asked).devices_used == 1


def test_deadline_without_a_clock_never_passes() -> None:
    deadline = Deadline(EMPTY)
    assert math.isinf(deadline.seconds_left())
    assert not deadline.passed and not deadline.is_timed


def test_deadline_that_has_passed_stays_so() -> None:
    now = [5.0]
    deadline = Deadline(msgspec.structs.replace(EMPTY, clock=lambda: now[0]))
    now[0] = 6.5
    assert deadline.seconds_left() == pytest.approx(0.5)
    assert not deadline.passed
    now[0] = 7.0
    assert deadline.seconds_left() == 0.0
    now[0] = 5.0
    assert deadline.passed and deadline.seconds_left() == 0.0


def test_budget_part_has_no_more_than_the_whole() -> None:
    whole = WorkBudget(EMPTY)
    first, second = whole.part(0.75), whole.part(0.75)
    assert first.left() == second.left() == pytest.approx(0.75 * 2 * COUNTED)
    first.spend(1.0 * COUNTED)
    assert second.left() == whole.left() == pytest.approx(1.0 * COUNTED)
    assert first.part(0.5).left() == pytest.approx(0.25 * COUNTED)


def test_cover_without_any_work_left_serves_all_with_no_model_twice() -> None:
    """A model with a part of its demand in each of two modes needs one of them."""
    asked = msgspec.structs.replace(problem(Recipe(seed=23, models=30, devices=30, load=0.6)), bounded=False)
    context = PlanningContext(asked)
    penalties = 100.0 * max(context.prices) / context.rates
    fleet = Fleet(context.slots, context.patterns, context.counts, context.prices, context.memory_limits, penalties)
    budget = WorkBudget(asked)
    budget.spend(budget.left())
    cover = Diver(fleet, context.catalog, context.singles, context.usable_slots, budget).cover(context.rates).cover
    served = np.zeros(len(context.rates))
    for mode, many in cover.modes:
        served[list(mode.models)] += many * np.array(mode.rates)
    assert (served >= context.rates * (1 - 1e-6)).all()
    for mode, _ in cover.modes:
        own = np.zeros(len(served))
        own[list(mode.models)] = mode.rates
        assert (served - own < context.rates * (1 - 1e-6)).any()


def test_cover_whose_first_program_the_clock_ends_serves_all() -> None:
    """No program is solved: each model takes its cheapest partitions, and what they cost more is the price of that."""
    asked = msgspec.structs.replace(problem(Recipe(seed=23, models=60, devices=90, load=0.3)), bounded=False)
    context = PlanningContext(asked)
    penalties = 100.0 * max(context.prices) / context.rates
    fleet = Fleet(context.slots, context.patterns, context.counts, context.prices, context.memory_limits, penalties)
    ticks = itertools.count()
    budget = WorkBudget(msgspec.structs.replace(asked, clock=lambda: 10.0 * next(ticks)))
    assert budget.left() == 0
    dive = Diver(fleet, context.catalog, context.singles, context.usable_slots, budget).cover(context.rates)
    assert dive.relaxed is None
    served = np.zeros(len(context.rates))
    for mode, many in dive.cover.modes:
        served[list(mode.models)] += many * np.array(mode.rates)
    assert (served >= context.rates * (1 - 1e-6)).all()


def test_feasible_plan_says_what_ended_its_search() -> None:
    asked = problem(Recipe(seed=23, models=4, devices=8, load=0.3))
    ticks = itertools.count()
    ends = []
    for clock in (None, lambda: 10.0 * next(ticks)):
        plan = geometry.feasible(msgspec.structs.replace(asked, clock=clock))
        assert plan is not None and plan.provenance is not None
        ends.append(plan.provenance.ended_by)
    assert ends == ["work", "clock"]
