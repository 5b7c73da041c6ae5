"""How far a solver goes for a new rate: keep, retune, replan, or the best with too few devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec
import pytest

from cotenant.control.adaptation import Cause, Solve, Solved, SolveStep
from cotenant.core.application import Application, Stage
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.plan_diff import diff_plans
from cotenant.core.profile import slowed_profiles
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planners.front_end import FrontEnd
from cotenant.planners.rates import at_rates, at_scale, rescaled_plan
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import TOO_SLOW, Replanner, with_devices
from cotenant.runtime.lane_specs import lane_specs
from cotenant.sim.plan_validation import simulate_slos
from cotenant.sim.run import simulate
from cotenant.sim.service import BatchTimes, Noise
from tests.planners.problems import linear

CUTS = (200, 400, 500, 600, 800, 1000)
RATES = {"a": 100.0, "b": 20.0}
PROBLEM = Problem(
    models=(Model(name="a", slo=0.1), Model(name="b", slo=0.4)),
    rates=RATES,
    fleet=(Kind(name="k", count=4, cuts=CUTS),),
    profiles={
        ("a", "k"): linear("a", "k", 0.004, 0.001, cuts=CUTS, batches=(1, 4, 16)),
        ("b", "k"): linear("b", "k", 0.010, 0.008, cuts=CUTS, batches=(1, 4, 16)),
    },
    time_limit=1.0,
)
ONE = (DeviceId("k"),)
FOUR = tuple(DeviceId("k", index) for index in range(4))


def current(rates: dict[str, float] = RATES, devices: int = 1) -> Plan:
    return plan_problem(with_devices(at_rates(PROBLEM, rates), {"k": devices}), validate=False)


def solve(rates: Mapping[str, float], plan: Plan, devices: tuple[DeviceId, ...] = ONE, **more: object) -> Solved:
    asked = Solve(number=7, rates=RATES | dict(rates), offered=RATES | dict(rates), current=plan, devices=devices)
    return Replanner(PROBLEM)(msgspec.structs.replace(asked, **more))


def test_plan_in_force_that_serves_the_rates_is_kept() -> None:
    plan = current()
    solved = solve({"a": 105.0}, plan)
    assert (solved.number, solved.step, solved.error, solved.short) == (7, SolveStep.KEEP, "", "")
    assert solved.plan is not None
    assert diff_plans(plan, solved.plan).workers_started == 0
    assert solved.devices == {"k": 1}
    for name, rate in solved.sustained.items():
        assert rate >= (RATES | {"a": 105.0})[name]
    assert attains(solved.plan, at_rates(PROBLEM, solved.sustained))


def test_rates_are_sustained_only_where_a_simulation_agrees_with_the_forecast() -> None:
    """Requests for b go to the small partition, which answers sooner, and take the time of a there."""
    cuts, rates = (200, 800), {"a": 250.0, "b": 500.0}
    profiles = {
        ("a", "k"): linear("a", "k", 0.0005, 0.00018, cuts=cuts, batches=(1, 6)),
        ("b", "k"): linear("b", "k", 0.0005, 0.0006, cuts=cuts, batches=(1, 2, 16)),
    }
    problem = Problem(
        models=(Model(name="a", slo=0.027), Model(name="b", slo=0.08)),
        rates=rates,
        fleet=(Kind(name="k", count=1, cuts=cuts),),
        profiles=profiles,
    )

    def placed(share: int, *loads: tuple[str, int, float]) -> Partition:
        latencies = [profiles[model, "k"].latency(batch, share) for model, batch, _ in loads]
        return Partition(
            share=share,
            placements=tuple(
                Placement(model=model, batch=batch, rate=rate, duty=sum(latencies), latency=latency)
                for (model, batch, rate), latency in zip(loads, latencies, strict=True)
            ),
        )

    small, large = placed(200, ("a", 6, 250.0), ("b", 2, 100.0)), placed(800, ("b", 16, 400.0))
    plan = rescaled_plan(Plan(planner="p", devices=(Device(id=ONE[0], partitions=(small, large)),)), problem)
    solved = Replanner(problem)(Solve(number=1, rates=rates, offered=rates, current=plan, devices=ONE))
    assert solved.step is SolveStep.KEEP and solved.plan is not None
    for name, rate in rates.items():
        assert rate < solved.sustained[name] < 1.5 * rate
    more = at_scale(problem, 1.5)
    assert attains(rescaled_plan(plan, more), more)
    assert not simulate_slos(rescaled_plan(plan, more), problem).passed
    assert simulate_slos(rescaled_plan(plan, at_rates(problem, solved.sustained)), problem).passed


def test_plan_that_is_kept_for_other_rates_is_proven_no_more() -> None:
    plan = current()
    assert plan.provenance is not None and plan.provenance.proven == "optimal" and plan.bound == 1
    kept = solve({"a": 95.0}, plan)
    assert kept.step is SolveStep.KEEP and kept.plan is not None and kept.plan.provenance is not None
    assert (kept.plan.provenance.proven, kept.plan.bound) == (None, None)


def test_slower_batches_are_retuned_in_the_same_partitions() -> None:
    plan = current({"a": 20.0, "b": 4.0})
    solved = solve({"a": 20.0, "b": 4.0}, plan, slowdowns={"a": 1.2})
    assert solved.step in (SolveStep.RETUNE, SolveStep.REPLAN)
    assert solved.plan is not None
    before, after = ({p.model: p.latency / p.batch for _, _, p in each.placements()} for each in (plan, solved.plan))
    assert after["a"] > before["a"]


def test_batches_for_which_workers_start_anew_are_a_new_plan() -> None:
    held = Placement(model="a", batch=4, rate=100.0, duty=0.008, latency=0.008)
    device = Device(id=ONE[0], partitions=(Partition(share=1000, placements=(held,)),))
    plan = Plan(planner="hand", objective="devices", devices=(device,))
    solved = solve({"a": 600.0, "b": 0.0}, plan)
    assert solved.plan is not None and solved.plan.devices[0].partitions[0].placements[0].batch > 4
    assert diff_plans(plan, solved.plan).workers_started == 1
    assert solved.step is SolveStep.REPLAN


def test_larger_rates_move_partitions() -> None:
    plan = current({"a": 5.0, "b": 70.0})
    solved = solve({"a": 500.0, "b": 5.0}, plan)
    assert solved.step is SolveStep.REPLAN
    assert solved.plan is not None
    asked = with_devices(at_rates(PROBLEM, {"a": 500.0, "b": 5.0}), {"k": 1})
    assert not solved.plan.unserved
    assert check(solved.plan, asked) == []
    assert attains(solved.plan, asked)


def test_more_devices_are_wanted_and_the_best_is_done_meanwhile() -> None:
    rates = {"a": 1200.0, "b": 100.0}
    solved = solve(rates, current())
    assert solved.devices["k"] > 1
    assert solved.plan is not None
    assert {device.id for device in solved.plan.devices} == set(ONE)
    assert solved.short.startswith("the devices that are there leave unserved: ")
    assert check(solved.plan, with_devices(at_rates(PROBLEM, rates), {"k": 1})) == []
    with_all = solve(rates, solved.plan, FOUR)
    assert with_all.short == ""
    assert with_all.plan is not None
    assert with_all.plan.devices_used == solved.devices["k"]


def test_what_is_short_is_of_the_lowest_priority() -> None:
    models = tuple(msgspec.structs.replace(model, priority=2 if model.name == "a" else 1) for model in PROBLEM.models)
    rates = {"a": 1200.0, "b": 60.0}
    asked = Solve(number=7, rates=rates, offered=rates, current=current(), devices=ONE)
    solved = Replanner(msgspec.structs.replace(PROBLEM, models=models))(asked)
    assert solved.plan is not None
    assert solved.plan.rate("b") >= 60.0 > solved.plan.rate("a") / 100
    assert re.fullmatch(
        r"the devices that are there leave unserved: a [0-9]+ of 1200/s \(priority 2\)", solved.short
    ), solved.short


def with_application(rate: float) -> Problem:
    stages = (Stage(name="a", model="a"), Stage(name="b", model="b", after=("a",)))
    application = Application(name="both", slo=0.6, stages=stages)
    return msgspec.structs.replace(PROBLEM, applications=(application,), rates={"a": 50.0, "b": 0.0, "both": rate})


@pytest.mark.parametrize(("rate", "step"), [(10.5, SolveStep.KEEP), (45.0, SolveStep.REPLAN)])
def test_stages_of_applications_are_planned_for(rate: float, step: SolveStep) -> None:
    plan = plan_problem(with_devices(with_application(10.0), {"k": 1}), validate=False)
    asked = with_application(rate)
    solve = Solve(number=7, rates=asked.rates, offered=asked.rates, current=plan, devices=FOUR, step=step)
    solved = Replanner(with_application(10.0))(solve)
    assert (solved.step, solved.error, solved.short) == (step, "", "")
    assert solved.plan is not None
    assert solved.plan.rate("a") >= 50.0 + rate
    assert solved.plan.rate("b") >= rate
    assert solved.sustained["both"] >= rate


def test_application_without_a_split_is_planned_anew() -> None:
    asked = with_application(10.0)
    plan = current({"a": 50.0, "b": 0.0})
    solved = Replanner(asked)(Solve(number=7, rates=asked.rates, offered=asked.rates, current=plan, devices=ONE))
    assert solved.step is SolveStep.REPLAN
    assert solved.plan is not None
    assert solved.plan.split.keys() == {"both"}


def test_split_of_an_application_whose_stage_is_unloaded_is_kept() -> None:
    split = {"gone": {"a": 0.1, "other": 0.2}}
    plan = msgspec.structs.replace(current({"a": 5.0, "b": 70.0}), split=split)
    solved = solve({"a": 500.0, "b": 5.0}, plan)
    assert solved.plan is not None
    assert (solved.step, solved.plan.split) == (SolveStep.REPLAN, split)


@pytest.mark.parametrize("rate", [1e12, math.nan, -1.0])
def test_absurd_rates_are_answered(rate: float) -> None:
    solved = solve({"a": rate}, current())
    assert solved.error or solved.short


def short_of_headroom(
    factor: float, of_what_is_sustained: float, *, bursts: bool = False
) -> tuple[dict[str, float], dict[str, float], Solved]:
    """Return what is offered and asked for, which is more than one device gives, and the answer."""
    plan = current()
    most = Replanner(PROBLEM)(Solve(number=1, rates=RATES, offered=RATES, current=plan, devices=ONE)).sustained
    offered = {name: of_what_is_sustained * rate for name, rate in most.items()}
    asked = {name: factor * rate for name, rate in offered.items()}
    return offered, asked, solve(asked, plan, FOUR[:1], offered=offered, bursts=bursts)


def test_headroom_that_does_not_fit_is_left_out_before_requests_are() -> None:
    offered, _, solved = short_of_headroom(3.0, 0.95)
    assert solved.short == ""
    assert solved.plan is not None
    assert solved.rates == pytest.approx(offered)


def test_model_that_nobody_asks_for_keeps_its_place_where_headroom_does_not_fit() -> None:
    plan = current()
    most = Replanner(PROBLEM)(Solve(number=1, rates=RATES, offered=RATES, current=plan, devices=ONE)).sustained
    offered = {"a": 0.95 * most["a"], "b": 0.0}
    solved = solve({"a": 3.0 * most["a"], "b": 1.0}, plan, offered=offered)
    assert solved.plan is not None
    assert solved.plan.rate("a") == pytest.approx(offered["a"])
    assert solved.plan.rate("b") == pytest.approx(1.0)
    assert solved.rates == {"a": solved.plan.rate("a"), "b": 1.0}
    assert check(solved.plan, with_devices(at_rates(PROBLEM, solved.rates), {"k": 1})) == []
    assert attains(solved.plan, at_rates(PROBLEM, solved.rates))


def test_slowdowns_that_leave_nobody_served_are_left_out() -> None:
    """Other programs have made batches too slow for every target that is asked for. Without a plan no batch would run,
    and nobody would see that they have ended."""
    slowdowns = {"a": 80.0, "b": 60.0}
    solved = solve({}, current(), slowdowns=slowdowns)
    assert not solved.slowed and solved.short == TOO_SLOW
    assert solved.plan is not None and solved.plan.unserved == {}
    assert solved.plan.rates() == pytest.approx(RATES)
    idle = solve({"a": 1.0, "b": 1.0}, current(), offered={"a": 0.0, "b": 0.0}, slowdowns=slowdowns)
    assert not idle.slowed and idle.plan is not None and idle.plan.rates() == pytest.approx({"a": 1.0, "b": 1.0})


def test_slowdowns_that_leave_only_models_served_that_nobody_asks_for_are_left_out() -> None:
    solved = solve({"a": 1.0, "b": 1.0}, current(), offered={"a": 1.0, "b": 0.0}, slowdowns={"a": 80.0})
    assert solved.plan is not None and not solved.slowed
    assert solved.plan.rate("a") == pytest.approx(1.0)


def test_slowdowns_under_which_somebody_is_served_count() -> None:
    solved = solve({}, current(), slowdowns={"a": 1.5, "b": 60.0})
    assert solved.slowed and solved.plan is not None
    assert solved.plan.rate("a") > 0 and solved.plan.rate("b") == 0
    assert solved.short == "the devices that are there leave unserved: b 20 of 20/s"


def test_idle_application_is_left_out_where_there_is_no_room_for_it() -> None:
    problem = with_application(10.0)
    plan = plan_problem(with_devices(problem, {"k": 1}), validate=False)
    rates = {"a": 5000.0, "b": 0.0, "both": 1.0}
    asked = Solve(number=7, rates=rates, offered={"a": 4000.0, "both": 0.0}, current=plan, devices=ONE)
    solved = Replanner(problem)(asked)
    assert solved.error == ""
    assert solved.short.startswith("the devices that are there leave unserved: a ")


def test_idle_model_keeps_a_place_on_the_device_that_is_left() -> None:
    """What is planned for it takes two devices, and nobody asks for it in the moment in which one of them is lost."""
    rates = {"a": 0.0, "b": 150.0}
    plan = current(rates, devices=4)
    assert plan.devices_used > 1
    solved = solve(rates, plan, FOUR[-1:], offered={"a": 0.0, "b": 0.0}, step=SolveStep.REPLAN)
    assert solved.plan is not None and [device.id for device in solved.plan.devices] == [FOUR[-1]]
    most = solve(rates, plan, FOUR[-1:], fill=True).plan
    assert most is not None
    assert 0.85 * most.rate("b") < solved.rates["b"] == solved.plan.rate("b") <= most.rate("b") < rates["b"]
    assert attains(solved.plan, at_rates(PROBLEM, solved.rates))


@pytest.mark.parametrize("rate", [300.0, 5000.0])
def test_idle_application_keeps_as_much_of_its_rate_as_all_of_its_models(rate: float) -> None:
    problem = with_application(10.0)
    plan = plan_problem(with_devices(problem, {"k": 1}), validate=False)
    nothing = {"a": 0.0, "b": 0.0, "both": 0.0}
    asked = Solve(number=7, rates=nothing | {"both": rate}, offered=nothing, current=plan, devices=ONE)
    solved = Replanner(problem)(asked)
    assert solved.error == "" and solved.plan is not None
    assert 40.0 < solved.rates["both"] < rate
    assert solved.plan.rates() == pytest.approx(dict.fromkeys("ab", solved.rates["both"]))


def test_headroom_that_does_not_fit_is_planned_for_as_far_as_several_devices_go() -> None:
    """A rate that rises will want what is left a moment later."""
    most = solve(RATES, current(), FOUR, step=SolveStep.REPLAN).sustained
    offered = {name: 1.2 * rate for name, rate in most.items()}
    solved = solve({name: 10.0 * rate for name, rate in offered.items()}, current(), FOUR, offered=offered)
    assert solved.plan is not None and solved.plan.devices_used == 4
    assert all(solved.rates[name] > 1.5 * rate for name, rate in offered.items())


def test_bursts_are_planned_for_as_far_as_the_devices_go() -> None:
    offered, asked, solved = short_of_headroom(20.0, 0.2, bursts=True)
    assert solved.short == ""
    assert solved.plan is not None
    (multiple,) = {round(solved.rates[name] / offered[name], 6) for name in offered}
    assert multiple > 4.5, "all of the device"
    assert all(solved.rates[name] < asked[name] for name in asked)


@pytest.mark.parametrize("bursts", [True, False])
def test_one_model_that_bursts_beyond_its_need_leaves_the_others_most_of_theirs(bursts: bool) -> None:
    """All four devices serve what each model needs for its bursts, and one bursts higher. A plan for what is offered
    now took three devices, of which the fourth was given back, and left the other model nothing for its bursts."""
    needed = most_of_all_devices()
    asked = {"a": 1.3 * needed["a"], "b": needed["b"]}
    solved = solve(asked, current(devices=4), FOUR, offered={"a": asked["a"], "b": 1.0}, bursts=bursts)
    assert solved.plan is not None and solved.short == ""
    assert solved.rates["a"] == pytest.approx(asked["a"])
    assert 0.6 * needed["b"] < solved.rates["b"] < needed["b"]
    assert solved.devices == {"k": 4}
    assert attains(solved.plan, at_rates(PROBLEM, solved.rates))


def test_burst_that_takes_all_devices_leaves_nothing_to_others() -> None:
    needed = most_of_all_devices()
    offered = {"a": 3.0 * needed["a"], "b": 1.0}
    solved = solve(offered | {"b": needed["b"]}, current(devices=4), FOUR, offered=offered, bursts=True)
    assert solved.plan is not None and solved.short.startswith("the devices that are there leave unserved: a ")
    assert solved.rates == pytest.approx(offered)


def most_of_all_devices() -> dict[str, float]:
    """The rates in the proportion of RATES that four devices serve."""
    filled = solve({}, current(devices=4), FOUR, fill=True).plan
    assert filled is not None
    return filled.rates()


def test_devices_that_bursts_need_give_all_that_they_have() -> None:
    """Rates that take little more than one device: the second gives its room to all."""
    most = solve(RATES, current(), FOUR[:1], step=SolveStep.REPLAN).sustained
    asked = {name: 1.2 * rate for name, rate in most.items()}
    usual = solve(asked, current(), FOUR, offered=asked)
    gap = {name: 0.1 * rate for name, rate in asked.items()}
    bursts = solve(asked, current(), FOUR, offered=gap, bursts=True)
    assert usual.devices == bursts.devices == {"k": 2}
    assert bursts.rates == pytest.approx(asked)
    assert bursts.sustained["a"] > usual.sustained["a"]


def test_devices_that_are_left_are_the_ones_used() -> None:
    plan = current({"a": 1000.0, "b": 80.0}, devices=4)
    left = FOUR[2:]
    assert not {device.id for device in plan.devices} <= set(left)
    solved = solve({"a": 100.0}, plan, left, step=SolveStep.KEEP)
    assert solved.step is SolveStep.REPLAN, "the plan in force cannot be kept without its devices"
    assert solved.plan is not None
    assert {device.id for device in solved.plan.devices} <= set(left)


def test_all_devices_are_filled_where_that_is_asked_for() -> None:
    least = solve({}, current(), FOUR).plan
    filled = solve({}, current(), FOUR, fill=True)
    assert filled.error == "" and filled.plan is not None and least is not None
    assert (least.devices_used, filled.plan.devices_used) == (1, 4)
    assert filled.devices == {"k": 4}
    assert filled.plan.rate("a") > 2 * least.rate("a")
    assert filled.plan.rate("a") / filled.plan.rate("b") == pytest.approx(RATES["a"] / RATES["b"], rel=0.01)


def test_plan_whose_device_was_replaced_is_not_kept() -> None:
    solved = solve({}, current(), FOUR[1:2], step=SolveStep.KEEP)
    assert solved.step is SolveStep.REPLAN
    assert solved.plan is not None
    assert [device.id for device in solved.plan.devices] == [FOUR[1]]


def test_no_device_is_an_error_that_says_what_is_wanted() -> None:
    solved = solve({}, current(), ())
    assert solved.plan is None
    assert solved.error == "no device is left"
    assert solved.devices == {"k": 1}


def test_planner_that_fails_is_an_answer() -> None:
    solved = Replanner(PROBLEM, planner="nonsense")(
        Solve(number=3, rates={"a": 500.0}, current=current(), devices=ONE, step=SolveStep.REPLAN)
    )
    assert solved.number == 3
    assert "nonsense" in solved.error


def test_model_without_a_place_is_placed() -> None:
    plan = current({"a": 40.0})
    assert plan.rate("b") == 0
    solved = solve({"a": 40.0, "b": 5.0}, plan)
    assert solved.plan is not None
    assert solved.plan.rate("b") >= 5.0


def test_slowed_profiles_take_longer_for_the_named_models_only() -> None:
    slowed = slowed_profiles(PROBLEM.profiles, {"a": 2.0})
    assert slowed["a", "k"].latency(4, 500) == pytest.approx(2 * PROBLEM.profiles["a", "k"].latency(4, 500))
    assert slowed["b", "k"] is PROBLEM.profiles["b", "k"]


def test_room_for_noise_is_not_added_to_slowdowns_that_were_observed() -> None:
    most = solve(RATES, current(), FOUR[:1], step=SolveStep.REPLAN).sustained
    rates = {name: 0.8 * rate for name, rate in most.items()}
    noisy = msgspec.structs.replace(PROBLEM, front_end=FrontEnd(noise=1.5))
    asked = Solve(number=1, rates=rates, offered=rates, current=current(), devices=ONE, step=SolveStep.REPLAN)
    assert Replanner(noisy)(asked).short
    assert not Replanner(noisy)(msgspec.structs.replace(asked, slowdowns={"a": 1.01, "b": 1.01})).short


def test_plan_for_slower_batches_has_room_for_noise_where_it_misses_targets_without() -> None:
    """A short target may have to wait for the batches of a long one, without a millisecond to spare."""
    rows = {"a": (3e-4, 8e-6, 16), "b": (4.4e-4, 3e-5, 16), "c": (7.6e-3, 4.3e-3, 4), "d": (2.47e-2, 2.4e-2, 1)}
    cuts = tuple(range(50, 1001, 50))
    batches = {name: sorted({1, most // 2 or 1, most}) for name, (_, _, most) in rows.items()}
    problem = Problem(
        models=tuple(Model(name=name, slo=slo) for name, slo in zip("abcd", (0.05, 0.05, 0.25, 0.8), strict=True)),
        rates={"a": 83.0, "b": 41.5, "c": 16.65, "d": 4.15},
        fleet=(Kind(name="k", count=1, cuts=cuts),),
        profiles={
            (name, "k"): linear(name, "k", first - each, each, cuts=cuts, batches=batches[name])
            for name, (first, each, _) in rows.items()
        },
    )
    offered = {"a": 158.0, "b": 85.0, "c": 36.0, "d": 8.0}
    slowdowns = {"c": 1.71, "d": 1.25}
    asked = Solve(
        number=1,
        rates={name: 1.2 * rate for name, rate in offered.items()},
        offered=offered,
        slowdowns=slowdowns,
        current=plan_problem(problem, validate=False),
        devices=ONE,
        step=SolveStep.REPLAN,
    )
    slowed = msgspec.structs.replace(problem, profiles=slowed_profiles(problem.profiles, slowdowns), rates=offered)

    def missed(noise: float) -> float:
        plan = Replanner(msgspec.structs.replace(problem, front_end=FrontEnd(noise=noise)))(asked).plan
        assert plan is not None
        vary = {
            (lane.id, held.model): BatchTimes(held.latencies, Noise(0.2))
            for lane in lane_specs(plan, {model.name: model for model in slowed.models}, slowed.profiles)
            for held in lane.models
        }
        report = simulate(plan, slowed, seconds=60.0, seed=1, observed=vary)
        return sum(row.offered - row.goodput for row in report.models) / sum(row.offered for row in report.models)

    assert missed(1.1) < 0.01 < missed(1.0)


def test_plan_that_misses_an_slo_is_not_followed_by_one_on_fewer_devices() -> None:
    """A plan for higher rates may take fewer; it would miss more."""
    plan = solve({name: 20.0 * rate for name, rate in RATES.items()}, current(), FOUR, step=SolveStep.REPLAN).plan
    assert plan is not None and plan.devices_used > 2
    offered = {name: 4.0 * rate for name, rate in RATES.items()}
    asked = {name: 1.2 * rate for name, rate in offered.items()}
    usual = solve(asked, plan, FOUR, offered=offered, step=SolveStep.REPLAN)
    missed = solve(asked, plan, FOUR, offered=offered, step=SolveStep.REPLAN, cause=Cause.SLO)
    assert usual.devices["k"] < missed.devices["k"] == plan.devices_used
    assert missed.rates == pytest.approx(asked)
    assert missed.sustained["a"] > usual.sustained["a"]
