from __future__ import annotations

import msgspec
import pytest

from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem, load_planner
from cotenant.planners.capacity import with_totals
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planners.largest_rate import TIGHTENED, ScaledInterference, largest_scale
from cotenant.planners.rates import at_scale
from cotenant.planners.scale_search import meets_slos
from cotenant.predictors import ConstantMargin, Load, NoInterference
from tests.planners.problems import embedded
from tests.planners.rate_problems import accept_all, largest, one_device, two_halves, unlimited

elastic = load_planner("elastic")


def test_largest_scale_is_found_to_half_a_percent() -> None:
    for rate in (0.5, 40.0, 3000.0):
        plan = largest_scale(elastic, one_device(rate), accept=accept_all)
        assert plan.scale * rate == pytest.approx(100.0, rel=0.0051)
        assert plan.scale * rate <= 100.0 * (1 + 1e-9)
        assert plan.objective == "rate"
        assert check(plan, one_device(rate)) == []


def test_largest_scale_by_default_needs_slos_forecast_to_be_met() -> None:
    problem = largest(one_device(10.0))
    plan = largest_scale(elastic, problem)
    assert 5.0 < plan.scale < 9.9
    assert attains(plan, problem)


def test_largest_scale_where_no_scale_is_feasible_serves_nothing() -> None:
    problem = largest(one_device(10.0, slo=0.015))
    plan = largest_scale(elastic, problem)
    assert (plan.scale, plan.devices, plan.unserved) == (0.0, (), {"a": 10.0})
    assert check(plan, problem) == []


def test_largest_scale_of_unlimited_devices_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"^the largest rate of unlimited devices is unlimited: give kind 'k' a count$"):
        largest_scale(elastic, largest(unlimited(one_device(1.0))))


def test_largest_scale_of_no_requests_is_1() -> None:
    assert largest_scale(elastic, largest(one_device(0.0))).scale == 1.0


def test_largest_scale_with_headroom_is_below_that_of_evenly_spaced_requests() -> None:
    problem = embedded(1.0)
    even, random = largest_scale(elastic, problem, accept=accept_all), largest_scale(elastic, problem)
    assert attains(random, largest(problem))
    assert not attains(even, largest(problem))
    assert random.scale < even.scale


def test_planner_that_answers_the_largest_rate_is_asked_for_tighter_targets_and_its_bound_stays() -> None:
    asked = []
    slo = one_device(40.0).models[0].slo

    def planner(problem: Problem) -> Plan:
        asked.append((problem.objective, problem.models[0].slo / slo))
        plan = elastic(at_scale(problem, 2.5))
        return msgspec.structs.replace(with_totals(plan, problem), objective="rate", bound=2.6)

    plan = largest_scale(planner, largest(one_device(40.0)), accept=accept_all)
    assert (asked, plan.bound) == ([("rate", 1.0)], 2.6)
    assert plan.scale == pytest.approx(2.5, rel=0.0051)
    asked.clear()
    careful = largest_scale(planner, largest(one_device(40.0)))
    assert [objective for objective, _ in asked] == ["rate"] * 5
    assert [slo_factor for _, slo_factor in asked] == pytest.approx([1.0, 0.9, 0.8, 0.72, 0.65])
    assert 1.0 < careful.scale < 2.4
    assert attains(careful, largest(one_device(40.0)))


def test_scaled_interference_is_a_fraction_of_the_slowdown_less_1() -> None:
    victim, other = (Load(name, "k", 1, 500) for name in "ab")
    half = ScaledInterference(ConstantMargin(1.2), 0.5)
    assert half.slowdown(victim, [other]) == pytest.approx(1.1)
    assert half.slowdown(victim, []) == 1.0
    assert half.interferes
    assert not ScaledInterference(ConstantMargin(1.2), 0.0).interferes


def test_tightened_problems_under_interference_have_less_of_it() -> None:
    victim, other = (Load(name, "k", 1, 500) for name in "ab")
    asked: list[tuple[float, float]] = []

    def planner(problem: Problem) -> Plan:
        asked.append((problem.models[0].slo / 0.4, problem.interference.slowdown(victim, [other])))
        most = 4.0 if problem.interference.interferes else 4.9
        return msgspec.structs.replace(with_totals(elastic(at_scale(problem, most)), problem), objective="rate")

    largest_scale(planner, two_halves(ConstantMargin(1.2)))
    assert asked == [(1.0, 1.2), *((pytest.approx(slo), pytest.approx(1 + 0.2 * part)) for slo, part in TIGHTENED)]
    asked.clear()
    largest_scale(planner, two_halves(ConstantMargin(1.2)), accept=accept_all)
    assert asked == [(1.0, 1.2)], "all that is sound was accepted, and no more would be"
    most = largest_scale(planner, two_halves(ConstantMargin(1.2)), accept=accept_all, sound=False)
    assert len(asked) == 2 + len(TIGHTENED)
    assert 4.9 <= most.scale <= 5.0, "who accepts unsound plans gets more than is sound"
    asked.clear()
    largest_scale(planner, two_halves(NoInterference()))
    assert asked == [(1.0, 1.0), *((pytest.approx(slo), 1.0) for slo, part in TIGHTENED if part == 1)]


def test_validate_is_asked_about_accepted_plans_and_the_largest_scale_first() -> None:
    """The plan for no interference has the largest scale. Nothing above 3 times the rates is valid."""
    validated: list[float] = []

    def planner(problem: Problem) -> Plan:
        most = 4.0 if problem.interference.interferes else 4.9
        return msgspec.structs.replace(with_totals(elastic(at_scale(problem, most)), problem), objective="rate")

    def validate(plan: Plan, scaled: Problem) -> bool:
        assert meets_slos(plan, scaled)
        validated.append(scaled.rates["a"] / 10.0)
        return validated[-1] <= 3.0

    unvalidated = largest_scale(planner, two_halves(ConstantMargin(1.2)))
    plan = largest_scale(planner, two_halves(ConstantMargin(1.2)), validate=validate)
    assert unvalidated.scale > 3.0
    assert 3.0 / 1.0051 <= plan.scale <= 3.0
    assert validated[0] == max(validated)


def test_quick_planner_that_sustains_more_is_taken_and_named() -> None:
    """A planner whose plan is far below what the device can do, and elastic beside it."""

    def timid(problem: Problem) -> Plan:
        plan = elastic(at_scale(problem, 0.5))
        return msgspec.structs.replace(with_totals(plan, problem), objective="rate", planner="timid", bound=2.6)

    problem = largest(one_device(40.0))
    alone = largest_scale(timid, problem, sound=False)
    plan = largest_scale(timid, problem, quick={"elastic": elastic}, sound=False)
    assert alone.scale <= 0.5 < 1.5 < plan.scale
    assert (plan.planner, plan.bound) == ("timid", 2.6)
    assert plan.provenance is not None
    assert plan.provenance.source == "elastic"
    rejected = {candidate.source: candidate.rejected for candidate in plan.provenance.candidates}
    assert rejected["elastic"] == ""
    assert "timid; targets x 0.8" in rejected
    assert rejected["timid"] != ""


def test_quick_planner_is_tried_where_the_planner_found_nothing_but_not_where_nothing_can_be_found() -> None:
    def blind(problem: Problem) -> Plan:
        return msgspec.structs.replace(with_totals(Plan(planner="blind", objective="rate"), problem), bound=bound)

    problem = largest(one_device(40.0))
    bound = 2.6
    assert largest_scale(blind, problem, quick={"elastic": elastic}).scale > 1.5
    bound = 0.0
    assert largest_scale(blind, problem, quick={"elastic": elastic}).scale == 0
