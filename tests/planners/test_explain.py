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
    """The bottleneck of each model on one device that is cut so."""
    plan = build_plan(given, "hand", [DeviceDraft(given.fleet[0], list(cuts))])
    return {one.model: (one.bottleneck, one.why) for one in explain(plan, given).placements}


def test_explain_on_the_smallest_share_has_bottleneck_share() -> None:
    assert explained(problem(a=1.0), PartitionDraft(200, {"a": 1.0})) == {"a": ("share", "none is smaller")}


def test_explain_where_single_requests_are_too_slow_has_bottleneck_target() -> None:
    # 2 · 5 ms / 0.4 = 25 ms, on a fifth 50 ms.
    assert explained(problem(0.03, a=1.0), PartitionDraft(400, {"a": 1.0})) == {"a": ("target", "20 %: too slow")}


def test_explain_where_no_batch_keeps_up_has_bottleneck_rate() -> None:
    # The largest batch of 16 rows takes 50 ms on a whole device: 320 requests/s, and 192 on three fifths.
    assert explained(problem(10.0, a=200.0), PartitionDraft(800, {"a": 200.0})) == {"a": ("rate", "60 %: falls behind")}


def test_explain_where_only_long_batches_keep_up_has_bottleneck_both() -> None:
    # On two fifths 125 requests/s need 10 rows in 80 ms; half of a target of 100 ms leaves room for 6.
    assert explained(problem(0.1, a=125.0), PartitionDraft(600, {"a": 125.0})) == {
        "a": ("both", "40 %: keeps up, but late")
    }


def test_explain_where_only_even_arrivals_need_less_has_bottleneck_arrivals() -> None:
    bottleneck, why = explained(problem(0.2, a=100.0), PartitionDraft(600, {"a": 100.0}))["a"]
    assert bottleneck == "arrivals"
    assert why.startswith("40 %: attainment ") and why.endswith(" %")


def test_explain_where_a_smaller_share_is_enough_has_bottleneck_headroom() -> None:
    assert explained(problem(a=1.0), PartitionDraft(800, {"a": 1.0})) == {"a": ("headroom", "60 %: is enough")}


def test_explain_of_a_shared_partition_names_the_limiting_model() -> None:
    given = problem(a=1.0, b=1.0)
    models = (Model(name="a", slo=0.04), Model(name="b", slo=5.0))
    given = msgspec.structs.replace(given, models=models)
    # A round of single requests takes 25 ms on two fifths, and 50 ms on one.
    assert explained(given, PartitionDraft(400, {"a": 1.0, "b": 1.0})) == {
        "a": ("target", "20 %: too slow"),
        "b": ("other", "shares with a"),
    }


def test_explain_where_the_smaller_instance_has_too_little_has_bottleneck_memory() -> None:
    kind = Kind(name="k", cuts=(250, 500, 1000), geometry="mig-a30-24gb", memory=24 << 30)
    given = msgspec.structs.replace(
        problem(a=1.0),
        fleet=(kind,),
        profiles={("a", "k"): linear("a", "k", 0.002, 0.003, (250, 500, 1000), memory=8 << 30)},
    )
    assert explained(given, PartitionDraft(500, {"a": 1.0})) == {"a": ("memory", "25 %: too little memory for 8 GiB")}


def test_explain_gives_used_fractions_of_target_rate_and_memory() -> None:
    given = problem(memory=40 * MIB, a=100.0)
    plan = build_plan(given, "hand", [DeviceDraft(given.fleet[0], [PartitionDraft(600, {"a": 100.0})])])
    (it,) = explain(plan, given).placements
    ((_, _, placement),) = plan.placements()
    assert it.partition == "k-0/0"
    assert it.target_used == pytest.approx(2 * placement.latency / 0.2)
    assert it.rate_used == pytest.approx(100 * placement.latency / placement.batch)
    assert it.memory_used == pytest.approx(0.25)


def test_explain_of_identical_devices_has_one_row() -> None:
    given = problem(a=100.0)
    plan = build_plan(
        given, "hand", [DeviceDraft(given.fleet[0], [PartitionDraft(600, {"a": 10.0})]) for _ in range(10)]
    )
    (it,) = explain(plan, given).placements
    assert (it.partition, it.count) == ("10 x k/0", 10)


def missing(given: Problem, planner: str = "elastic") -> Explanation:
    return explain(load_planner(planner)(given), given)


def test_explain_of_a_too_short_target_names_the_shortest_feasible_one() -> None:
    (it,) = missing(problem(0.009, a=1.0)).unserved
    assert (it.cause, it.rate) == ("time", 1.0)
    assert it.nearest == pytest.approx(0.01)
    assert "a single request takes 5 ms on 100 % of k" in it.why
    assert "the shortest feasible target is 10 ms, not 9 ms" in it.why
    assert it.nearest is not None
    assert not missing(problem(it.nearest, a=1.0)).unserved


def test_explain_of_the_largest_rate_names_only_models_that_keep_it_at_0() -> None:
    given = msgspec.structs.replace(problem(count=1, a=1.0, b=1.0), objective="rate")
    given = msgspec.structs.replace(given, models=(Model(name="a", slo=0.009), Model(name="b", slo=1.0)))
    plan = plan_problem(given, "elastic", validate=False)
    assert plan.scale == 0
    assert [(it.model, it.cause) for it in explain(plan, given).unserved] == [("a", "time")]
    less = msgspec.structs.replace(problem(count=1, a=1000.0), objective="rate")
    assert explain(plan_problem(less, "elastic", validate=False), less).unserved == ()


def test_explain_without_capacity_says_what_a_device_sustains() -> None:
    (it,) = missing(problem(count=1, a=1000.0)).unserved
    assert it.cause == "capacity"
    assert it.why == (
        "no capacity is left: a whole k sustains 320 requests/s of it within its target, and 1 of 1 are in use"
    )


def test_explain_of_a_worker_larger_than_memory_has_cause_memory() -> None:
    (it,) = missing(problem(memory=5 * MIB, a=1.0)).unserved
    assert (it.cause, it.why) == ("memory", "a worker needs 10 MiB, a device has 5 MiB")
    (it,) = missing(problem(count=1, memory=15 * MIB, a=100.0, b=1.0)).unserved
    assert it.cause == "memory"
    assert "of k-0 are free, but 10 MiB of 15 MiB of memory are in use, and a worker needs 10 MiB" in it.why


def test_explain_of_a_model_without_profile_has_cause_unknown() -> None:
    given = msgspec.structs.replace(problem(a=1.0), profiles={})
    (it,) = missing(given).unserved
    assert it.cause == "unknown"


def test_probes_relax_what_may_help() -> None:
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


def test_gain_is_in_the_terms_of_the_objective() -> None:
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
    assert gain("x", short, plan).buys == f"everything is served, on {plan.devices_used} devices"
    assert gain("x", short, msgspec.structs.replace(plan, unserved={"a": 10.0})).buys == (
        "10 requests/s unserved instead of 20"
    )
    dear = msgspec.structs.replace(plan, cost_per_hour=4.5)
    assert gain("x", dear, msgspec.structs.replace(plan, cost_per_hour=4.0)).buys == "4.00 per hour instead of 4.50"


def test_gain_of_one_device_in_many_counts() -> None:
    cuts = tuple(Device(id=DeviceId("k", n), partitions=()) for n in range(400))
    many = Plan(planner="hand", objective="devices", devices=cuts)
    less = msgspec.structs.replace(many, devices=many.devices[1:], bound=398)
    assert gain("x", many, less).buys == "399 devices instead of 400"
    as_many = msgspec.structs.replace(many, bound=399)
    assert gain("x", many, as_many).buys == "nothing found; not proven"


def test_gain_of_nothing_says_whether_that_is_proven() -> None:
    one = Plan(planner="p", objective="rate", scale=2.0)
    assert gain("x", one, msgspec.structs.replace(one, bound=2.001)).buys == "nothing: even then no plan serves more"
    assert gain("x", one, msgspec.structs.replace(one, bound=2.1)).buys == "nothing found; not proven"
    plan = plan_problem(problem(a=1000.0), "geometry", validate=False)
    known = msgspec.structs.replace(plan, bound=float(plan.devices_used))
    assert gain("x", plan, known).buys == (f"nothing: even then no plan needs less than {plan.devices_used} devices")
    split = msgspec.structs.replace(plan, split={"app": {"a": 0.2}})
    assert gain("x", split, known).buys == "nothing found; not proven", "another split may need less"
    loose = msgspec.structs.replace(plan, bound=plan.devices_used - 1.0)
    assert gain("x", plan, loose).buys == "nothing found; not proven"
    dear = msgspec.structs.replace(plan, cost_per_hour=4.5, bound=4.5)
    assert gain("x", dear, dear).buys == "nothing: even then no plan needs less than 4.50 per hour"


def test_explain_of_unserved_counts_every_profiled_number_of_workers() -> None:
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
    assert "sustains 640 requests/s" in both.why
    only = [point for point in points if point.procs == 2]
    given = msgspec.structs.replace(given, profiles={("a", "k"): Profile("a", "k", only)})
    (two,) = missing(given).unserved
    assert two.cause == "capacity"


@given(problems())
@settings(max_examples=40, deadline=None)
def test_explain_covers_every_placement_and_unserved_model(any_problem: Problem) -> None:
    plan = load_planner("elastic")(any_problem)
    found = explain(plan, any_problem)
    assert sum(it.count for it in found.placements) == len(list(plan.placements()))
    assert {it.model for it in found.unserved} == set(plan.unserved)
    for it in found.placements:
        assert it.target_used <= 1 + 1e-6 and it.rate_used <= 1 + 1e-6
        assert it.why
    for lack in found.unserved:
        assert (lack.nearest is not None) == (lack.cause == "time")
