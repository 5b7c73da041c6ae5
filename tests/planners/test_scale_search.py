from __future__ import annotations

import pytest

from cotenant.core.plan import Plan
from cotenant.planners import Problem, load_planner
from cotenant.planners.capacity import with_totals
from cotenant.planners.check import check
from cotenant.planners.rates import at_scale
from cotenant.planners.scale_search import largest_accepted_scale
from cotenant.predictors import ConstantMargin, NoInterference
from tests.planners.rate_problems import accept_all, one_device, two_halves

elastic = load_planner("elastic")


def test_largest_accepted_scale_lowers_a_plan_until_it_is_accepted() -> None:
    problem = one_device(50.0)
    plan = with_totals(elastic(at_scale(problem, 1.9)), problem)
    for limit in (2.5, 1.7, 1.0, 0.31):
        tried: list[float] = []

        def accept(plan: Plan, scaled: Problem, limit: float = limit, tried: list[float] = tried) -> bool:
            tried.append(scaled.rates["a"] / 50.0)
            return tried[-1] <= limit

        least = min(limit, 1.9)
        assert least / 1.0051 <= largest_accepted_scale(plan, problem, accept=accept).scale <= least * (1 + 1e-9)
        assert len(tried) < 20


def test_largest_accepted_scale_where_none_is_accepted_is_the_one_above() -> None:
    problem = one_device(50.0)
    plan, accepted = (with_totals(elastic(at_scale(problem, scale)), problem) for scale in (1.9, 1.5))
    assert largest_accepted_scale(plan, problem, accept=lambda plan, scaled: False, above=accepted) == accepted
    assert largest_accepted_scale(plan, problem, accept=lambda plan, scaled: False).devices == ()


def test_largest_accepted_scale_of_an_unsound_plan_needs_another_judge() -> None:
    """Interference is predicted to double every latency: a plan that ignores it promises twice what is sound."""
    problem = two_halves(ConstantMargin(2.0))
    plan = with_totals(elastic(at_scale(two_halves(NoInterference()), 4.5)), problem)
    unchanged = largest_accepted_scale(plan, problem, accept=accept_all)
    assert unchanged.scale == pytest.approx(4.5)
    assert unchanged.devices == plan.devices
    sound = largest_accepted_scale(plan, problem)
    assert 0 < sound.scale <= 2.5 * (1 + 1e-9)
    assert check(sound, problem) == []
