from __future__ import annotations

import msgspec
import pytest
from hypothesis import Phase, given, settings

from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import PLANNERS, Problem, geometry, load_planner, portfolio
from cotenant.planners.check import check
from cotenant.planners.compare import SCALE_TOLERANCE
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.portfolio import choose_planner
from tests.planners.problems import embedded, problems

# Plans take a while: a failing problem is shown as it was found.
UNSHRUNK = (Phase.explicit, Phase.generate)


def cost(plan: Plan, problem: Problem) -> float:
    """Return the objective that is bounded: devices, or their cost where they have prices."""
    prices = {kind.name: kind.price for kind in problem.fleet}
    return sum(prices[device.kind] or 0.0 for device in plan.devices) if any(prices.values()) else plan.devices_used


def least_served_fraction(plan: Plan, problem: Problem) -> float:
    """Return the least fraction of a rate that is served, over models that can be served at all."""
    servable = PlanningContext(problem).names
    return min((plan.rate(name) / problem.rates[name] for name in servable), default=1.0)


# A heuristic guarantees none of this, so the problems are the same each time.
@settings(max_examples=6, deadline=None, derandomize=True, phases=UNSHRUNK)
@given(problem=problems())
def test_portfolio_is_never_behind_a_planner_and_none_beats_its_bound(problem: Problem) -> None:
    problem = msgspec.structs.replace(problem, time_limit=0.5)
    fleet = problem.fleet
    if any(kind.price is None for kind in fleet):
        fleet = tuple(msgspec.structs.replace(kind, price=None) for kind in fleet)
        problem = msgspec.structs.replace(problem, fleet=fleet)
    best = portfolio.plan(problem)
    bound = geometry.bound(problem)
    has_unservable = len(PlanningContext(problem).names) < sum(rate > 0 for rate in problem.rates.values())
    for name in PLANNERS:
        # The search runs against the clock: a second run of it may be ahead of the first.
        plan = best if name == "geometry" else load_planner(name)(problem)
        fraction = least_served_fraction(plan, problem)
        if fraction > 1 - 1e-6:
            assert bound is None or cost(plan, problem) >= bound * (1 - 1e-6)
            assert least_served_fraction(best, problem) > 1 - 1e-6
            assert cost(best, problem) <= cost(plan, problem) * (1 + 1e-9)
            assert has_unservable or portfolio.feasible(problem) is not None
        else:
            assert least_served_fraction(best, problem) >= fraction * (1 - 1e-3)


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True, phases=UNSHRUNK)
@given(problem=problems())
def test_portfolio_serves_the_largest_multiple_of_all_planners_within_its_bound(problem: Problem) -> None:
    fleet = tuple(msgspec.structs.replace(kind, count=kind.count or 1) for kind in problem.fleet)
    problem = msgspec.structs.replace(problem, fleet=fleet, time_limit=1.5)
    rate = msgspec.structs.replace(problem, objective="rate")
    best = portfolio.plan(rate)
    assert check(best, rate) == []
    for name in PLANNERS:
        plan = load_planner(name)(problem)
        # Under interference the multiple is found by bisection, as close as time allows.
        if not problem.interference.interferes:
            assert best.scale >= plan.scale * (1 - SCALE_TOLERANCE)
        if best.bound is not None:
            assert max(plan.scale, best.scale) <= best.bound * (1 + 1e-6)


def test_choose_planner_gives_geometry_a_portfolio_unless_told_otherwise() -> None:
    assert choose_planner("geometry").plan is portfolio.plan
    assert list(choose_planner("geometry").quick) == list(portfolio.QUICK)
    alone = choose_planner("geometry", portfolio=False)
    assert (alone.plan, alone.quick) == (geometry.plan, {})


@pytest.mark.parametrize("name", sorted(PLANNERS.keys() - {"geometry"}))
def test_choose_planner_of_a_paper_tries_it_alone(name: str) -> None:
    choice = choose_planner(name)
    assert (choice.plan, choice.quick) == (load_planner(name), {})


def test_choose_planner_of_an_unknown_name_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"^unknown planner 'best'; available: "):
        choose_planner("best")


def test_portfolio_plan_says_which_candidates_were_compared_and_why_they_were_rejected() -> None:
    problem = embedded(1.0)
    plan = portfolio.plan(problem)
    assert plan.planner == "geometry"
    assert plan.provenance is not None
    candidates = {candidate.source: candidate for candidate in plan.provenance.candidates}
    taken = candidates[plan.provenance.source]
    assert (taken.value, taken.rejected) == (plan.devices_used, "")
    assert [source for source, candidate in candidates.items() if not candidate.rejected] == [plan.provenance.source]


def test_geometry_alone_has_candidates_of_its_own_search_only() -> None:
    plan = geometry.plan(embedded(1.0))
    assert plan.provenance is not None
    assert all(candidate.source.startswith("geometry, ") for candidate in plan.provenance.candidates)
