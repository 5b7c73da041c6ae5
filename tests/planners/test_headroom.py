from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem, load_planner
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planners.headroom import HEADROOM_STEP, with_headroom
from cotenant.planners.local_search import attainment_shortfall
from tests.planners.problems import linear
from tests.planners.rate_problems import one_device, unlimited

elastic = load_planner("elastic")


def test_with_headroom_of_missed_slos_uses_more_devices() -> None:
    problem = unlimited(one_device(297.0))
    paper = elastic(problem)
    assert paper.devices_used == 3
    assert not attains(paper, problem)
    plan = with_headroom(elastic, problem)
    assert plan.devices_used == 4
    assert attains(plan, problem)
    assert check(plan, problem) == []
    assert plan.provenance is not None
    assert plan.provenance.headroom == {"a": HEADROOM_STEP}


def test_with_headroom_of_met_slos_records_no_headroom() -> None:
    plan = with_headroom(elastic, one_device(20.0))
    assert plan.provenance is None or plan.provenance.headroom == {}


def test_with_headroom_keeps_the_bound_of_the_rates_asked_for() -> None:
    def planner(problem: Problem) -> Plan:
        return msgspec.structs.replace(elastic(problem), bound=problem.rates["a"] / 100.0)

    plan = with_headroom(planner, unlimited(one_device(297.0)))
    assert plan.devices_used == 4
    assert plan.bound == pytest.approx(2.97)


def test_with_headroom_beside_an_unservable_model_adds_headroom_for_the_others() -> None:
    slow = Model(name="slow", slo=0.001)
    given = unlimited(one_device(297.0))
    profiles = dict(given.profiles) | {("slow", "k"): linear("slow", "k", 0.0, 0.010, cuts=(1000,), batches=(1,))}
    problem = msgspec.structs.replace(
        given, models=(*given.models, slow), rates=given.rates | {"slow": 5.0}, profiles=profiles
    )
    plan = with_headroom(elastic, problem)
    assert plan.unserved == {"slow": 5.0}
    assert plan.devices_used == 4
    assert attainment_shortfall(plan, given) == {}
    assert check(plan, problem) == []
