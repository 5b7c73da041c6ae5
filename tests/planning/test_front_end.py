from __future__ import annotations

import msgspec
import pytest

from cotenant.core.application import Application, Stage
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planners.front_end import FrontEnd
from cotenant.planning import plan as plan_problem
from cotenant.planning.front_end import plan_with_front_end
from tests.planners.problems import linear, profile
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
        time_limit=0.5,
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


def apart(rate: float, front_end: FrontEnd) -> Problem:
    """Two models for the largest multiple that cannot share the one device: a batch of `a` makes `b` late."""
    latency = {"a": {(1000, 1): 0.030, (1000, 8): 0.035, (1000, 16): 0.045}, "b": {(1000, 1): 0.022}}
    return Problem(
        models=(Model(name="a", slo=0.1), Model(name="b", slo=0.05)),
        rates={"a": rate, "b": 1.0},
        fleet=(Kind(name="k", count=1),),
        profiles={(name, "k"): profile(name, "k", seconds) for name, seconds in latency.items()},
        objective="rate",
        arrivals="even",
        front_end=front_end,
        time_limit=0.5,
    )


def test_models_served_without_the_others_get_no_more_than_the_front_end_reads() -> None:
    problem = apart(200.0, FrontEnd(seconds=7e-3))
    plan = plan_problem(problem, "geometry", validate=False)
    assert check(plan, problem) == []
    assert plan.scale == 0 and plan.rates() == pytest.approx({"a": 100.0})
    assert plan.unserved == pytest.approx({"a": 100.0, "b": 1.0})


def test_models_served_without_the_others_leave_the_processors_that_the_front_end_takes() -> None:
    """At 300/s it takes 0.2 of the processor: 12 rows take 50 ms rather than 40, and more than 50 would be late."""
    problem = apart(300.0, FrontEnd(seconds=1e-3, reserved=0.1, processors=1.0))
    plan = plan_problem(problem, "geometry", validate=False)
    assert check(plan, problem) == []
    assert plan.scale == 0 and plan.rates() == pytest.approx({"a": 12 * 0.8 / 0.040})


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


def room(**options: float) -> Problem:
    """Return a model alone: 49.7 ms in the worst case on half of the device, half as long on the whole."""
    cuts = (500, 1000)
    return Problem(
        models=(Model(name="a", slo=0.05),),
        rates={"a": 1.0},
        fleet=(Kind(name="k", count=1, cuts=cuts),),
        profiles={("a", "k"): linear("a", "k", 0.012425, 0.0, cuts=cuts, batches=(1,))},
        front_end=FrontEnd(processors=1.0, reserved=0.3, **options),
    )


def worst_case(plan: Plan) -> float:
    ((placement,),) = [partition.placements for device in plan.devices for partition in device.partitions]
    return 2 * placement.latency


def test_model_alone_without_room_is_planned_up_to_its_target() -> None:
    assert worst_case(plan_problem(room(), "bestfit", validate=False)) == pytest.approx(0.0497)


@pytest.mark.parametrize("options", [{"latency": 0.001}, {"noise": 1.1}])
@pytest.mark.parametrize("planner", ["bestfit", "geometry"])
def test_model_alone_has_room_for_noise_and_for_the_front_end(options: dict[str, float], planner: str) -> None:
    plan = plan_problem(room(**options), planner, validate=False)
    assert worst_case(plan) == pytest.approx(0.02485), "stated without the room"
    assert check(plan, room(**options)) == []


def test_target_that_leaves_no_room_is_kept_without_it_rather_than_not_at_all() -> None:
    whole = room(latency=0.001, noise=1.1)
    half = msgspec.structs.replace(whole, fleet=(Kind(name="k", count=1, cuts=(500,)),))
    plan = plan_problem(half, "bestfit", validate=False)
    assert not plan.unserved and check(plan, half) == []
    assert worst_case(plan) == pytest.approx(0.0497)


def test_application_that_no_split_serves_is_an_error_about_its_own_target() -> None:
    """Not about what the front end leaves of it, which nobody asked for."""
    stages = (Stage(name="one", model="a"), Stage(name="two", model="a", after=("one",)))
    problem = room(latency=0.001, noise=1.1)
    hopeless = Application(name="pair", slo=0.030, stages=stages)
    problem = msgspec.structs.replace(problem, applications=(hopeless,), rates={"pair": 1.0})
    with pytest.raises(PlanError, match=r"^application 'pair': no split of 30 ms meets its target: "):
        plan_problem(problem, validate=False)


def test_front_end_takes_no_more_than_half_of_a_target() -> None:
    front_end = FrontEnd(latency=0.001)
    assert front_end.target(0.05) == pytest.approx(0.049)
    assert front_end.target(0.0015) == pytest.approx(0.00075)


def test_front_end_and_noise_are_counted_in_targets_and_latencies_of_all_that_is_planned() -> None:
    pair = Application(
        name="pair", slo=0.2, stages=(Stage(name="one", model="a"), Stage(name="two", model="a", after=("one",)))
    )
    problem = room(latency=0.001, noise=1.1)
    problem = msgspec.structs.replace(problem, applications=(pair,), rates={"pair": 1.0})
    assert problem.front_end is not None
    asked: list[Problem] = []

    def solve(given: Problem) -> Plan:
        asked.append(given)
        return plan_problem(msgspec.structs.replace(given, front_end=None), validate=False)

    plan = plan_with_front_end(solve, problem, problem.front_end)
    (given,) = asked
    assert not plan.unserved
    assert given.model("a").slo == pytest.approx(0.049)
    assert given.applications[0].slo == pytest.approx(0.199)
    assert given.profiles["a", "k"].latency(1, 1000) == pytest.approx(1.1 * 0.012425)
    assert plan.devices[0].partitions[0].placements[0].latency in (pytest.approx(0.012425), pytest.approx(0.02485))
