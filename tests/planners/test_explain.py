from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem, load_planner
from cotenant.planners.capacity import DeviceDraft, PartitionDraft, build_plan
from cotenant.planners.explain import Explanation, explain, gain, probes
from cotenant.planning import plan as plan_problem
from tests.planners.problems import MIB, linear, problems

FIFTHS = (200, 400, 600, 800, 1000)


def problem(
    slo: float = 0.2, *, cuts: tuple[int, ...] = FIFTHS, count: int | None = None, memory: int = 1 << 62, **rates: float
) -> Problem:
    """A batch of n takes 2 ms + n · 3 ms on a whole device, in inverse proportion on a share."""
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name in rates),
        rates=rates,
        fleet=(Kind(name="k", cuts=cuts, count=count, memory=memory),),
        profiles={(name, "k"): linear(name, "k", 0.002, 0.003, cuts=cuts, memory=10 * MIB) for name in rates},
    )


def explained(given: Problem, *cuts: PartitionDraft) -> dict[str, tuple[str, str]]:
    """What binds each model on one device that is cut so."""
    plan = build_plan(given, "hand", [DeviceDraft(given.fleet[0], list(cuts))])
    return {it.model: (it.binds, it.why) for it in explain(plan, given).placements}


def test_the_smallest_share_binds_where_there_is_no_smaller() -> None:
    assert explained(problem(a=1.0), PartitionDraft(200, {"a": 1.0})) == {"a": ("share", "none is smaller")}


def test_a_target_binds_where_even_single_requests_are_late() -> None:
    # 2 · 5 ms / 0.4 = 25 ms, on a fifth 50 ms.
    assert explained(problem(0.03, a=1.0), PartitionDraft(400, {"a": 1.0})) == {"a": ("target", "20 %: too slow")}


def test_a_rate_binds_where_no_batch_keeps_up() -> None:
    # The largest batch of 16 rows takes 50 ms on a whole device: 320 requests/s, and 192 on three fifths.
    assert explained(problem(10.0, a=200.0), PartitionDraft(800, {"a": 200.0})) == {"a": ("rate", "60 %: falls behind")}


def test_both_bind_where_only_late_batches_keep_up() -> None:
    # On two fifths 125 requests/s need 10 rows in 80 ms; half of a target of 100 ms leaves room for 6.
    assert explained(problem(0.1, a=125.0), PartitionDraft(600, {"a": 125.0})) == {
        "a": ("both", "40 %: keeps up, but late")
    }


def test_chance_binds_where_evenly_spaced_requests_could_do_with_less() -> None:
    bind, why = explained(problem(0.2, a=100.0), PartitionDraft(600, {"a": 100.0}))["a"]
    assert bind == "chance"
    assert why.startswith("40 %: ") and why.endswith(" % in time")


def test_room_is_what_nobody_needs() -> None:
    assert explained(problem(a=1.0), PartitionDraft(800, {"a": 1.0})) == {"a": ("room", "60 %: would do")}


def test_the_model_that_needs_the_share_is_told_from_those_beside_it() -> None:
    given = problem(a=1.0, b=1.0)
    models = (Model(name="a", slo=0.04), Model(name="b", slo=5.0))
    given = msgspec.structs.replace(given, models=models)
    # A round of single requests takes 25 ms on two fifths, and 50 ms on one.
    assert explained(given, PartitionDraft(400, {"a": 1.0, "b": 1.0})) == {
        "a": ("target", "20 %: too slow"),
        "b": ("other", "beside a"),
    }


def test_memory_binds_where_the_smaller_instance_has_too_little() -> None:
    kind = Kind(name="k", cuts=(250, 500, 1000), geometry="mig-a30-24gb", memory=24 << 30)
    given = msgspec.structs.replace(
        problem(a=1.0),
        fleet=(kind,),
        profiles={("a", "k"): linear("a", "k", 0.002, 0.003, (250, 500, 1000), memory=8 << 30)},
    )
    assert explained(given, PartitionDraft(500, {"a": 1.0})) == {"a": ("memory", "25 %: no room for 8 GiB")}


def test_what_is_used_is_said_in_parts() -> None:
    given = problem(memory=40 * MIB, a=100.0)
    plan = build_plan(given, "hand", [DeviceDraft(given.fleet[0], [PartitionDraft(600, {"a": 100.0})])])
    (it,) = explain(plan, given).placements
    ((_, _, placement),) = plan.placements()
    assert it.partition == "k-0/0"
    assert it.target_used == pytest.approx(2 * placement.latency / 0.2)
    assert it.rate_used == pytest.approx(100 * placement.latency / placement.batch)
    assert it.memory_used == pytest.approx(0.25)


def test_devices_that_are_alike_are_explained_once() -> None:
    given = problem(a=100.0)
    plan = build_plan(
        given, "hand", [DeviceDraft(given.fleet[0], [PartitionDraft(600, {"a": 10.0})]) for _ in range(10)]
    )
    (it,) = explain(plan, given).placements
    assert (it.partition, it.count) == ("10 x k/0", 10)


def missing(given: Problem, planner: str = "elastic") -> Explanation:
    return explain(load_planner(planner)(given), given)


def test_a_model_that_no_share_serves_in_time_is_told_the_nearest_target() -> None:
    (it,) = missing(problem(0.009, a=1.0)).unserved
    assert (it.cause, it.rate) == ("time", 1.0)
    assert it.nearest == pytest.approx(0.01)
    assert "a single request takes 5 ms on 100 % of k" in it.why
    assert "the nearest target that would work is 10 ms, 9 ms is asked for" in it.why
    assert it.nearest is not None
    assert not missing(problem(it.nearest, a=1.0)).unserved


def test_who_keeps_all_others_from_being_served_is_told_under_the_objective_rate() -> None:
    given = msgspec.structs.replace(problem(count=1, a=1.0, b=1.0), objective="rate")
    given = msgspec.structs.replace(given, models=(Model(name="a", slo=0.009), Model(name="b", slo=1.0)))
    plan = plan_problem(given, "elastic", validate=False)
    assert plan.scale == 0
    assert [(it.model, it.cause) for it in explain(plan, given).unserved] == [("a", "time")]
    less = msgspec.structs.replace(problem(count=1, a=1000.0), objective="rate")
    assert explain(plan_problem(less, "elastic", validate=False), less).unserved == ()


def test_a_model_without_room_is_told_what_a_device_carries() -> None:
    (it,) = missing(problem(count=1, a=1000.0)).unserved
    assert it.cause == "capacity"
    assert it.why == (
        "no room is left: a whole k carries 320 requests/s of it within its target, and 1 of 1 are in use"
    )


def test_a_model_that_fits_into_no_memory_is_told_so() -> None:
    (it,) = missing(problem(memory=5 * MIB, a=1.0)).unserved
    assert (it.cause, it.why) == ("memory", "a worker of it needs 10 MiB, a device has 5 MiB")
    (it,) = missing(problem(count=1, memory=15 * MIB, a=100.0, b=1.0)).unserved
    assert it.cause == "memory"
    assert "of k-0 are free, but 10 MiB of 15 MiB of memory are taken, and a worker needs 10 MiB" in it.why


def test_a_model_that_was_not_measured_is_told_so() -> None:
    given = msgspec.structs.replace(problem(a=1.0), profiles={})
    (it,) = missing(given).unserved
    assert it.cause == "unknown"


def test_a_little_more_is_asked_for_where_it_may_help() -> None:
    given = problem(0.009, count=1, memory=40 * MIB, a=1.0)
    tries = probes(missing(given), given)
    assert [more for more, _ in tries] == [
        "one more k",
        "twice the memory on k",
        "10 ms more for every target",
        "10 ms more for a",
    ]
    (larger, roomier, _, slower) = [it for _, it in tries]
    assert larger.fleet[0].count == 2
    assert roomier.fleet[0].memory == 80 * MIB
    assert slower.model("a").slo == pytest.approx(0.019)
    assert not missing(slower).unserved


def test_what_more_buys_is_said_in_the_words_of_the_objective() -> None:
    one = Plan(planner="p", objective="rate", scale=2.0)
    assert gain("x", one, msgspec.structs.replace(one, scale=2.5)).buys == "2.5 x the rates instead of 2 x, +25.0 %"
    assert gain("x", one, msgspec.structs.replace(one, scale=2.004)).buys == "nothing"
    given = problem(a=1000.0)
    plan = plan_problem(given, "elastic", validate=False)
    less = plan_problem(problem(a=100.0), "elastic", validate=False)
    assert gain("x", plan, less).buys == f"1 device instead of {plan.devices_used}"
    assert gain("x", plan, plan).buys == "nothing"
    assert gain("x", less, plan).buys == f"nothing: {plan.devices_used} devices instead of 1"
    short = msgspec.structs.replace(plan, unserved={"a": 20.0})
    assert gain("x", short, plan).buys == f"all is served, on {plan.devices_used} devices"
    assert gain("x", short, msgspec.structs.replace(plan, unserved={"a": 10.0})).buys == (
        "10 requests/s unserved instead of 20"
    )
    dear = msgspec.structs.replace(plan, cost_per_hour=4.5)
    assert gain("x", dear, msgspec.structs.replace(plan, cost_per_hour=4.0)).buys == "4.00 per hour instead of 4.50"


def test_one_device_of_many_is_something() -> None:
    cuts = tuple(Device(id=DeviceId("k", n), partitions=()) for n in range(400))
    many = Plan(planner="hand", objective="devices", devices=cuts)
    less = msgspec.structs.replace(many, devices=many.devices[1:], bound=398)
    assert gain("x", many, less).buys == "399 devices instead of 400"
    as_many = msgspec.structs.replace(many, bound=399)
    assert gain("x", many, as_many).buys == "nothing that was found; not proven"


def test_where_more_buys_nothing_it_is_said_whether_that_is_proven() -> None:
    one = Plan(planner="p", objective="rate", scale=2.0)
    assert gain("x", one, msgspec.structs.replace(one, bound=2.001)).buys == "nothing: even then no plan serves more"
    assert gain("x", one, msgspec.structs.replace(one, bound=2.1)).buys == "nothing that was found; not proven"
    plan = plan_problem(problem(a=1000.0), "geometry", validate=False)
    known = msgspec.structs.replace(plan, bound=float(plan.devices_used))
    assert gain("x", plan, known).buys == (
        f"nothing: even then no plan does with less than {plan.devices_used} devices"
    )
    split = msgspec.structs.replace(plan, split={"app": {"a": 0.2}})
    assert gain("x", split, known).buys == "nothing that was found; not proven", "another split may do with less"
    loose = msgspec.structs.replace(plan, bound=plan.devices_used - 1.0)
    assert gain("x", plan, loose).buys == "nothing that was found; not proven"
    dear = msgspec.structs.replace(plan, cost_per_hour=4.5, bound=4.5)
    assert gain("x", dear, dear).buys == "nothing: even then no plan does with less than 4.50 per hour"


def test_why_a_model_is_not_served_counts_all_numbers_of_workers_that_were_measured() -> None:
    """Two workers at once are as quick as one, and carry twice as much; with one it was measured on less than all."""
    points = [
        Point(share=1000, batch=b, latency=0.002 + 0.003 * b, memory=10 * MIB, procs=procs)
        for procs in (1, 2)
        for b in (1, 2, 4, 8, 16)
    ]
    given = msgspec.structs.replace(
        problem(a=5000.0, cuts=(1000,), count=1), profiles={("a", "k"): Profile("a", "k", points)}
    )
    (both,) = missing(given).unserved
    # 16 rows in 50 ms, twice.
    assert both.cause == "capacity"
    assert "carries 640 requests/s" in both.why
    only = [point for point in points if point.procs == 2]
    given = msgspec.structs.replace(given, profiles={("a", "k"): Profile("a", "k", only)})
    (two,) = missing(given).unserved
    assert two.cause == "capacity"


@given(problems())
@settings(max_examples=40, deadline=None)
def test_every_placement_and_every_lack_is_explained(any_problem: Problem) -> None:
    plan = load_planner("elastic")(any_problem)
    found = explain(plan, any_problem)
    assert sum(it.count for it in found.placements) == len(list(plan.placements()))
    assert {it.model for it in found.unserved} == set(plan.unserved)
    for it in found.placements:
        assert it.target_used <= 1 + 1e-6 and it.rate_used <= 1 + 1e-6
        assert it.why
    for lack in found.unserved:
        assert (lack.nearest is not None) == (lack.cause == "time")
