from __future__ import annotations

import math

import msgspec
import pytest

from cotenant.planners import geometry
from cotenant.planners.rates import at_scale
from cotenant.planning.planner_study import (
    SATURATION,
    StudyRow,
    StudyTask,
    best_bounds,
    distance_to_bound,
    measure,
    summarise,
    summarise_planners,
)
from cotenant.planning.study_problems import study_problem
from tests.experiments.data import needs_data


def row(planner: str, value: float, seed: int = 0, **fields: object) -> StudyRow:
    made = StudyRow(
        planner=planner, problem="p", seed=seed, seconds=1.0, objective="devices", value=value, integral=True
    )
    return msgspec.structs.replace(made, **fields)


def task(planner: str, name: str = "synthetic/steady") -> StudyTask:
    return StudyTask(planner, name, 0, study_problem(name, 0), 0.5)


def test_best_bound_of_devices_is_the_largest_rounded_up_and_of_rates_the_least() -> None:
    rows = [row("a", 5.0, bound=3.2), row("b", 5.0, bound=3.9), row("c", 5.0)]
    assert best_bounds(rows) == {("p", 0): 4.0}
    costs = [row("a", 5.0, bound=3.2, integral=False)]
    assert best_bounds(costs) == {("p", 0): 3.2}
    rates = [row("a", 1.0, bound=b, objective="rate", integral=False) for b in (1.5, 1.2)]
    assert best_bounds(rates) == {("p", 0): 1.2}
    assert best_bounds([row("a", 5.0, bound=3.2, error="no")]) == {}


def test_distance_is_relative_to_the_bound_and_none_where_rates_are_unserved() -> None:
    assert distance_to_bound(row("a", 5.0), 4.0) == 0.25
    assert distance_to_bound(row("a", 4.0), 4.0) == 0.0
    assert distance_to_bound(row("a", 0.8, objective="rate"), 1.0) == pytest.approx(0.25)
    assert distance_to_bound(row("a", 5.0, unserved=0.1), 4.0) is None
    assert distance_to_bound(row("a", 5.0), None) is None
    assert distance_to_bound(row("a", 5.0, error="no"), 4.0) is None


def test_summaries_have_means_and_intervals_over_seeds() -> None:
    """Distances of 0 and 50 %: 25 ± 12.706 · 0.3536 / √2."""
    rows = [
        row("good", 2.0, 0, bound=2.0, cpu_s=1.0),
        row("good", 3.0, 1, bound=2.0, cpu_s=3.0),
        row("bad", 1.0, 0, unserved=0.5),
        row("bad", 0.0, 1, error="cannot"),
    ]
    good, bad = summarise_planners(rows)
    assert (good.planner, good.planned, good.of) == ("good", 2, 2)
    assert good.distance is not None
    assert good.distance.mean == pytest.approx(0.25)
    assert good.distance.half == pytest.approx(12.706 * 0.5 / math.sqrt(2) / math.sqrt(2))
    assert good.cpu_s is not None and good.cpu_s.mean == 2.0
    assert (bad.planned, bad.of, bad.distance, bad.errors) == (1, 2, None, ("cannot",))
    assert [(each.planner, each.problem) for each in summarise(rows)] == [("good", "p"), ("bad", "p")]


@pytest.mark.slow
def test_measurement_of_a_planner_has_its_bound_its_misses_and_its_churn() -> None:
    ours, alone = measure(task("geometry")), measure(task("max"))
    assert ours.error == alone.error == ""
    assert ours.bound is not None
    assert math.ceil(ours.bound - 1e-6) <= ours.value < alone.value
    assert ours.faults == alone.faults == ()
    for each in (ours, alone):
        assert each.unserved == 0.0
        assert each.missed is not None and each.missed < 0.1
        assert each.cpu_s > 0
    # One model on each device stays where it is, unless its rate takes a device more or less.
    assert alone.churn is not None and alone.churn < 0.3


@needs_data
def test_bound_of_a_measurement_counts_the_least_interference() -> None:
    """Four V100s would do if co-located batches took no longer."""
    problem = study_problem("v100/tight", 0)
    made = measure(StudyTask("geometry", "v100/tight", 0, problem, 0.5))
    assert geometry.bound(at_scale(problem, 1 / SATURATION)) == 4
    assert made.bound == made.value == 5


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("seed", [0, 1])
def test_geometry_plans_unlimited_devices_that_slow_each_other_much(seed: int) -> None:
    """At seed 1 what was planned comes short again and again; available: no largest part of the rates to plan for."""
    problem = msgspec.structs.replace(study_problem("a100/steady", seed), time_limit=1.0)
    made = measure(StudyTask("geometry", "a100/steady", seed, problem, 0.5))
    assert (made.error, made.unserved, made.faults) == ("", 0.0, ())
    assert made.bound is not None and made.bound <= made.value < 1.5 * made.bound


def test_measurement_is_the_same_again_but_for_time() -> None:
    again = [msgspec.structs.replace(measure(task("gslice")), cpu_s=0.0) for _ in range(2)]
    assert again[0] == again[1]


def test_measurement_of_a_rate_is_the_largest_multiple() -> None:
    made = measure(task("bestfit", "synthetic/rate"))
    assert made.objective == "rate"
    assert 0.05 < made.value < 1.0  # two devices for the load of four
    assert made.churn is None


def test_planner_without_a_plan_is_a_row_with_the_reason() -> None:
    problem = study_problem("synthetic/steady", 0)
    bare = {
        key: type(profile)(*key, [msgspec.structs.replace(point, features={}) for point in profile.points])
        for key, profile in problem.profiles.items()
    }
    asked = msgspec.structs.replace(problem, profiles=bare)
    made = measure(StudyTask("colocate-sm", "bare", 0, asked, 0.5))
    assert "needs the column 'sm_util_pct'" in made.error
