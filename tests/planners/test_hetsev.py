from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft
from cotenant.planners.check import check
from cotenant.planners.hetsev import Pending, pick_fairly, plan, queue_by_similarity, schedule
from tests.planners.problems import profile

HALVES = (500, 1000)
GIB = 1 << 30


def problem(rates: dict[str, float], *fleet: Kind, seconds: float = 0.01, memory: int = GIB) -> Problem:
    """Models that serve 1 / seconds requests/s on half of a device, and twice that on all of it."""

    def measured(name: str, kind: str) -> Profile:
        return profile(name, kind, {(500, 1): seconds, (1000, 1): seconds / 2}, memory)

    return Problem(
        models=tuple(Model(name=name, slo=1.0) for name in rates),
        rates=rates,
        fleet=fleet,
        profiles={(name, kind.name): measured(name, kind.name) for name in rates for kind in fleet},
    )


def gpu(**fields: object) -> Kind:
    return msgspec.structs.replace(Kind(name="gpu", cuts=HALVES, count=None), **fields)


DEAR = Kind(name="dear", cuts=HALVES, count=10, price=3.0)


def placed(plan: Plan) -> list[list[str]]:
    return [[p.model for cut in device.partitions for p in cut.placements] for device in plan.devices]


def pending(model: str, memory: int = 1, share: int = 500) -> Pending:
    return Pending(model, share, memory, 1.0)


def test_kmeans_puts_like_instances_into_a_queue() -> None:
    """L1 in memory, relative to the most, and model: `b`, which needs as much as `a`, is as far from it as `c`, which
    needs nothing."""
    instances = [pending("a", 10), pending("b", 10), pending("a", 9), pending("c", 0), pending("a", 10)]
    assert queue_by_similarity(instances, 3) == [
        [instances[0], instances[2], instances[4]],
        [instances[3]],
        [instances[1]],
    ]
    assert [len(queue) for queue in queue_by_similarity(instances, 1)] == [5]
    assert queue_by_similarity([pending("a")] * 3, 3) == [[pending("a")] * 3]
    assert queue_by_similarity([], 3) == []


def test_weighted_fairness_picks_by_length_times_median_waiting() -> None:
    """Six that wait for 1 weigh as much as two that wait for 3; four picks are two of each."""
    long, old = [pending("a", i) for i in range(6)], [pending("b", i) for i in range(2)]
    queues = [list(long), list(old)]
    assert pick_fairly(queues, [[1.0] * 6, [3.0] * 2], 4) == [*long[:2], *old]
    assert queues == [long[2:], []]
    assert pick_fairly(queues, [[1.0] * 4, []], 9) == long[2:]
    # One that came late does not make its queue wait less: two that waited for 1, 3 and 9 weigh 3 each, not 1.
    mixed = [list(long), [*old, pending("b", 2)]]
    assert pick_fairly(mixed, [[1.0] * 6, [1.0, 3.0, 9.0]], 3) == [*old, long[0]]
    starved = [list(long), list(old)]
    assert pick_fairly(starved, [[1.0] * 6, [9.0] * 2], 3) == [*old, long[0]]


def test_hetsev_never_puts_a_model_beside_itself() -> None:
    made = plan(problem({"a": 190.0, "b": 90.0}, gpu()))
    assert placed(made) == [["a", "b"], ["a"]]


def test_worst_fit_prefers_devices_without_any_workload() -> None:
    asked = problem({"a": 90.0, "b": 90.0, "c": 90.0}, gpu(count=2))
    cluster = [DeviceDraft(asked.fleet[0], []) for _ in range(3)]
    assert schedule(asked, [pending(name) for name in "abc"], cluster) == 3
    assert [len(device.cuts) for device in cluster] == [1, 1, 1]
    assert [len(names) for names in placed(plan(asked))] == [2, 1]


def test_hetsev_checks_memory() -> None:
    asked = problem({"a": 90.0, "b": 90.0}, gpu(memory=3 * GIB), memory=2 * GIB)
    assert placed(plan(asked)) == [["a"], ["b"]]


def test_hetsev_chooses_the_kind_that_costs_least_for_the_rate() -> None:
    """Ten requests/s are cheaper on the slow kind, which serves 25 with half a device; 190 are cheaper on the fast."""
    slow, fast = gpu(name="slow", price=1.0), gpu(name="fast", price=3.0)
    for rate, kinds in ((10.0, ["slow"]), (190.0, ["fast", "fast"])):
        asked = problem({"a": rate}, slow, fast)
        profiles = {**asked.profiles, ("a", "slow"): profile("a", "slow", {(500, 1): 0.04, (1000, 1): 0.02}, GIB)}
        made = plan(msgspec.structs.replace(asked, profiles=profiles))
        assert [device.kind for device in made.devices] == kinds
        assert made.unserved == {}


def test_hetsev_takes_the_next_kind_for_what_the_cheapest_lacks_devices_for() -> None:
    made = plan(problem({"a": 290.0}, gpu(name="cheap", price=1.0, count=1), gpu(name="dear", price=2.0)))
    assert [device.kind for device in made.devices] == ["cheap", "dear", "dear"]
    assert made.rate("a") == pytest.approx(290.0)


def test_hetsev_gives_what_finds_no_device_of_the_cheapest_kind_the_next() -> None:
    """Two of six fit on the cheap device; the others get halves of dear ones, and not all of those."""
    made = plan(problem(dict.fromkeys("abcdef", 90.0), gpu(name="cheap", price=1.0, count=1), DEAR))
    assert made.unserved == {}
    assert [device.kind for device in made.devices] == ["cheap", "dear", "dear"]


def test_hetsev_puts_what_a_dear_kind_lacks_devices_for_beside_others_on_a_cheap_one() -> None:
    """`a` takes half of a cheap device; `b` to `d` are cheaper on the dear kind, which has room for two. `d` then gets
    the three instances, each of 1 / 0.06 requests/s, that three cheap devices have room for, one beside `a`."""
    asked = problem(dict.fromkeys("abcd", 90.0), gpu(name="cheap", price=2.0, count=3), DEAR)
    slow = profile("slow", "cheap", {(500, 1): 0.06, (1000, 1): 0.03}, GIB)
    asked = msgspec.structs.replace(
        asked,
        fleet=(asked.fleet[0], msgspec.structs.replace(DEAR, count=1)),
        profiles={**asked.profiles, **{(name, "cheap"): slow for name in "bcd"}},
    )
    made = plan(asked)
    assert made.unserved == {"d": pytest.approx(90.0 - 3 / 0.06)}
    assert placed(made) == [["a", "d"], ["d"], ["d"], ["b", "c"]]
    assert check(made, asked) == []


def test_hetsev_counts_a_free_kind_as_free_and_one_without_price_as_dearest() -> None:
    free, cheap = gpu(name="free", price=0.0), gpu(name="cheap", price=0.5)
    unknown = gpu(name="unknown", price=None)
    assert [device.kind for device in plan(problem({"a": 90.0}, cheap, free)).devices] == ["free"]
    assert [device.kind for device in plan(problem({"a": 90.0}, unknown, DEAR)).devices] == ["dear"]


def test_hetsev_without_prices_takes_the_kind_of_which_least_is_needed() -> None:
    """A kind whose least part is the whole device, against two halves of another."""
    asked = problem({"a": 90.0}, gpu(name="whole", cuts=(1000,)), gpu(name="half"))
    assert [device.kind for device in plan(asked).devices] == ["half"]
    priced = problem({"a": 90.0}, gpu(name="whole", cuts=(1000,), price=1.5), gpu(name="half", price=2.0))
    assert [device.kind for device in plan(priced).devices] == ["half"]


def test_hetsev_takes_the_faster_of_two_kinds_that_cost_alike() -> None:
    asked = problem({"a": 20.0}, gpu(name="slow", price=1.0), gpu(name="fast", price=1.0))
    profiles = {**asked.profiles, ("a", "slow"): profile("a", "slow", {(500, 1): 0.04, (1000, 1): 0.02}, GIB)}
    made = plan(msgspec.structs.replace(asked, profiles=profiles))
    assert [device.kind for device in made.devices] == ["fast"]


def test_hetsev_gives_a_model_more_than_half_where_its_target_needs_it() -> None:
    asked = problem({"a": 10.0}, gpu(), seconds=0.6)
    assert [cut.share for device in plan(asked).devices for cut in device.partitions] == [1000] * 3


def test_hetsev_reports_what_no_device_takes() -> None:
    assert plan(problem({"a": 190.0}, gpu(count=1))).unserved == {"a": pytest.approx(90.0)}
