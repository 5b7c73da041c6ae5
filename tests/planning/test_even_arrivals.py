"""Plan for evenly spaced requests: no headroom, no validation, no more devices than for random ones."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planners.problem import Arrivals
from cotenant.planning import plan
from tests.planners.problems import linear

CUTS = (250, 500, 1000)
PROBLEM = Problem(
    models=(Model(name="a", slo=0.05), Model(name="b", slo=0.08)),
    rates={"a": 330.0, "b": 210.0},
    fleet=(Kind(name="k", cuts=CUTS, count=6),),
    profiles={(name, "k"): linear(name, "k", 0.002, 0.002, cuts=CUTS) for name in "ab"},
    time_limit=1.0,
)


def test_plan_for_even_arrivals_is_sound_and_not_simulated() -> None:
    even = plan(msgspec.structs.replace(PROBLEM, arrivals="even"))
    random = plan(PROBLEM)
    assert check(even, PROBLEM) == []
    assert even.unserved == {} and even.devices_used <= random.devices_used
    assert even.provenance is not None and random.provenance is not None
    assert even.provenance.validation is None and even.provenance.headroom == {}
    assert random.provenance.validation is not None


@pytest.mark.parametrize("planner", ["geometry", "bestfit"])
def test_largest_rate_for_even_arrivals_is_no_less_than_for_random_ones(planner: str) -> None:
    rate = msgspec.structs.replace(PROBLEM, objective="rate")
    even, random = plan(msgspec.structs.replace(rate, arrivals="even"), planner), plan(rate, planner)
    assert check(even, rate) == []
    assert even.scale >= random.scale > 0


@pytest.mark.parametrize("arrivals", ["even", "poisson"])
def test_plan_says_whether_the_clock_ended_any_of_its_searches(arrivals: Arrivals) -> None:
    asked = msgspec.structs.replace(PROBLEM, objective="rate", arrivals=arrivals)
    seconds = itertools.count()
    cut_off, whole = plan(asked, clock=lambda: float(next(seconds))), plan(asked, clock=None)
    assert cut_off.provenance is not None and whole.provenance is not None
    assert (cut_off.provenance.ended_by, whole.provenance.ended_by == "clock") == ("clock", False)
    assert check(cut_off, asked) == []


def test_problem_with_unknown_arrivals_is_an_error() -> None:
    with pytest.raises(PlanError, match="unknown arrivals 'bursts'"):
        msgspec.structs.replace(PROBLEM, arrivals="bursts")


def test_proof_for_evenly_spaced_requests_is_none_of_a_plan_that_needs_more_for_random_ones() -> None:
    asked = msgspec.structs.replace(PROBLEM, rates={"a": 231.0, "b": 147.0})
    made = plan(asked, clock=None)
    assert made.bound == 1 and made.devices_used == 2
    assert made.provenance is not None
    assert (made.provenance.proven, made.provenance.ended_by) == (None, "work")
