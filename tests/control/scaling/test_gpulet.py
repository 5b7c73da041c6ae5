"""gpulet's Algorithm 2 against a literal transcription of the paper's lines."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cotenant.control.scaling.gpulet import IncrementalScaling
from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem, load_planner
from tests.control.scaling.contexts import GPU, context, instances, problem

ELASTIC = load_planner("elastic")


@given(rate=st.floats(0, 1500), used=st.integers(0, 8))
@example(rate=5e-324, used=0)
def test_wanted_is_what_the_papers_lines_find(rate: float, used: int) -> None:
    asked = problem({"a": rate})

    def elastic_partitioning(count: int) -> Plan:
        return ELASTIC(msgspec.structs.replace(asked, fleet=(Kind(name="gpu", count=count),)))

    n = used  # line 1
    result = elastic_partitioning(n)  # line 2-3
    while result.unserved and n < 8:  # line 4
        n += 1
        result = elastic_partitioning(n)
    wanted = IncrementalScaling(planner=ELASTIC)(context(ready=used, of=asked))
    assert wanted == {"gpu": n if result.unserved else result.devices_used}


def test_a_plan_that_uses_fewer_devices_lets_the_others_go() -> None:
    assert IncrementalScaling(planner=ELASTIC)(context(ready=5, rates={"a": 120.0})) == {"gpu": 2}


def test_more_than_the_limit_serves_wants_all() -> None:
    assert IncrementalScaling(planner=ELASTIC)(context(ready=1, rates={"a": 9e3})) == {"gpu": 8}


def test_a_greedy_planner_that_needs_room_to_use_fewer_devices_gets_it() -> None:
    """Algorithm 1 serves three models on one of two V100s, and two of them on one alone."""

    def greedy(asked: Problem) -> Plan:
        plan = ELASTIC(asked)
        return plan if asked.fleet[0].count != 1 else msgspec.structs.replace(plan, unserved={"a": 1.0})

    wanted = IncrementalScaling(planner=greedy)(context(ready=1, rates={"a": 10.0}))
    assert ELASTIC(problem({"a": 10.0})).devices_used == 1 and wanted == {"gpu": 2}


def test_nothing_to_serve_wants_nothing() -> None:
    assert IncrementalScaling(planner=ELASTIC)(context(ready=3, rates={"a": 0.0})) == {"gpu": 0}


def test_the_planner_is_asked_for_one_more_device_each_time() -> None:
    counts = []

    def planner(asked: Problem) -> Plan:
        counts.append(asked.fleet[0].count)
        return ELASTIC(asked)

    IncrementalScaling(planner=planner)(context(ready=2, rates={"a": 470.0}))
    assert counts == [2, 3, 4, 5]


def test_several_kinds_and_a_model_that_never_fits_are_errors() -> None:
    scale = IncrementalScaling(planner=ELASTIC)
    with pytest.raises(PlanError, match="knows one kind of device, and there are gpu, other"):
        scale(context(of=problem({"a": 1.0}, GPU, Kind(name="other"))))
    with pytest.raises(PlanError, match="no number of devices of kind 'gpu' serves a"):
        scale(context(of=problem({"a": 1.0}, Kind(name="gpu", count=None), latency=0.2), plan=instances()))
