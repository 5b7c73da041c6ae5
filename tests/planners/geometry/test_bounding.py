"""Compare bounds with optimal plans (brute force on tiny problems) and with the relaxation that they tighten."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem, geometry
from cotenant.planners.geometry import bounding, search
from cotenant.planners.geometry.bounding import BoundCertificate, BoundSolver
from cotenant.planners.geometry.context import PlanningContext
from tests.planners.geometry.test_search import brute_force_scale, tiny
from tests.planners.problems import linear


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_scale_bound_of_tiny_problem_lies_between_brute_force_and_relaxation(parts: int, seed: int) -> None:
    problem = msgspec.structs.replace(tiny(seed, parts), objective="rate")
    count = problem.fleet[0].count
    assert count is not None
    context = PlanningContext(problem)
    optimum, bound = brute_force_scale(problem, count), context.bound()
    assert bound is not None
    if optimum == 0:
        assert bound >= 0
        return
    assert context.maximize_scale and context.relaxation is not None and context.bound_solver is not None
    assert optimum <= bound * (1 + 1e-9)
    assert bound <= context.relaxation.value * (1 + 1e-5)
    # The optimum must not be excluded; a multiple above the bound must be.
    at_optimum = context.bound_solver.prove(context.rates * optimum * (1 - 1e-9), [float(count)])
    assert at_optimum is None or at_optimum.required_fraction([count]) <= 1 + 1e-9
    more = PlanningContext(
        msgspec.structs.replace(problem, rates={n: r * bound * 1.02 for n, r in problem.rates.items()})
    )
    assert more.bound_solver is not None
    beyond = more.bound_solver.prove(more.rates, [float(count)])
    assert beyond is not None and beyond.required_fraction([count]) > 1


def halves(count: int | None, rate: float, price: float | None = None) -> Problem:
    """Three models with the same rate, on one kind that can be halved."""
    models = tuple(Model(name=name, slo=0.1) for name in "abc")
    profiles = {(name, "k"): linear(name, "k", 0.02, 0.002, cuts=(500, 1000)) for name in "abc"}
    kind = Kind(name="k", count=count, cuts=(500, 1000), price=price)
    return Problem(models=models, rates=dict.fromkeys("abc", rate), fleet=(kind,), profiles=profiles)


def test_bound_of_three_models_above_half_a_device_is_three_devices() -> None:
    """The relaxation needs fewer: only modes with limited demand and integrality cuts prove three."""
    whole = PlanningContext(halves(None, 1.0)).singles
    most_of_a_whole = max(mode.rates[0] for mode in whole)
    plan = geometry.plan(halves(None, 0.95 * most_of_a_whole))
    assert (plan.devices_used, plan.bound) == (3, 3)
    priced = geometry.plan(halves(None, 0.95 * most_of_a_whole, price=2.5))
    assert priced.cost_per_hour == 7.5
    assert priced.bound == pytest.approx(7.5)


def test_feasible_of_problem_proven_infeasible_does_not_search(monkeypatch: pytest.MonkeyPatch) -> None:
    most_of_a_whole = max(mode.rates[0] for mode in PlanningContext(halves(None, 1.0)).singles)
    problem = halves(2, 0.7 * most_of_a_whole)
    assert geometry.feasible(problem) is None
    monkeypatch.setattr(search, "_candidates", lambda *_, **__: pytest.fail("searched"))
    assert geometry.feasible(halves(2, 0.95 * most_of_a_whole)) is None


def test_cost_bound_of_two_kinds_equals_cheapest_fleet() -> None:
    """An expensive, faster kind and a cheap one: the bound is the price of whole devices, not of fractions."""
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


def test_one_certificate_excludes_every_cheaper_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models that each take half a device or more: the relaxation fits them into two devices, no plan does."""
    most_of_a_whole = max(mode.rates[0] for mode in PlanningContext(halves(None, 1.0)).singles)
    asked = halves(None, 0.5 * most_of_a_whole, price=2.5)
    monkeypatch.setattr(bounding, "MAX_TRIALS", 1)
    assert PlanningContext(asked).bound() == pytest.approx(7.5)


@pytest.mark.parametrize("unit", [1e-8, 1e-5, 1.0, 1e6])
def test_bound_and_plan_do_not_depend_on_the_currency(unit: float) -> None:
    """HiGHS's tolerances are absolute: of prices of 1e-8 they left a bound five times the cost of a plan."""
    rates = {"a": 500.0, "b": 100.0}
    profiles = {
        (name, kind): linear(name, kind, 0.01 * factor, 0.001 * factor, cuts=(500, 1000))
        for name in rates
        for kind, factor in (("x", 1.0), ("y", 1.5))
    }
    fleet = tuple(
        Kind(name=name, cuts=(500, 1000), price=price * unit, count=4) for name, price in (("x", 3.0), ("y", 1.8))
    )
    models = tuple(Model(name=name, slo=0.1) for name in rates)
    plan = geometry.plan(Problem(models=models, rates=rates, fleet=fleet, profiles=profiles, time_limit=1))
    assert plan.cost_per_hour == pytest.approx(3.6 * unit)
    assert plan.bound == pytest.approx(3.6 * unit)
    assert plan.provenance is not None
    assert plan.provenance.proven == "optimal"


def solver_of(asked: Problem) -> BoundSolver:
    solver = PlanningContext(asked).bound_solver
    assert solver is not None
    return solver


def test_prices_of_slots_are_raised_as_far_as_no_device_gets_more_valuable() -> None:
    """The halves of a device are worth 0.6 in sum, a whole one 1: each half may be worth 0.2 more."""
    solver = solver_of(halves(None, 10.0))
    assert {tuple(pattern.pieces) for pattern in solver.patterns} == {((0, 2),), ((1, 1),)}
    assert solver._raised_to_slack(np.array([0.3, 1.0]), 1) == pytest.approx([0.5, 1.0])
    assert solver._raised_to_slack(np.array([0.5, 0.7]), 1) == pytest.approx([0.5, 1.0])


def test_certificate_that_requires_most_is_kept_where_later_ones_require_less(monkeypatch: pytest.MonkeyPatch) -> None:
    most_of_a_whole = max(mode.rates[0] for mode in PlanningContext(halves(None, 1.0)).singles)
    asked = halves(2, 0.95 * most_of_a_whole)
    solver = solver_of(asked)
    new = msgspec.structs.replace(solver.pool[0], memory=1)
    made = iter([(BoundCertificate(f, np.ones(1)), modes) for f, modes in ((2.2, [new]), (2.6, [new]), (2.4, []))])
    monkeypatch.setattr(solver, "_certificate", lambda *_: next(made))
    certificate = solver.prove(np.full(3, 0.95 * most_of_a_whole), [2.0])
    assert certificate is not None
    assert certificate.required_fraction([2.0]) == pytest.approx(1.3)
    assert next(made, None) is None


def test_modes_that_the_pool_has_are_not_added_again() -> None:
    solver = solver_of(halves(None, 10.0))
    new = msgspec.structs.replace(solver.pool[0], memory=1)
    assert solver._unknown([solver.pool[0], new, solver.pool[1], new]) == [new]
    solver.extend([new])
    assert solver._unknown([new]) == []
