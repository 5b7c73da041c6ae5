from __future__ import annotations

import msgspec
import pytest

import cotenant.sim.plan_validation
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planners.solve import solve
from cotenant.sim.plan_validation import validated
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from tests.planners.problems import linear


def problem(rate: float, cv: float = 0.0, attainment: float = 0.99) -> Problem:
    """One model that takes 10 ms a request whatever the batch, and varies."""
    profile = linear("a", "k", 0.0, 0.010, cuts=(1000,), batches=(1, 4))
    points = [msgspec.structs.replace(point, features={"cv_pct": cv}) for point in profile.points]
    return Problem(
        models=(Model(name="a", slo=0.1, attainment=attainment),),
        rates={"a": rate},
        fleet=(Kind(name="k", count=1),),
        profiles={("a", "k"): Profile("a", "k", points)},
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Seeds and requests of what was simulated for a verdict, the whole of a run being 30,000."""
    seen: list[tuple[int, int]] = []

    def counted(*args: object, seed: int, **options: object) -> Report:
        report = simulate(*args, seed=seed, **options)  # type: ignore[arg-type]
        seen.append((seed, sum(row.stayed for row in report.models)))
        return report

    monkeypatch.setattr(cotenant.sim.plan_validation, "simulate", counted)
    return seen


def fixed(problem: Problem, rate: float) -> Plan:
    """A plan made for another rate."""
    return solve("elastic", msgspec.structs.replace(problem, rates={"a": rate}))


def test_a_plan_far_within_its_means_is_agreed_to_at_a_glance(runs: list[tuple[int, int]]) -> None:
    validated("elastic", problem(20.0))
    assert [seed for seed, _ in runs] == [0]
    assert runs[0][1] < 15_000


def test_what_is_surely_late_is_refused_at_a_glance(
    runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast of the first plan is taken for what the simulator says it is not."""
    monkeypatch.setattr(cotenant.sim.plan_validation, "solve", lambda name, asked: fixed(asked, 99.0))
    asked = problem(99.0)
    plan = validated("elastic", asked)
    assert max(requests for _, requests in runs) < 6_000
    assert plan.rates()["a"] <= 99.0


def test_where_nothing_may_be_missed_a_run_is_looked_at_to_its_end(runs: list[tuple[int, int]]) -> None:
    validated("elastic", problem(20.0, attainment=1.0))
    assert [seed for seed, _ in runs] == [0, 1, 2]


def test_the_largest_rate_is_one_that_other_seeds_keep_too() -> None:
    asked = msgspec.structs.replace(problem(10.0, cv=20.0), objective="rate")
    plan = validated("geometry", asked)
    assert plan.scale > 5
    rates = {"a": 10.0 * plan.scale}
    reports = [
        simulate(asked, plan, Workload.poisson(rates), seconds=10_000 / rates["a"], seed=seed) for seed in (7, 8)
    ]
    missed = sum(report.models[0].missed for report in reports)
    assert missed / sum(report.models[0].stayed for report in reports) < 0.014


def test_a_plan_of_several_workers_on_a_partition_is_looked_at_as_well() -> None:
    """Two at once take no longer than one."""
    asked = problem(10.0)
    points = [
        msgspec.structs.replace(point, procs=procs) for point in asked.profiles["a", "k"].points for procs in (1, 2)
    ]
    asked = msgspec.structs.replace(asked, objective="rate", profiles={("a", "k"): Profile("a", "k", points)})
    plan = validated("geometry", asked)
    assert [placement.procs for _, _, placement in plan.placements()] == [2]
    assert 14 < plan.scale <= 20
