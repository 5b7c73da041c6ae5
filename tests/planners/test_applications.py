"""Plan applications: what planners see of them, how SLOs are split, what check and forecast report."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.application import Application, Choice, Fanout, Fixed, Poisson, Stage
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import PLANNERS, Problem, portfolio
from cotenant.planners.applications import carried_rates, without_applications
from cotenant.planners.check import check
from cotenant.planners.compare import compare
from cotenant.planners.forecast import attains, forecast
from cotenant.planners.slo_budget import (
    budget_levels,
    candidate_budgets,
    loosest_budgets,
    stretched_budget,
    with_slo_budget,
)
from cotenant.planning import plan as plan_problem
from tests.planners.problems import linear

CUTS = (200, 400, 600, 1000)
# Seconds of a batch on a whole device, and of each row of it.
COSTS = {"find": (0.004, 0.006), "name": (0.002, 0.002), "read": (0.001, 0.0002)}
PROFILES = {(name, "k"): linear(name, "k", *cost, cuts=CUTS) for name, cost in COSTS.items()}
TRAFFIC = Application(
    name="traffic",
    slo=0.2,
    stages=(
        Stage(name="find", model="find"),
        Stage(name="cars", model="name", after=("find",), fanout=Poisson(1.5)),
        Stage(name="people", model="name", after=("find",), fanout=Fixed(1)),
        Stage(name="plates", model="read", after=("cars", "people"), fanout=Fixed(2)),
    ),
)
GAME = Application(name="game", slo=0.1, stages=(Stage(name="digits", model="read", fanout=Fixed(6)),))


def problem(*applications: Application, **rates: float) -> Problem:
    return Problem(
        models=tuple(Model(name=name, slo=0.5) for name in COSTS),
        rates=rates,
        fleet=(Kind(name="k", count=8, cuts=CUTS),),
        profiles=PROFILES,
        time_limit=0.5,
        applications=applications,
    )


BOTH = problem(TRAFFIC, GAME, traffic=20.0, game=30.0, name=5.0)


def test_without_applications_sums_rates_and_takes_tightest_target() -> None:
    split = {"traffic": {"find": 0.08, "cars": 0.07, "people": 0.06, "plates": 0.05}, "game": {"digits": 0.1}}
    seen = without_applications(BOTH, split)
    assert seen.applications == ()
    assert seen.rates == pytest.approx({"find": 20.0, "name": 20.0 * 2.5 + 5.0, "read": 20.0 * 2 + 30.0 * 6})
    assert {model.name: model.slo for model in seen.models} == {"find": 0.08, "name": 0.06, "read": 0.05}
    # Seven requests each must succeed as often as six, and five and a half, need for 99 %.
    wanted = {"find": 0.99 ** (1 / 5.5), "name": 0.99 ** (1 / 5.5), "read": 0.99 ** (1 / 6)}
    assert {model.name: model.attainment for model in seen.models} == pytest.approx(wanted)


def test_without_applications_of_plain_problem_returns_it_unchanged() -> None:
    alone = problem(name=5.0)
    assert without_applications(alone, {}) is alone


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_on_applications_serves_them(planner: str) -> None:
    plan = plan_problem(BOTH, planner, validate=False)
    assert check(plan, BOTH) == []
    assert not plan.unserved
    assert attains(plan, BOTH)
    expected = forecast(plan, BOTH).applications
    assert all(expected[app.name].attainment >= app.attainment for app in BOTH.applications)
    assert carried_rates(plan, BOTH) == pytest.approx(BOTH.rates)
    assert Plan.from_json(plan.to_json()).split == {
        app.name: pytest.approx(plan.split[app.name]) for app in BOTH.applications
    }


def test_largest_rate_of_applications_is_one_multiple_for_all_uses() -> None:
    asked = msgspec.structs.replace(BOTH, objective="rate", fleet=(Kind(name="k", count=2, cuts=CUTS),))
    plan = plan_problem(asked, "squishy", validate=False)
    assert plan.scale > 1
    assert carried_rates(plan, asked) == pytest.approx({name: rate * plan.scale for name, rate in BOTH.rates.items()})
    assert forecast(plan, asked).applications["game"].rate == pytest.approx(30.0 * plan.scale, rel=0.02)


def test_unserved_model_reduces_all_its_uses() -> None:
    plan = plan_problem(
        msgspec.structs.replace(BOTH, fleet=(Kind(name="k", count=8, cuts=CUTS),)), "squishy", validate=False
    )
    scarce = msgspec.structs.replace(BOTH, rates={"traffic": 40.0, "game": 30.0, "name": 10.0})
    served = carried_rates(plan, scarce)
    assert served["traffic"] == pytest.approx(20.0)
    assert served["name"] == pytest.approx(10.0 * 55 / 110)


def test_unloaded_application_in_plan_is_not_served() -> None:
    plan = plan_problem(BOTH, "elastic", validate=False)
    less = msgspec.structs.replace(plan, split={"game": plan.split["game"]})
    assert carried_rates(less, BOTH) == pytest.approx(BOTH.rates | {"traffic": 0.0})


def test_check_of_missing_or_too_long_split_reports_violation() -> None:
    plan = plan_problem(BOTH, "elastic", validate=False)
    (none,) = check(msgspec.structs.replace(plan, split={"game": plan.split["game"]}), BOTH)
    assert str(none) == "application traffic: the budgets of its stages add up to 0 µs, the target is 200 ms"
    longer = {name: seconds * 1.1 for name, seconds in plan.split["traffic"].items()}
    (long,) = check(msgspec.structs.replace(plan, split=plan.split | {"traffic": longer}), BOTH)
    assert str(long) == "application traffic: the budgets of its stages add up to 220 ms, the target is 200 ms"
    with pytest.raises(
        PlanError, match=r"^the plan does not say how the target of application 'traffic' is split over"
    ):
        forecast(msgspec.structs.replace(plan, split={}), BOTH)


def test_compare_of_applications_reports_slos_not_stages() -> None:
    plans = [plan_problem(BOTH, name, validate=False) for name in ("squishy", "elastic")]
    rows = compare(BOTH, plans, {}).rows
    assert {row.worst.model for row in rows if row.worst} <= {"traffic", "game", "name"}
    assert not any(row.violations for row in rows)


def test_budget_levels_with_more_time_cost_less() -> None:
    steps = budget_levels(BOTH, "find")
    assert len(steps) > 3
    for step, longer in pairwise(steps):
        assert step.needs < longer.needs
        assert step.costs > longer.costs
    assert steps[0].needs == pytest.approx(2 * (0.004 + 0.006))
    assert budget_levels(BOTH, "find", slower=1.5)[0].needs == pytest.approx(3 * (0.004 + 0.006))


def test_slo_budget_split_is_as_cheap_as_brute_force() -> None:
    """Compare with all pairs of budget levels of a chain of two."""
    chain = Application(
        name="chain",
        slo=0.1,
        stages=(Stage(name="find", model="find"), Stage(name="name", model="name", after=("find",), fanout=Fixed(3))),
    )
    asked = problem(chain, chain=10.0)
    pairs = [
        (a, b)
        for a in budget_levels(asked, "find")
        for b in budget_levels(asked, "name")
        if a.needs + b.needs <= chain.slo
    ]
    least = min(a.costs + 3 * b.costs for a, b in pairs)

    def cost(split: dict[str, float]) -> float:
        each = {m: min(s.costs for s in budget_levels(asked, m) if s.needs <= split[m] * (1 + 1e-9)) for m in split}
        return each["find"] + 3 * each["name"]

    assert cost(candidate_budgets(asked)[0]["chain"]) == pytest.approx(least)
    # It matters: in halves it would cost more.
    assert cost({"find": 0.05, "name": 0.05}) > least * 1.02


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (
            0.01,
            "application 'tight': stage 'find': no share of the devices runs a batch of 'find' twice within 10 ms;"
            " raise its target",
        ),
        (
            0.025,
            "application 'tight': no split of 25 ms meets its target: on whole devices its stages need 28 ms;"
            " raise its target",
        ),
    ],
)
def test_slo_budget_of_infeasible_target_raises_plan_error(slo: float, message: str) -> None:
    stages = (Stage(name="find", model="find"), Stage(name="name", model="name", after=("find",)))
    tight = problem(Application(name="tight", slo=slo, stages=stages), tight=1.0)
    models = tuple(msgspec.structs.replace(model, slo=slo) for model in tight.models)
    with pytest.raises(PlanError) as caught:
        plan_problem(msgspec.structs.replace(tight, models=models), "elastic", validate=False)
    assert str(caught.value) == message


def test_problem_with_duplicate_or_unknown_application_raises_plan_error() -> None:
    with pytest.raises(PlanError, match=r"^application 'find': the name is taken; give it another$"):
        problem(msgspec.structs.replace(GAME, name="find"))
    with pytest.raises(PlanError, match=r"^unknown model 'ghost' in this problem"):
        problem(Application(name="a", slo=1.0, stages=(Stage(name="ghost", model="ghost"),)))
    with pytest.raises(PlanError, match=r"^unknown model 'games' in this problem"):
        problem(GAME, games=1.0)


FANOUTS: tuple[Fanout, ...] = (Fixed(1), Fixed(1), Fixed(3), Poisson(0.7), Choice((0, 2), (0.5, 0.5)))


@st.composite
def graphs(draw: st.DrawFn, name: str) -> Application:
    stages: list[Stage] = []
    for n in range(draw(st.integers(1, 5))):
        before = [stage.name for stage in stages]
        after = draw(st.lists(st.sampled_from(before), unique=True, max_size=3)) if before else []
        model, fanout = draw(st.sampled_from(sorted(COSTS))), draw(st.sampled_from(FANOUTS))
        stages.append(Stage(name=f"s{n}", model=model, after=tuple(after), fanout=fanout))
    # Long enough for one row at each stage, twice over.
    return Application(name=name, slo=draw(st.floats(0.25, 2.0)), stages=tuple(stages))


@settings(max_examples=15, deadline=None)
@given(graphs("a"), graphs("b"))
def test_slo_budget_split_uses_the_whole_target_on_every_path(one: Application, two: Application) -> None:
    asked = problem(one, two, a=1.0, b=2.0)
    for split in candidate_budgets(asked):
        for application in (one, two):
            seconds = split[application.name]
            assert all(value > 0 for value in seconds.values())
            assert math.isclose(application.length(seconds), application.slo)
            ends, rest = application.finish_times(seconds), application.remainder(seconds)
            # On its longest way each stage has all the time that there is.
            assert all(math.isclose(ends[name] + rest[name], application.slo) for name in seconds)


def test_bound_of_applications_holds_for_every_split() -> None:
    stages = (Stage(name="find", model="find"), Stage(name="name", model="name", after=("find",), fanout=Fixed(3)))
    asked = problem(Application(name="chain", slo=0.1, stages=stages), chain=250.0)
    chosen = plan_problem(asked, "geometry", validate=False)
    good = portfolio.plan(without_applications(asked, chosen.split))
    assert not good.unserved
    poor = {"chain": {"find": 0.028, "name": 0.072}}
    worse = portfolio.plan(without_applications(asked, poor))
    assert worse.bound is not None
    assert worse.bound > good.devices_used, "proven, of this split"
    told = with_slo_budget(portfolio.plan, asked, worse, poor)
    assert told.bound is not None
    assert told.bound <= good.devices_used
    assert chosen.bound == told.bound
    for split in candidate_budgets(asked):
        assert all(seconds <= loosest_budgets(asked)["chain"][name] for name, seconds in split["chain"].items())


def test_slo_budget_slack_goes_to_stages_that_benefit() -> None:
    seconds = stretched_budget(TRAFFIC, {"find": 0.02, "cars": 0.02, "people": 0.01, "plates": 0.01})
    assert seconds == pytest.approx({"find": 0.08, "cars": 0.08, "people": 0.08, "plates": 0.04})
