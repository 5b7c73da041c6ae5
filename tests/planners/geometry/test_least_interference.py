"""Bounds at the least interference that any plan has: no plan beats them, and they prove more than those without."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem, geometry, ideal
from cotenant.planners.geometry.least_interference import relaxed_problem
from cotenant.predictors import ConstantMargin, Interference, NoInterference
from cotenant.predictors.linear import Coefficients, Linear, Utilisation
from tests.planners.geometry.test_search import tiny
from tests.planners.problems import profile

UTILISATION = {
    name: Utilisation(name, {(1, 250): (0.1 * n, 0.2), (3, 1000): (0.6, 0.1 * n)}) for n, name in enumerate("abc", 1)
}
# The second has loads that add less than nothing, as fits to measurements have had.
PREDICTORS: dict[str, Interference] = {
    "margin": ConstantMargin(1.3),
    "linear": Linear(Coefficients(0.1, 0.7, 0.3, 0.1, 0.9), UTILISATION),
    "less than nothing": Linear(Coefficients(0.9, -0.5, -0.4, 0.2, 1.2), UTILISATION),
}


@pytest.mark.parametrize(
    "interference",
    [pytest.param(each, id=name, marks=[pytest.mark.slow] * (name == "linear")) for name, each in PREDICTORS.items()],
)
@pytest.mark.parametrize("problems", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_no_plan_beats_the_bound_at_the_least_interference(interference: Interference, problems: int) -> None:
    tighter = 0
    for seed in range(problems):
        problem = msgspec.structs.replace(tiny(seed, 4), interference=interference, objective="rate", time_limit=0.2)
        bound, without = geometry.bound_with_interference(problem), geometry.bound(problem)
        assert bound is not None and without is not None
        assert bound <= without
        tighter += bound < 0.99 * without
        assert geometry.plan(problem).scale <= bound * (1 + 1e-6)
        devices = msgspec.structs.replace(problem, objective="devices")
        least = geometry.bound_with_interference(devices)
        for planner in (geometry.plan, ideal.plan):
            made = planner(devices)
            assert made.unserved or least is None or made.devices_used >= least
    assert tighter


def halves(interference: Interference) -> Problem:
    """Two models that gain nothing by more than half of a device."""
    latency = {(share, batch): 0.02 + 0.001 * batch for share in (500, 1000) for batch in (1, 16)}
    profiles = {(name, "k"): profile(name, "k", latency) for name in "ab"}
    return Problem(
        models=tuple(Model(name=name, slo=0.1) for name in "ab"),
        rates={"a": 1.0, "b": 1.0},
        fleet=(Kind(name="k", count=1, cuts=(500, 1000)),),
        profiles=profiles,
        interference=interference,
        objective="rate",
    )


def test_bound_with_a_constant_margin_is_reached_where_every_partition_is_slowed_by_it() -> None:
    problem = halves(ConstantMargin(1.5))
    made = geometry.plan(problem)
    assert geometry.bound_with_interference(problem) == pytest.approx(made.scale, rel=5e-3)
    assert made.bound is not None and made.bound > 1.2 * made.scale


def test_relaxed_problem_slows_all_but_the_largest_share_and_knows_no_interference() -> None:
    problem = halves(ConstantMargin(1.5))
    relaxed = relaxed_problem(problem)
    assert not relaxed.interference.interferes
    before, after = problem.profiles["a", "k"], relaxed.profiles["a", "k"]
    assert after.curve(500) == pytest.approx([1.5 * seconds for seconds in before.curve(500)])
    assert after.curve(1000) == pytest.approx(before.curve(1000))
    assert [after.memory(batch) for batch in (1, before.max_batch)] == [before.memory(b) for b in (1, before.max_batch)]


class Unbounded:
    """Predict a slowdown without saying what the least is."""

    interferes = True

    def slowdown(self, victim: object, colocated: object) -> float:
        return 1.5 if colocated else 1.0


@pytest.mark.parametrize("interference", [NoInterference(), Unbounded()])
def test_bound_stays_where_there_is_no_interference_or_the_predictor_bounds_none(interference: Interference) -> None:
    problem = halves(interference)
    assert geometry.bound_with_interference(problem) == geometry.bound(problem)
    assert relaxed_problem(problem).profiles["b", "k"].curve(500) == problem.profiles["b", "k"].curve(500)
