"""Where devices do not suffice, models of higher priority are served first."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.application import Application, Stage
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.applications import carried_rates
from cotenant.planners.check import check
from cotenant.planning import plan as plan_problem
from tests.planners.problems import linear

CUTS = (200, 400, 500, 600, 800, 1000)


def problem(rates: dict[str, float], priorities: dict[str, int]) -> Problem:
    """Models alike on one device, which serves some 900 requests/s of them."""
    return Problem(
        models=tuple(Model(name=name, slo=0.1, priority=priorities[name]) for name in rates),
        rates=rates,
        fleet=(Kind(name="k", count=1, cuts=CUTS),),
        profiles={(name, "k"): linear(name, "k", 0.004, 0.001, cuts=CUTS, batches=(1, 4, 16)) for name in rates},
        time_limit=0.5,
    )


def served(asked: Problem) -> tuple[Plan, dict[str, float]]:
    plan = plan_problem(asked, "elastic-plus", validate=False)
    assert check(plan, asked) == []
    return plan, carried_rates(plan, asked)


@pytest.mark.parametrize("first", ["a", "b"])
def test_model_of_higher_priority_is_served_whole_and_the_other_with_what_is_left(first: str) -> None:
    rates = {"a": 500.0, "b": 500.0}
    plan, rate = served(problem(rates, {name: 1 if name == first else 2 for name in rates}))
    (last,) = rates.keys() - {first}
    assert rate[first] == pytest.approx(500.0)
    assert 0.0 < rate[last] < 500.0
    assert plan.unserved.keys() == {last}


def test_model_that_is_too_much_by_itself_leaves_nothing() -> None:
    _, rate = served(problem({"a": 5000.0, "b": 100.0}, {"a": 1, "b": 2}))
    _, alone = served(problem({"a": 5000.0, "b": 0.0}, {"a": 1, "b": 2}))
    assert rate["a"] == pytest.approx(alone["a"])


def test_priorities_change_nothing_where_all_fits() -> None:
    rates = {"a": 100.0, "b": 50.0}
    plan, _ = served(problem(rates, {"a": 2, "b": 1}))
    other, _ = served(problem(rates, {"a": 1, "b": 1}))
    assert not plan.unserved
    assert plan.devices == other.devices


@pytest.mark.parametrize(("priority", "is_served"), [(1, True), (3, False)])
def test_application_is_served_before_requests_of_lower_priority_for_its_models(priority: int, is_served: bool) -> None:
    asked = problem({"a": 5000.0, "b": 0.0}, {"a": 2, "b": 2})
    stages = (Stage(name="a", model="a"), Stage(name="b", model="b"))
    both = Application(name="both", slo=0.3, stages=stages, priority=priority)
    asked = msgspec.structs.replace(asked, applications=(both,), rates=asked.rates | {"both": 100.0})
    plan = plan_problem(asked, "elastic", validate=False)
    assert check(plan, asked) == []
    assert (plan.rate("b") >= 100.0 * (1 - 1e-6)) is is_served


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(10.0, 900.0), min_size=2),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_nothing_takes_from_what_has_a_higher_priority(rates: dict[str, float], levels: list[int]) -> None:
    asked = problem(rates, dict(zip("abcd", levels, strict=True)))
    _, rate = served(asked)
    for level in set(levels):
        higher = {name: each for name, each in rates.items() if asked.model(name).priority <= level}
        alone = msgspec.structs.replace(asked, rates=dict.fromkeys(rates, 0.0) | higher)
        without_lower = served(alone)[1]
        for name in higher:
            assert rate[name] >= without_lower[name] * (1 - 1e-6)
