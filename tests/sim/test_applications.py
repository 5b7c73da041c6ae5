"""Applications end to end in virtual time."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.core.application import Application, Choice, Fixed, Poisson, Stage
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.measure.report import ModelReport, Report
from cotenant.planners import Problem
from cotenant.planners.forecast import forecast
from cotenant.planning import plan as plan_problem
from cotenant.runtime.applications import application_specs
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Command, Event
from cotenant.sim.applications import drawn_fanouts
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.sources import ClosedLoop, Uniform


def profile(name: str, seconds: float) -> Profile:
    """Of one row or ten alike, on any share: what comes of it can be reckoned by hand."""
    points = [
        Point(share=share, batch=rows, latency=seconds, memory=0) for share in (250, 500, 1000) for rows in (1, 10)
    ]
    return Profile(name, "cpu", points)


CHAIN = Application(
    name="chain",
    slo=0.2,
    stages=(
        Stage(name="find", model="find"),
        Stage(name="name", model="name", after=("find",), fanout=Fixed(3)),
        Stage(name="read", model="read", after=("find",), fanout=Choice((0, 2), (0.5, 0.5))),
    ),
)
PROBLEM = Problem(
    models=(Model(name="find", slo=0.2), Model(name="name", slo=0.2), Model(name="read", slo=0.2)),
    rates={"chain": 5.0, "name": 2.0},
    fleet=(Kind(name="cpu", cuts=(250, 500, 1000)),),
    profiles={
        (name, "cpu"): profile(name, seconds) for name, seconds in (("find", 0.01), ("name", 0.02), ("read", 0.03))
    },
    applications=(CHAIN,),
)


def _part(name: str, share: int, seconds: float) -> Partition:
    placement = Placement(model=name, batch=10, rate=50.0, duty=seconds, latency=seconds)
    return Partition(share=share, placements=(placement,))


PLAN = Plan(
    planner="hand",
    devices=(
        Device(
            id=DeviceId("cpu", 0),
            partitions=(_part("find", 250, 0.01), _part("name", 250, 0.02), _part("read", 500, 0.03)),
        ),
    ),
    split={"chain": {"find": 0.08, "name": 0.12, "read": 0.12}},
)
ALONE = Workload({"chain": Uniform(1.0)})


def rows(report: Report) -> dict[str, ModelReport]:
    return {row.model: row for row in report.models}


def test_simulate_new_plan_changes_the_slo_budgets() -> None:
    dispatcher, rests = Dispatcher(), []

    def handle(event: Event, now: float) -> list[Command]:
        if isinstance(event, Applied) and event.applications is not None:
            rests.append((now, event.applications[0].stages[0].downstream))
        return dispatcher.handle(event, now)

    later = msgspec.structs.replace(PLAN, split={"chain": {"find": 0.15, "name": 0.05, "read": 0.05}})
    simulate(PLAN, PROBLEM, ALONE, seconds=20, changes=[(10.0, later)], handle=handle)
    assert dict(rests) == {0.0: 0.12, 10.0: 0.05}
    with pytest.raises(PlanError, match=r"^the plan does not say how the target of application 'chain' is split"):
        simulate(PLAN, PROBLEM, ALONE, seconds=20, changes=[(10.0, msgspec.structs.replace(PLAN, split={}))])


def test_simulate_one_request_at_a_time_takes_the_longest_path() -> None:
    found = rows(simulate(PLAN, PROBLEM, ALONE, seconds=200))
    chain = found["chain"]
    assert chain.outcomes["served"] == 200
    # After find, the first of three of name runs at once, and then the two others; beside none or two of read likewise.
    assert chain.p99 == pytest.approx(0.01 + 2 * 0.03, rel=0.01)
    assert chain.mean == pytest.approx((0.05 + 0.07) / 2, rel=0.05)
    assert found["find"].outcomes["served"] == 200
    assert found["name"].outcomes["served"] == 600
    assert found["read"].outcomes["served"] == pytest.approx(200, rel=0.2)


def test_simulate_draws_are_independent_of_plan_and_other_sources() -> None:
    specs = [msgspec.structs.replace(CHAIN, name=name) for name in ("one", "two")]
    for applications in (specs, specs[::-1]):
        fanned = drawn_fanouts(applications, seed=3)
        spec = application_specs([specs[0]], {"one": dict.fromkeys(CHAIN.visits, 0.1)})[0]
        number = next(n for n, stage in enumerate(spec.stages) if stage.name == "read")
        drawn_now = fanned(spec, number, 50)
        assert drawn_now == drawn_fanouts([specs[0]], seed=3)(spec, number, 50)
        assert set(drawn_now or ()) == {0, 2}


def test_simulate_model_with_direct_and_application_requests_counts_both() -> None:
    found = rows(simulate(PLAN, PROBLEM, seconds=100))
    assert found["name"].offered == pytest.approx(3 * found["chain"].offered + 2.0, rel=0.2)
    assert (found["name"].target, found["name"].required) == (0.2, 0.99)
    assert (found["find"].target, found["find"].required) == (0.08, 0.0), "it promised nobody anything"


def test_simulate_slow_stage_violates_the_application_slo() -> None:
    slow = msgspec.structs.replace(PROBLEM, profiles={**PROBLEM.profiles, ("read", "cpu"): profile("read", 0.25)})
    plan = msgspec.structs.replace(
        PLAN,
        devices=(
            Device(
                id=DeviceId("cpu", 0),
                partitions=(_part("find", 250, 0.01), _part("name", 250, 0.02), _part("read", 500, 0.25)),
            ),
        ),
    )
    chain = rows(simulate(plan, slow, ALONE, seconds=200))["chain"]
    assert chain.outcomes["served"] + chain.outcomes["expired"] == 200
    assert chain.outcomes["expired"] == pytest.approx(100, rel=0.3), "those that read anything"


def test_simulate_closed_loop_callers_wait_for_whole_applications() -> None:
    found = rows(
        simulate(PLAN, PROBLEM, Workload({"chain": ClosedLoop(callers=1), "name": ClosedLoop(callers=1)}), seconds=20)
    )
    assert found["chain"].mean == pytest.approx(1 / found["chain"].offered, rel=0.01)


def test_simulate_applications_of_one_seed_give_one_report() -> None:
    busy = Workload.poisson({"chain": 200.0})
    report = simulate(PLAN, PROBLEM, busy, seconds=10, seed=5)
    assert report == simulate(PLAN, PROBLEM, busy, seconds=10, seed=5)
    chain = rows(report)["chain"]
    assert sum(chain.outcomes.values()) == pytest.approx(2000, rel=0.1)
    assert chain.outcomes["rejected"] + chain.outcomes["expired"] > 0


def test_simulate_unknown_application_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"^unknown model 'chains' in this problem"):
        simulate(PLAN, PROBLEM, Workload({"chains": Uniform(1.0)}), seconds=1)


@pytest.mark.parametrize("fanout", [Fixed(2), Poisson(2.0)])
@pytest.mark.parametrize("rate", [20.0, 60.0])
def test_forecast_of_applications_is_close_to_the_simulator(fanout: Fixed | Poisson, rate: float) -> None:
    """Partitions of their own: what the forecast says of models that share one is another matter."""
    stages = (
        Stage(name="find", model="find"),
        Stage(name="name", model="name", after=("find",), fanout=fanout),
        Stage(name="read", model="read", after=("find",)),
    )
    asked = msgspec.structs.replace(
        PROBLEM, applications=(Application(name="chain", slo=0.2, stages=stages),), rates={"chain": rate}
    )
    expected = forecast(PLAN, asked).applications["chain"]
    seen = rows(simulate(PLAN, asked, seconds=60))["chain"]
    assert seen.attainment is not None and seen.p99 is not None
    assert expected.attainment <= seen.attainment + 0.005
    assert expected.attainment > 0.95 * seen.attainment
    assert expected.p99 == pytest.approx(seen.p99, rel=0.5)


def test_simulate_unused_application_slows_no_model() -> None:
    crowd = Application(name="crowd", slo=0.2, stages=(Stage(name="many", model="find", fanout=Fixed(10)),))
    both = msgspec.structs.replace(PROBLEM, applications=(CHAIN, crowd), rates=PROBLEM.rates | {"crowd": 0.0})
    plan = msgspec.structs.replace(PLAN, split=PLAN.split | {"crowd": {"many": 0.2}})
    assert forecast(plan, both).applications["chain"] == forecast(PLAN, PROBLEM).applications["chain"]


@pytest.mark.parametrize("objective", ["devices", pytest.param("rate", marks=pytest.mark.slow)])
def test_plans_of_applications_pass_validation(objective: str) -> None:
    asked = msgspec.structs.replace(PROBLEM, objective=objective)
    plan = plan_problem(asked, "elastic")
    assert plan.scale > 1 if objective == "rate" else plan.scale == 1
    workload = Workload.poisson({name: rate * plan.scale for name, rate in asked.rates.items()})
    assert all(row.slo_met for row in simulate(plan, asked, workload, seconds=60, seed=7).models)
    assert plan.split.keys() == {"chain"}
    assert plan_problem(asked, "elastic", validate=False).split.keys() == {"chain"}
