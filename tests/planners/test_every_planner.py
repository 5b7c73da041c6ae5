"""Properties of every planner on any problem. A new planner is covered by its entry in PLANNERS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.errors import PlanError
from cotenant.planners import PLANNERS, Problem, contract, ideal, inss, load_planner
from cotenant.planners.check import check
from cotenant.planners.forecast import forecast
from cotenant.planners.geometry import small_fleet
from cotenant.planning import plan as plan_problem
from tests.planners.problems import embedded, problems

every = pytest.mark.parametrize("name", sorted(PLANNERS))
# Those that search take as long for one problem as the others for a hundred.
SEARCHES = ["geometry", "ideal", "inss", "inss-plus"]
# To draw a problem takes longer than a plan of it does: each is for all of these.
QUICK = sorted(PLANNERS.keys() - SEARCHES)
searching = pytest.mark.parametrize("name", SEARCHES)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Add to what goes wrong the name of the planner."""
    try:
        yield
    except Exception as error:
        error.add_note(f"planner: {name}")
        raise


@pytest.fixture(scope="module", autouse=True)
def _short_exhaustive_search() -> Iterator[None]:
    """Its steps take up to a minute where devices have many cuts, whatever the time limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ideal, "MAX_STEPS", 200)
        yield


def hurried(problem: Problem) -> Problem:
    return msgspec.structs.replace(problem, time_limit=0.2)


def sound(name: str, problem: Problem) -> None:
    plan = load_planner(name)(problem)
    assert contract.contract_violations(plan, problem) == []
    expected = forecast(plan, problem)
    assert all(0 <= model.attainment <= 1 for model in expected.models.values())
    assert all(0 <= busy <= 1 for busy in expected.utilisation.values())


@settings(max_examples=50, deadline=None)
@given(problem=problems())
def test_every_quick_planner_returns_valid_plan_and_true_unserved(problem: Problem) -> None:
    for name in QUICK:
        with named(name):
            sound(name, problem)


@searching
@settings(max_examples=8, deadline=None)
@given(problem=problems())
def test_every_search_planner_returns_valid_plan_and_true_unserved(name: str, problem: Problem) -> None:
    sound(name, hurried(problem))


@given(problem=problems())
@settings(max_examples=3, deadline=None)
def test_every_planner_called_twice_returns_equal_plans(problem: Problem) -> None:
    called_twice(problem)


def called_twice(problem: Problem) -> None:
    """The limit counts work: a problem without a clock ends at the same point however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_fleet, "STEPS_PER_SECOND", 200)
        patch.setattr(inss, "STEPS_PER_SECOND", 400)
        problem = hurried(problem)
        assert problem.clock is None
        for name in sorted(PLANNERS):
            with named(name):
                assert load_planner(name)(problem) == load_planner(name)(problem)


def solved(name: str, problem: Problem, *, rate: bool) -> None:
    if rate:
        fleet = tuple(msgspec.structs.replace(kind, count=kind.count or 1) for kind in problem.fleet)
        problem = msgspec.structs.replace(problem, fleet=fleet, objective="rate")
    plan = plan_problem(problem, name, validate=False)
    assert [str(violation) for violation in check(plan, problem)] == []
    assert plan.objective == problem.objective


@settings(max_examples=6, deadline=None)
@given(problem=problems(), rate=st.booleans())
def test_every_quick_planner_with_either_objective_returns_valid_plan(problem: Problem, rate: bool) -> None:
    for name in QUICK:
        with named(name):
            solved(name, problem, rate=rate)


@searching
@settings(max_examples=4, deadline=None, derandomize=True)
@given(problem=problems(), rate=st.booleans())
def test_every_search_planner_with_either_objective_returns_valid_plan(name: str, problem: Problem, rate: bool) -> None:
    solved(name, hurried(problem), rate=rate)


ONE_BY_ONE = ["colocate", "gslice", "hetsev", "igniter", "min", "roundrobin", "score"]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_planners_that_place_instances_one_by_one_refuse_more_than_they_can(name: str) -> None:
    """A billion requests/s; few devices bound how many instances there can be."""
    problem = embedded()
    model, rates = problem.models[0], {problem.models[0].name: 1e9}
    (kind,) = problem.fleet
    limited = msgspec.structs.replace(problem, models=(model,), rates=rates)
    made = load_planner(name)(msgspec.structs.replace(limited, fleet=(msgspec.structs.replace(kind, count=2),)))
    assert 0 < made.unserved[model.name] < 1e9
    endless = msgspec.structs.replace(limited, fleet=(msgspec.structs.replace(kind, count=None),))
    with pytest.raises(
        PlanError, match=r"^model 'resnet50': its rate takes \d+ instances, .* at most 10000 of a model"
    ):
        load_planner(name)(endless)


@every
def test_every_planner_without_rates_returns_empty_plan(name: str) -> None:
    plan = load_planner(name)(embedded(0.0))
    assert (plan.devices, plan.unserved, plan.scale) == ((), {}, 1.0)


@pytest.mark.parametrize("name", sorted(PLANNERS.keys() - {"inss"}))
def test_every_planner_with_more_devices_serves_no_less(name: str) -> None:
    """But for InSS' policies, which are trained for each cluster anew."""
    problem = hurried(embedded(20.0))
    served = []
    for count in (0, 1, 3, 8):
        fleet = (msgspec.structs.replace(problem.fleet[0], count=count),)
        served.append(load_planner(name)(msgspec.structs.replace(problem, fleet=fleet)).scale)
    assert served == sorted(served)


@searching
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_every_search_planner_on_many_problems_returns_valid_plans(name: str, problem: Problem) -> None:
    sound(name, hurried(problem))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_every_quick_planner_on_many_problems_returns_valid_plans(problem: Problem) -> None:
    for name in QUICK:
        with named(name):
            sound(name, problem)


@every
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(problem=problems(), rate=st.booleans())
def test_every_planner_on_many_problems_with_either_objective_returns_valid_plans(
    name: str, problem: Problem, rate: bool
) -> None:
    solved(name, hurried(problem), rate=rate)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(problem=problems())
def test_every_planner_called_twice_on_many_problems_returns_equal_plans(problem: Problem) -> None:
    called_twice(problem)
