from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import cotenant.planning.pipeline
from cotenant.config import read_problem
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.errors import PlanError
from cotenant.planners import BASELINES, PLANNERS, Problem, load_planner
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planning import plan as plan_problem
from cotenant.planning.pipeline import MAX_RETRIES, RETRY_SLO_FACTOR
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from tests.planners.problems import embedded, linear
from tests.planners.rate_problems import largest, one_device, unlimited

# Of the work of a search there is enough to see what becomes of what it finds.
HURRIED = 0.2  # seconds
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def varying(rate: float, cv: float = 0.0, attainment: float = 0.99) -> Problem:
    """One model that takes 10 ms a request whatever the batch, and varies. cv: coefficient of variation, in %."""
    profile = linear("a", "k", 0.0, 0.010, cuts=(1000,), batches=(1, 4))
    points = [msgspec.structs.replace(point, features={"cv_pct": cv}) for point in profile.points]
    return Problem(
        time_limit=1.0,
        models=(Model(name="a", slo=0.1, attainment=attainment),),
        rates={"a": rate},
        fleet=(Kind(name="k", count=1),),
        profiles={("a", "k"): Profile("a", "k", points)},
    )


def test_plan_validated_meets_its_slos_with_other_seeds_too() -> None:
    asked = largest(varying(10.0, cv=20.0))
    plan = plan_problem(asked)
    assert plan.scale > 5
    rates = {"a": 10.0 * plan.scale}
    reports = [
        simulate(plan, asked, Workload.poisson(rates), seconds=10_000 / rates["a"], seed=seed) for seed in (7, 8)
    ]
    missed = sum(report.models[0].missed for report in reports)
    assert missed / sum(report.models[0].stayed for report in reports) < 0.014


def test_plan_of_several_workers_on_a_partition_is_validated() -> None:
    """Two at once take no longer than one."""
    asked = varying(10.0)
    points = [
        msgspec.structs.replace(point, procs=procs) for point in asked.profiles["a", "k"].points for procs in (1, 2)
    ]
    plan = plan_problem(largest(msgspec.structs.replace(asked, profiles={("a", "k"): Profile("a", "k", points)})))
    assert [placement.procs for _, _, placement in plan.placements()] == [2]
    assert 14 < plan.scale <= 20
    assert plan.provenance is not None
    assert plan.provenance.validation is not None
    assert plan.provenance.validation.passed


def test_plan_whose_forecast_is_too_hopeful_is_made_anew_for_tighter_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast that takes the planner's own plan for good enough; tighter targets take no more devices."""

    def careless(planner: object, problem: Problem, candidate: Plan) -> Plan:
        asked.append(problem.models[0].slo)
        return candidate

    asked: list[float] = []
    monkeypatch.setattr(cotenant.planning.pipeline, "with_headroom", careless)
    plan = plan_problem(varying(99.0), "elastic")
    assert asked == pytest.approx([0.1 * RETRY_SLO_FACTOR**n for n in range(MAX_RETRIES + 1)])
    assert plan.provenance is not None
    assert plan.provenance.validation is not None
    validation = plan.provenance.validation
    assert not validation.passed
    assert validation.plans == MAX_RETRIES + 1
    assert validation.worst is not None and validation.worst.attainment < 0.99


def test_plan_that_fails_validation_has_tighter_targets_or_rates_recorded() -> None:
    """Batches that vary: the forecast knows nothing of them."""
    asked = unlimited(varying(60.0, cv=60.0))
    plan = plan_problem(asked, "elastic")
    unvalidated = plan_problem(asked, "elastic", validate=False)
    assert plan.provenance is not None and unvalidated.provenance is not None
    assert plan.provenance.slo_factors or plan.devices == unvalidated.devices
    assert plan.provenance.validation is not None
    assert unvalidated.provenance.validation is None


@pytest.mark.parametrize("problem", [embedded(0.6), largest(embedded(0.6)), largest(embedded(1.0))])
def test_plan_has_one_chosen_candidate_of_each_source(problem: Problem) -> None:
    problem = msgspec.structs.replace(problem, time_limit=HURRIED)
    provenance = plan_problem(problem, validate=False).provenance
    assert provenance is not None
    sources = [candidate.source for candidate in provenance.candidates]
    assert len(sources) == len(set(sources))
    assert [one.source for one in provenance.candidates if not one.rejected] == [provenance.source]


@pytest.mark.parametrize("objective", ["devices", "rate"])
def test_plan_says_how_it_came_about(objective: str) -> None:
    problem = embedded(0.9) if objective == "devices" else largest(embedded(1.0))
    plan = plan_problem(msgspec.structs.replace(problem, time_limit=HURRIED))
    provenance = plan.provenance
    assert provenance is not None
    taken = [candidate.source for candidate in provenance.candidates if not candidate.rejected]
    assert taken == [provenance.source]
    assert provenance.validation is not None
    assert provenance.validation.passed
    assert provenance.validation.requests > 0
    assert provenance.validation.worst is not None
    assert provenance.validation.worst.attainment >= 0.98
    assert provenance.stage_s.keys() == {"slo_budget", "candidates", "headroom", "validation"}
    assert 0 < sum(provenance.stage_s.values()) <= plan.solve_s
    assert Plan.from_json(plan.to_json()).provenance == provenance


def test_plan_of_a_planner_without_a_record_is_its_only_candidate() -> None:
    provenance = plan_problem(embedded(0.9), "squishy", validate=False).provenance
    assert provenance is not None
    assert [candidate.source for candidate in provenance.candidates] == ["squishy"] == [provenance.source]
    assert provenance.validation is None


def test_plan_without_portfolio_has_the_planners_own_candidates() -> None:
    for problem in (embedded(1.0), largest(embedded(1.0))):
        problem = msgspec.structs.replace(problem, time_limit=HURRIED)
        provenance = plan_problem(problem, portfolio=False, validate=False).provenance
        assert provenance is not None
        assert all(candidate.source.startswith("geometry") for candidate in provenance.candidates)


def test_plan_by_an_unknown_planner_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"^unknown planner 'best'"):
        plan_problem(embedded(1.0), "best")


def test_plan_for_cpu_shares_meets_its_slos_in_the_simulator() -> None:
    problem = embedded(0.9)
    report = simulate(plan_problem(problem, "elastic", validate=False), problem, seconds=600)
    for model in report.models:
        assert model.attainment is not None
        assert model.attainment > 0.97, model


@pytest.mark.parametrize("name", sorted(PLANNERS.keys() - BASELINES - {"ideal"}))
def test_plan_for_the_largest_rate_uses_all_devices(name: str) -> None:
    """Eight measured models on four machines: less to do is no reason to leave machines alone. Not the baselines: some
    cannot place eight models there at all, and InSS would train for each of the rates that are tried."""
    problem = read_problem(EXAMPLES / "problem.toml")
    fleet = (msgspec.structs.replace(problem.fleet[0], count=4),)
    problem = largest(msgspec.structs.replace(problem, fleet=fleet, time_limit=0.4))
    plan = plan_problem(problem, name, validate=False)
    assert (plan.devices_used, check(plan, problem)) == (4, [])
    assert plan.scale > 0.8
    assert attains(plan, problem)


def test_plan_is_a_planner_for_whoever_asks_again_and_again() -> None:
    """Such as a controller, which asks for the rates that it observes."""
    problem = unlimited(one_device(297.0))
    again = msgspec.structs.replace(problem, rates={"a": 150.0}, current=plan_problem(problem, validate=False))
    plan = plan_problem(again, validate=False)
    assert plan.devices_used < load_planner("elastic")(problem).devices_used
