"""Bounds against plans that exist: brute force on tiny problems, and the relaxation that they tighten."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem, geometry
from cotenant.planners.geometry import search
from cotenant.planners.geometry.context import PlanningContext
from tests.planners.geometry.test_search import most, tiny
from tests.planners.problems import linear


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_largest_multiple_lies_between_brute_force_and_the_relaxation(parts: int, seed: int) -> None:
    problem = msgspec.structs.replace(tiny(seed, parts), objective="rate")
    count = problem.fleet[0].count
    assert count is not None
    context = PlanningContext(problem)
    real, bound = most(problem, count), context.bound()
    assert bound is not None
    if real == 0:
        assert bound >= 0
        return
    assert context.maximize_scale and context.relaxation is not None and context.bound_solver is not None
    assert real <= bound * (1 + 1e-9)
    assert bound <= context.relaxation.value * (1 + 1e-5)
    # What is proven to be too much for the devices: not what they carry, but what the bound excludes.
    carried = context.bound_solver.prove(context.rates * real * (1 - 1e-9), [float(count)])
    assert carried is None or carried.required_fraction([count]) <= 1 + 1e-9
    more = PlanningContext(
        msgspec.structs.replace(problem, rates={n: r * bound * 1.02 for n, r in problem.rates.items()})
    )
    assert more.bound_solver is not None
    beyond = more.bound_solver.prove(more.rates, [float(count)])
    assert beyond is not None and beyond.required_fraction([count]) > 1


def halves(count: int | None, rate: float, price: float | None = None) -> Problem:
    """One model that takes a little more than half of what a device carries, for each of three."""
    models = tuple(Model(name=name, slo=0.1) for name in "abc")
    profiles = {(name, "k"): linear(name, "k", 0.02, 0.002, cuts=(500, 1000)) for name in "abc"}
    kind = Kind(name="k", count=count, cuts=(500, 1000), price=price)
    return Problem(models=models, rates=dict.fromkeys("abc", rate), fleet=(kind,), profiles=profiles)


def test_three_models_that_each_need_more_than_a_half_need_three_devices() -> None:
    """The relaxation mixes; that each partition holds the target, and is one, takes cuts."""
    whole = PlanningContext(halves(None, 1.0)).singles
    most_of_a_whole = max(mode.rates[0] for mode in whole)
    plan = geometry.plan(halves(None, 0.95 * most_of_a_whole))
    assert (plan.devices_used, plan.bound) == (3, 3)
    priced = geometry.plan(halves(None, 0.95 * most_of_a_whole, price=2.5))
    assert priced.cost_per_hour == 7.5
    assert priced.bound == pytest.approx(7.5)


def test_what_is_proven_impossible_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    most_of_a_whole = max(mode.rates[0] for mode in PlanningContext(halves(None, 1.0)).singles)
    problem = halves(2, 0.7 * most_of_a_whole)
    assert geometry.feasible(problem) is None
    monkeypatch.setattr(search, "_candidates", lambda *_, **__: pytest.fail("searched"))
    assert geometry.feasible(halves(2, 0.95 * most_of_a_whole)) is None


def test_the_cheapest_fleet_of_two_kinds_is_proven() -> None:
    """A dear kind that is faster and a cheap one: the bound is the price of whole devices, not of parts of them."""
    models = (Model(name="a", slo=0.1),)
    profiles = {
        ("a", "dear"): linear("a", "dear", 0.01, 0.001, cuts=(1000,)),
        ("a", "cheap"): linear("a", "cheap", 0.02, 0.002, cuts=(1000,)),
    }
    fleet = (Kind(name="dear", cuts=(1000,), price=3.0), Kind(name="cheap", cuts=(1000,), price=1.8))
    fast = 16 / (0.01 + 0.016)
    problem = Problem(models=models, rates={"a": 1.2 * fast}, fleet=fleet, profiles=profiles)
    plan = geometry.plan(problem)
    assert not plan.unserved
    assert plan.cost_per_hour == pytest.approx(4.8)
    assert plan.bound == pytest.approx(4.8)
    assert np.isclose(PlanningContext(problem).bound() or 0.0, 4.8)
