from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.planners import Problem
from cotenant.planners.capacity import DeviceDraft
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


def test_hetsev_gives_a_model_more_than_half_where_its_target_needs_it() -> None:
    asked = problem({"a": 10.0}, gpu(), seconds=0.6)
    assert [cut.share for device in plan(asked).devices for cut in device.partitions] == [1000] * 3


def test_hetsev_reports_what_no_device_takes() -> None:
    assert plan(problem({"a": 190.0}, gpu(count=1))).unserved == {"a": pytest.approx(90.0)}
