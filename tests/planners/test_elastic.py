"""Algorithm 1 of the gpulet paper, rule by rule."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners.check import check
from cotenant.planners.elastic import plan
from tests.planners.bent import CUTS, bent, shares
from tests.planners.problems import ProportionalInterference, profile


def placed(made: Plan) -> list[list[list[str]]]:
    return [[[p.model for p in cut.placements] for cut in device.partitions] for device in made.devices]


def test_share_is_the_one_at_the_knee_for_a_high_rate() -> None:
    """Lines 6 to 8: p_ideal = min(p_eff, p_req). Here p_eff is 40 %, which serves 50 requests/s."""
    made = plan(bent({"a": 100.0}))
    assert shares(made) == [[400, 400]]
    assert [p.rate for _, _, p in made.placements()] == [pytest.approx(50.0)] * 2


def test_share_is_the_smallest_that_serves_a_low_rate() -> None:
    assert shares(plan(bent({"a": 20.0}))) == [[200]]


def test_models_come_in_ascending_order_of_rate_times_slo() -> None:
    """Line 2: the last one finds nothing left on the only device."""
    problem = bent({"a": 46.0, "b": 47.0, "c": 45.0}, count=1)
    made = plan(problem)
    assert placed(made) == [[["c"], ["a"]]]
    assert made.unserved == {"b": 47.0}
    slower = (Model(name="a", slo=0.090), Model(name="b", slo=0.090), Model(name="c", slo=0.093))
    assert set(plan(msgspec.structs.replace(problem, models=slower)).unserved) == {"b"}
    slower = (Model(name="a", slo=0.090), Model(name="b", slo=0.090), Model(name="c", slo=0.095))
    assert set(plan(msgspec.structs.replace(problem, models=slower)).unserved) == {"c"}


def test_no_piece_smaller_than_the_ideal_share_is_taken() -> None:
    """Line 16: of the device 20 % remain, which would serve half of c."""
    problem = bent({"a": 45.0, "b": 46.0, "c": 47.0}, count=1)
    made = plan(problem)
    assert shares(made) == [[400, 400]]
    assert made.unserved == {"c": 47.0}
    assert check(made, problem) == []


def test_smallest_piece_that_is_large_enough_is_taken() -> None:
    """Lines 14 to 16: c fits into what a leaves of the first device, and into a whole one."""
    made = plan(bent({"a": 40.0, "b": 41.0, "c": 24.0, "d": 42.0}, count=None))
    assert sum(map(sum, shares(made))) <= 2000
    assert made.devices_used == 2


def test_piece_that_may_not_be_split_is_taken_whole() -> None:
    """Line 17: with two partitions for each device, the second is what the first leaves."""
    problem = bent({"a": 45.0, "b": 46.0, "c": 47.0}, max_partitions=2)
    made = plan(problem)
    assert shares(made) == [[400, 600], [400]]
    assert check(made, problem) == []


def test_device_that_may_not_be_cut_is_taken_whole() -> None:
    made = plan(bent({"a": 100.0}, max_partitions=1))
    assert shares(made) == [[1000], [1000]]


def test_new_partition_is_merged_with_one_that_is_there() -> None:
    """Line 22; each takes 20 % for itself."""
    made = plan(bent({"a": 10.0, "b": 10.0}, slo=0.120))
    assert placed(made) == [[["a", "b"]]]
    assert shares(made) == [[200]]


def test_merged_partitions_have_the_larger_of_both_shares_and_the_smaller_is_free_again() -> None:
    """Section 4.3: "the larger size will be chosen". a takes 20 % first, then b 40 %, which holds both."""
    problem = bent({"a": 4.0, "b": 26.0}, slo=0.125)
    quick = profile("a", "k", {(cut, 1): 0.005 for cut in CUTS})
    problem = msgspec.structs.replace(problem, profiles={**problem.profiles, ("a", "k"): quick})
    for name, share in (("a", 200), ("b", 400)):
        assert shares(plan(msgspec.structs.replace(problem, rates={name: problem.rates[name]}))) == [[share]]
    made = plan(problem)
    assert placed(made) == [[["a", "b"]]]
    assert shares(made) == [[400]]


def test_smaller_partition_moves_to_the_larger_one_and_is_free_again() -> None:
    """a and c fill a device, b comes to another, where a fits in with it."""
    problem = bent({"a": 4.0, "b": 26.0, "c": 41.0}, slo=0.125)
    profiles = {
        **problem.profiles,
        ("a", "k"): profile("a", "k", {(cut, 1): 0.005 for cut in CUTS}),
        ("c", "k"): profile("c", "k", {(cut, 1): 0.020 * max(1.0, 800 / cut) for cut in CUTS}),
    }
    models = (*problem.models[:2], Model(name="c", slo=0.060))
    problem = msgspec.structs.replace(problem, profiles=profiles, models=models)
    first = plan(msgspec.structs.replace(problem, rates=problem.rates | {"b": 0.0}))
    assert (placed(first), shares(first)) == ([[["a"], ["c"]]], [[200, 800]])
    made = plan(problem)
    assert (placed(made), shares(made)) == ([[["c"]], [["a", "b"]]], [[800], [400]])


def test_model_without_a_remaining_piece_is_not_merged() -> None:
    """Line 4 ends where no gpulet remains, and line 22 needs a new one: b would fit beside a in time."""
    problem = bent({"a": 10.0, "b": 11.0}, slo=0.120, cuts=(1000,), count=1)
    assert plan(problem).unserved == {"b": 11.0}
    assert (
        plan(msgspec.structs.replace(problem, fleet=(msgspec.structs.replace(problem.fleet[0], count=2),))).devices_used
        == 1
    )


def test_interference_is_in_the_batch_and_neighbours_keep_their_targets() -> None:
    """Line 20. Without interference two models share a device; under a strong one each gets its own."""
    apart = bent({"a": 50.0, "b": 50.0})
    assert plan(apart).devices_used == 1
    strong = msgspec.structs.replace(apart, interference=ProportionalInterference(4.0))
    made = plan(strong)
    assert made.devices_used == 2 and made.unserved == {}
    assert check(made, strong) == []


def test_neighbour_of_a_later_partition_loses_rate_that_is_placed_again() -> None:
    """Two partitions at the most that 40 % serve alone; side by side each sustains less, and a third gets the rest."""
    weak = msgspec.structs.replace(bent({"a": 49.0, "b": 49.5}), interference=ProportionalInterference(0.2))
    made = plan(weak)
    assert made.unserved == {}
    assert check(made, weak) == []
    assert made.rate("a") == pytest.approx(49.0) and made.rate("b") == pytest.approx(49.5)
    first = made.devices[0].partitions
    assert len(first) == 2 and first[0].placements[0].rate < 49.0
    assert sum(len(device.partitions) for device in made.devices) > 2


def test_cheaper_kind_is_tried_first() -> None:
    problem = bent({"a": 200.0})
    dear, cheap = (Kind(name=name, cuts=CUTS, count=1, price=price) for name, price in (("dear", 3.0), ("cheap", 1.0)))
    profiles = {("a", kind): problem.profiles["a", "k"] for kind in ("dear", "cheap")}
    problem = msgspec.structs.replace(problem, fleet=(dear, cheap), profiles=profiles)
    assert [device.kind for device in plan(problem).devices] == ["cheap", "dear"]
    assert [d.kind for d in plan(msgspec.structs.replace(problem, rates={"a": 40.0})).devices] == ["cheap"]


def test_model_that_no_share_serves_is_left_unserved() -> None:
    made = plan(bent({"a": 10.0, "b": 10.0}, slo=0.030))
    assert made.unserved == {"a": 10.0, "b": 10.0}
    assert made.devices == ()
