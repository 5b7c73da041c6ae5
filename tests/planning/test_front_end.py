from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planners.front_end import FrontEnd
from cotenant.planning import plan as plan_problem
from tests.planners.problems import linear
from tests.planners.rate_problems import largest

FRONT_END = FrontEnd(seconds=1e-3, reserved=0.3, processors=1.0)  # reads 700 requests/s at most


def quick(rate: float, front_end: FrontEnd | None = FRONT_END) -> Problem:
    """One model of 0.1 ms a row: 10,000 requests/s if the server could read them."""
    return Problem(
        models=(Model(name="a", slo=0.1),),
        rates={"a": rate},
        fleet=(Kind(name="k"),),
        profiles={("a", "k"): linear("a", "k", 0.0, 0.0001, cuts=(1000,), batches=(1, 16))},
        front_end=front_end,
    )


def test_rates_beyond_what_the_front_end_reads_are_unserved() -> None:
    plan = plan_problem(quick(1000.0))
    assert plan.rate("a") == pytest.approx(700.0) and plan.unserved["a"] == pytest.approx(300.0)
    assert check(plan, quick(1000.0)) == []
    assert not plan_problem(quick(1000.0, front_end=None)).unserved


def test_largest_multiple_ends_at_what_the_front_end_reads() -> None:
    plan = plan_problem(largest(quick(1.0)))
    assert plan.objective == "rate" and plan.scale == pytest.approx(700.0) == plan.bound
    assert check(plan, largest(quick(1.0))) == []


def test_plans_leave_the_processors_that_the_front_end_takes_beyond_its_reserve() -> None:
    """At 500/s it takes 0.2 of the processor that models have: a model of 1.7 ms a row is left without room."""
    problem = quick(500.0)
    slow = msgspec.structs.replace(
        problem, profiles={("a", "k"): linear("a", "k", 0.0, 0.0017, cuts=(1000,), batches=(1, 16))}
    )
    assert plan_problem(slow).unserved
    free = msgspec.structs.replace(slow, front_end=FrontEnd(seconds=1e-3, reserved=0.5, processors=1.0))
    plan = plan_problem(free)
    assert not plan.unserved and check(plan, free) == []


def test_plans_under_a_front_end_state_the_latencies_of_the_problem() -> None:
    plan = plan_problem(quick(600.0))
    assert not plan.unserved and check(plan, quick(600.0)) == []
