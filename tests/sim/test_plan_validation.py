from __future__ import annotations

import msgspec
import pytest

import cotenant.sim.plan_validation
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.measure.report import Report
from cotenant.planners import Problem, load_planner
from cotenant.sim.plan_validation import MAX_REQUESTS, simulate_slos
from cotenant.sim.run import simulate
from tests.planners.problems import linear


def problem(rate: float, attainment: float = 0.99) -> Problem:
    """One model that takes 10 ms a request whatever the batch."""
    return Problem(
        models=(Model(name="a", slo=0.1, attainment=attainment),),
        rates={"a": rate},
        fleet=(Kind(name="k", count=1),),
        profiles={("a", "k"): linear("a", "k", 0.0, 0.010, cuts=(1000,), batches=(1, 4))},
    )


def plan_for(rate: float) -> Plan:
    return load_planner("elastic")(problem(rate))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Seed and requests of each simulation; a whole one has `MAX_REQUESTS`."""
    seen: list[tuple[int, int]] = []

    def counted(*args: object, seed: int, **options: object) -> Report:
        report = simulate(*args, seed=seed, **options)  # type: ignore[arg-type]
        seen.append((seed, sum(row.stayed for row in report.models)))
        return report

    monkeypatch.setattr(cotenant.sim.plan_validation, "simulate", counted)
    return seen


def test_simulate_slos_far_below_capacity_passes_early(runs: list[tuple[int, int]]) -> None:
    result = simulate_slos(plan_for(20.0), problem(20.0))
    assert result.passed
    assert result.shortfall == {}
    assert [seed for seed, _ in runs] == [0] == list(result.seeds)
    assert runs[0][1] < MAX_REQUESTS / 2
    assert result.requests == runs[0][1]
    assert result.worst is not None
    assert (result.worst.name, result.worst.objective) == ("a", 0.99)
    assert result.worst.attainment > 0.99


def test_simulate_slos_at_capacity_fails_early(runs: list[tuple[int, int]]) -> None:
    result = simulate_slos(plan_for(99.0), problem(99.0))
    assert not result.passed
    assert max(requests for _, requests in runs) < MAX_REQUESTS / 5
    assert result.worst is not None
    assert result.shortfall == {"a": pytest.approx(0.99 - result.worst.attainment)}


def test_simulate_slos_where_none_may_be_missed_runs_to_the_end(runs: list[tuple[int, int]]) -> None:
    simulate_slos(plan_for(20.0), problem(20.0, attainment=1.0))
    assert [seed for seed, _ in runs] == [0, 1, 2]


def test_simulate_slos_of_an_empty_plan_has_nothing_to_miss(runs: list[tuple[int, int]]) -> None:
    result = simulate_slos(plan_for(0.0), problem(0.0))
    assert (result.passed, result.worst, result.requests, runs) == (True, None, 0, [])


def test_simulate_slos_of_two_models_ends_at_the_first_that_misses_unless_all_verdicts_are_asked_for(
    runs: list[tuple[int, int]],
) -> None:
    """The second has few requests: its verdict takes longer."""
    one = problem(95.0)
    both = msgspec.structs.replace(
        one,
        models=(*one.models, Model(name="b", slo=0.5)),
        rates={"a": 95.0, "b": 1.0},
        fleet=(Kind(name="k", count=2),),
        profiles={**one.profiles, ("b", "k"): Profile("b", "k", one.profiles["a", "k"].points)},
    )
    plan = load_planner("bestfit")(both)
    assert plan.devices_used == 2
    first = simulate_slos(plan, both, all_verdicts=False)
    every = simulate_slos(plan, both)
    assert not first.passed and not every.passed
    assert first.requests < every.requests
