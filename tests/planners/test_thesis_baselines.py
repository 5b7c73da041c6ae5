"""The NTUA thesis' Min, Max and round robin (section 9.2)."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.planners import maximum, minimum, roundrobin
from cotenant.planners.check import check
from tests.planners.test_score import A30, V100, problem


def cuts(plan: Plan) -> list[list[tuple[int, list[str]]]]:
    return [[(cut.share, [p.model for p in cut.placements]) for cut in device.partitions] for device in plan.devices]


def test_min_gives_each_workload_the_smallest_mig_instance() -> None:
    made = minimum.plan(problem(dict.fromkeys("abcde", 100.0), msgspec.structs.replace(A30, count=None)))
    assert cuts(made) == [[(250, [name]) for name in "abcd"], [(250, ["e"])]]


def test_min_without_mig_leaves_the_rest_of_a_device_idle() -> None:
    """The device plugin gives out whole GPUs; MPS limits the workload to a quarter."""
    made = minimum.plan(problem({"a": 100.0, "b": 100.0}, msgspec.structs.replace(V100, count=None)))
    assert cuts(made) == [[(250, ["a"])], [(250, ["b"])]]


def test_min_splits_what_one_instance_cannot_serve() -> None:
    """Four quarters of the A30 serve 557 queries/s, which is more than it serves as a whole."""
    made = minimum.plan(problem({"a": 500.0}, A30))
    assert cuts(made) == [[(250, ["a"])] * 4]
    assert made.rate("a") == pytest.approx(500.0)
    assert minimum.plan(problem({"a": 1000.0}, A30)).unserved == {"a": pytest.approx(500.0)}


def test_max_gives_each_workload_a_whole_device() -> None:
    made = maximum.plan(problem({"a": 10.0, "b": 400.0}, msgspec.structs.replace(V100, count=None)))
    assert cuts(made) == [[(1000, ["a"])], [(1000, ["b"])], [(1000, ["b"])]]
    assert maximum.plan(problem({"a": 10.0, "b": 400.0}, V100)).unserved == {"b": 400.0}


def test_max_plans_any_number_of_devices() -> None:
    many = problem({"a": 1e7}, msgspec.structs.replace(V100, count=None))
    made = maximum.plan(many)
    assert made.devices_used > 10_000 and made.unserved == {} and check(made, many) == []
    assert len({device.id for device in made.devices}) == made.devices_used
    limited = msgspec.structs.replace(many, fleet=(msgspec.structs.replace(V100, count=12_000),))
    assert maximum.plan(limited).devices_used == 12_000


def test_max_refuses_more_devices_than_a_plan_may_have() -> None:
    endless = problem({"a": 1e9}, msgspec.structs.replace(V100, count=None))
    with pytest.raises(PlanError, match=r"^model 'a': its rate takes \d+ devices, more than the 100000 that a plan of"):
        maximum.plan(endless)


def test_roundrobin_takes_chunks_in_turn_and_shares_them() -> None:
    """Five workloads on the four quarters of one A30: the fifth goes to the first again, whatever is there."""
    made = roundrobin.plan(problem(dict.fromkeys("abcde", 50.0), A30))
    assert cuts(made) == [[(250, ["a", "e"]), (250, ["b"]), (250, ["c"]), (250, ["d"])]]


def test_roundrobin_passes_over_a_chunk_that_would_miss_a_target() -> None:
    asked = problem({"a": 130.0, "b": 20.0, "c": 130.0, "d": 130.0, "e": 20.0}, A30)
    assert cuts(roundrobin.plan(asked)) == [[(250, ["a"]), (250, ["b", "e"]), (250, ["c"]), (250, ["d"])]]


def test_roundrobin_spreads_over_the_devices_of_the_smallest_cluster() -> None:
    made = roundrobin.plan(problem(dict.fromkeys("abcdef", 130.0), msgspec.structs.replace(A30, count=None)))
    assert [len(device) for device in cuts(made)] == [4, 2]
    assert made.unserved == {}
