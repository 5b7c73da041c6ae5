"""When a scaler plans anew, for what, and what it leaves alone."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.control.scaling.scaler import Scaler, ScalingOptions
from cotenant.core.application import Application, Fixed, Stage
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.planners import Problem, load_planner
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.shapes import hills

# A batch of n takes 10 ms + 1 ms x n: 760 requests/s on a device in batches of 32.
PROBLEM = Problem(
    models=(Model(name="a", slo=0.1),),
    rates={"a": 500.0},
    fleet=(Kind(name="gpu", count=4),),
    profiles={
        ("a", "gpu"): Profile(
            "a",
            "gpu",
            [Point(share=WHOLE, batch=n, latency=0.01 + 0.001 * n, memory=0) for n in (1, 8, 32)],
        )
    },
)


class Asked:
    """A planner that writes down what it is asked for."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._plan = load_planner("elastic")

    def __call__(self, problem: Problem) -> Plan:
        self.problems.append(problem)
        return self._plan(problem)


def scaler(planner: Asked, **policy: float) -> Scaler:
    return Scaler(PROBLEM, planner, load_planner("elastic")(PROBLEM), ScalingOptions(**policy))


def test_scaler_smoothed_rates_are_planned_with_headroom() -> None:
    asked = Asked()
    it = scaler(asked, weight=0.25)
    it.observe({"a": 1000.0}, 20)
    assert it.estimate == {"a": 1000.0}  # nothing to smooth it with
    plan = it.observe({"a": 2000.0}, 40)
    assert [problem.rates for problem in asked.problems] == [{"a": 1200.0}, {"a": 1500.0}]
    assert plan is not None
    assert plan is it.plan
    assert not plan.unserved
    assert plan.devices_used == 2
    assert asked.problems[1].current == load_planner("elastic")(asked.problems[0])


def test_scaler_rising_rates_are_extrapolated_and_falling_are_not() -> None:
    asked = Asked()
    it = scaler(asked, weight=1.0, ahead=40.0)
    it.observe({"a": 1000.0}, 20)
    it.observe({"a": 1200.0}, 40)
    it.observe({"a": 800.0}, 60)
    assert [problem.rates["a"] for problem in asked.problems] == pytest.approx([1200.0, 1200 * 1.2 + 400 * 1.2, 960.0])


def test_scaler_low_rates_get_more_headroom() -> None:
    asked = Asked()
    scaler(asked).observe({"a": 100.0}, 20)
    assert asked.problems[0].rates == {"a": 150.0}


@pytest.mark.parametrize(("seen", "again"), [(424, False), (426, True), (376, False), (374, True)])
def test_scaler_small_change_is_ignored(seen: float, again: bool) -> None:
    """500 were planned for, which is 416.7 with room: up by 10 requests/s, down by a tenth."""
    asked = Asked()
    scaler(asked).observe({"a": float(seen)}, 20)
    assert bool(asked.problems) == again


def test_scaler_equal_plan_is_no_change() -> None:
    asked = Asked()

    def frozen(problem: Problem) -> Plan:
        asked(problem)
        return start

    start = load_planner("elastic")(PROBLEM)
    it = Scaler(PROBLEM, frozen, start)
    assert it.observe({"a": 1000.0}, 20) is None
    assert it.plan is start
    assert len(asked.problems) == 1
    assert it.observe({"a": 1000.0}, 40) is None
    assert len(asked.problems) == 1  # and is not asked for again


def test_scaler_plan_not_in_force_is_made_again_in_the_next_period() -> None:
    asked = Asked()
    policy = scaler(asked)
    before = policy.plan
    assert policy.observe({"a": 1000.0}, 20) is not None
    policy.rolled_back(before)
    assert policy.plan is before
    assert policy.observe({"a": 1000.0}, 40) is not None
    assert asked.problems[-1].current == before


def test_scaler_model_without_requests_keeps_no_device() -> None:
    it = scaler(Asked(), weight=1.0)
    plan = it.observe({}, 20)
    assert plan is not None
    assert plan.devices == ()


def test_scaler_application_requests_are_counted_once_per_model() -> None:
    """Of the 700 that the model gets, the application makes 600."""
    twice = Application(name="twice", slo=0.3, stages=(Stage(name="a", model="a", fanout=Fixed(2)),))
    start = msgspec.structs.replace(PROBLEM, rates={"a": 50.0, "twice": 100.0}, applications=(twice,))
    plan = load_planner("elastic")(PROBLEM)
    it = Scaler(start, lambda asked: plan, plan, ScalingOptions(little=0.0))
    it.observe({"a": 700.0, "twice": 300.0}, 20)
    assert it.target == {"a": pytest.approx(120.0), "twice": pytest.approx(360.0)}


def test_scaler_rates_beyond_capacity_use_all_devices() -> None:
    plan = scaler(Asked()).observe({"a": 9000.0}, 20)
    assert plan is not None
    assert plan.devices_used == 4
    assert plan.unserved["a"] > 0


def test_scaler_simulated_wave_adds_and_removes_devices() -> None:
    points = [Point(share=WHOLE, batch=n, latency=0.05 + 0.005 * n, memory=0) for n in (1, 8, 32)]
    start = msgspec.structs.replace(
        PROBLEM,
        models=(Model(name="a", slo=0.5),),
        rates={"a": 60.0},
        profiles={("a", "gpu"): Profile("a", "gpu", points)},
    )
    asked = Asked()
    it = Scaler(start, asked, load_planner("elastic")(start))
    wave = Workload({"a": hills(40.0, [(40.0, 740.0, 300.0)])})
    report = simulate(start, it.plan, wave, seconds=800, control=it, startup=15.0)
    assert (report.models[0].attainment or 0.0) > 0.99
    assert max(load_planner("elastic")(problem).devices_used for problem in asked.problems) == 3
    assert it.plan.devices_used == 1
    still = simulate(start, load_planner("elastic")(start), wave, seconds=800)
    assert (still.models[0].attainment or 0.0) < 0.9
