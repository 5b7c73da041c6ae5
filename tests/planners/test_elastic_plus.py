from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem, elastic_plus, load_planner
from cotenant.planners.capacity import PartitionDraft, fits_device
from cotenant.planners.check import check
from cotenant.planners.elastic_plus import plan
from tests.planners.bent import CUTS, bent, shares
from tests.planners.problems import EVERY_5, MIB, ProportionalInterference, embedded, linear, profile


def test_of_high_rate_uses_shares_at_the_knee() -> None:
    """gpulet paper, section 4.3: p_ideal = min(p_eff, p_req). Here p_eff is the knee, 40 %: 50 requests/s."""
    made = plan(bent({"a": 100.0}))
    assert shares(made) == [[400, 400]]
    assert [p.rate for _, _, p in made.placements()] == [pytest.approx(50.0)] * 2


def test_of_low_rate_uses_smaller_share() -> None:
    assert shares(plan(bent({"a": 20.0}))) == [[200]]


def test_of_compatible_models_time_shares_a_partition() -> None:
    made = plan(bent({"a": 10.0, "b": 10.0}, slo=0.120))
    assert [len(cut.placements) for device in made.devices for cut in device.partitions] == [2]


def test_with_two_partitions_gives_the_second_the_rest() -> None:
    made = plan(bent({"a": 45.0, "b": 46.0, "c": 47.0}, max_partitions=2))
    assert shares(made) == [[400, 600], [400]]
    assert check(made, bent({"a": 45.0, "b": 46.0, "c": 47.0}, max_partitions=2)) == []


def test_without_limit_partitions_the_whole_device() -> None:
    made = plan(bent(dict.fromkeys("abcde", 24.0), count=1))
    assert made.unserved == {}
    assert sum(shares(made)[0]) <= 1000


def test_without_large_enough_piece_uses_a_smaller_one() -> None:
    problem = bent({"a": 45.0, "b": 46.0, "c": 47.0}, count=1)
    made = plan(problem)
    assert check(made, problem) == []
    assert shares(made) == [[400, 400, 200]]
    ((lost, amount),) = made.unserved.items()
    assert 0 < amount < problem.rates[lost]


def test_of_two_kinds_fills_the_cheaper_first() -> None:
    problem = bent({"a": 200.0})
    dear, cheap = (Kind(name=name, cuts=CUTS, count=1, price=price) for name, price in (("dear", 3.0), ("cheap", 1.0)))
    profiles = {("a", kind): problem.profiles["a", "k"] for kind in ("dear", "cheap")}
    problem = msgspec.structs.replace(problem, fleet=(dear, cheap), profiles=profiles)
    assert [device.kind for device in plan(problem).devices] == ["cheap", "dear"]
    assert plan(problem).cost_per_hour == 4.0
    assert [d.kind for d in plan(msgspec.structs.replace(problem, rates={"a": 40.0})).devices] == ["cheap"]


def test_under_interference_plans_with_slowdowns() -> None:
    """Without interference two models share a device; under strong interference each gets its own."""
    apart = bent({"a": 50.0, "b": 50.0})
    together = plan(apart)
    assert len(together.devices) == 1
    crowded = msgspec.structs.replace(apart, interference=ProportionalInterference(2.0))
    assert check(together, crowded) != []
    assert check(plan(crowded), crowded) == []
    assert len(plan(crowded).devices) > 1


def test_of_unservable_model_leaves_it_unserved() -> None:
    problem = bent({"a": 10.0, "b": 10.0})
    models = (Model(name="a", slo=0.030), problem.models[1])
    made = plan(msgspec.structs.replace(problem, models=models))
    assert made.unserved == {"a": 10.0}
    assert made.rate("b") == 10.0


def test_on_cpu_shares_serves_more_than_squishy() -> None:
    """Seven models with targets from 50 ms to 1 s on one CPU."""
    problem = embedded(1.0)
    assert plan(problem).unserved == {}
    assert load_planner("squishy")(problem).unserved != {}


def test_of_model_profiled_on_one_kind_uses_that_kind() -> None:
    problem = Problem(
        models=(Model(name="a", slo=1.0),),
        rates={"a": 5.0},
        fleet=(Kind(name="k"), Kind(name="l")),
        profiles={("a", "l"): linear("a", "l", 0.01, 0.01)},
    )
    assert [device.kind for device in plan(problem).devices] == ["l"]


def test_with_oversized_last_piece_uses_it_fully() -> None:
    """gpulet paper, Algorithm 1, line 20: the batch, and so the rate, is the largest for the size of the piece found.

    The knee is 40 %, where it carries 100 requests/s; beside the first partition 60 % are left, which carry 130.
    """
    latency = {200: 0.050, 400: 0.010, 500: 0.009, 600: 1 / 130, 800: 0.0072, 1000: 0.007}
    problem = Problem(
        models=(Model(name="a", slo=0.1),),
        rates={"a": 225.0},
        fleet=(Kind(name="k", cuts=CUTS, count=1, max_partitions=2),),
        profiles={("a", "k"): profile("a", "k", {(cut, 1): seconds for cut, seconds in latency.items()})},
    )
    made = plan(problem)
    assert [p.rate for _, _, p in made.placements()] == pytest.approx([100.0, 125.0])
    assert made.unserved == {}


def test_with_unserved_model_retries_with_it_first() -> None:
    """By rate times target `a` comes first and takes a piece of the only device; `b` needs all of it."""
    problem = Problem(
        models=(Model(name="a", slo=0.1), Model(name="b", slo=0.1)),
        rates={"a": 20.0, "b": 60.0},
        fleet=(Kind(name="k", cuts=(500, 1000)),),
        profiles={
            ("a", "k"): profile("a", "k", {(500, 1): 0.045, (1000, 1): 0.045}),
            ("b", "k"): profile("b", "k", {(500, 1): 0.060, (1000, 1): 0.015}),
        },
    )
    made = plan(problem)
    assert made.rate("b") == 60.0
    assert check(made, problem) == []


def test_merge_prefers_partition_that_need_not_grow() -> None:
    """`b` could join `a` on 50 instead of 40 % of the first device; the rest of `c` on the second has room as it is."""
    problem = Problem(
        models=(Model(name="a", slo=0.1), Model(name="b", slo=0.4), Model(name="c", slo=0.05)),
        rates={"a": 10.0, "b": 25.0, "c": 65.0},
        fleet=(Kind(name="k", cuts=CUTS, count=4),),
        profiles={
            (name, "k"): profile(name, "k", {(cut, 1): seconds * 1000 / cut for cut in CUTS})
            for name, seconds in (("a", 0.016), ("b", 0.004), ("c", 0.008))
        },
    )
    made = plan(problem)
    assert [[[p.model for p in cut.placements] for cut in device.partitions] for device in made.devices] == [
        [["a"], ["c"]],
        [["c", "b"]],
    ]
    assert shares(made) == [[400, 500], [400]]


def test_devices_without_memory_for_one_more_worker_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has the memory for two workers, and time for many: of ten models each finds at most one with room."""
    models = [f"m{i}" for i in range(10)]
    problem = Problem(
        models=tuple(Model(name=name, slo=1.0) for name in models),
        rates=dict.fromkeys(models, 1.0),
        profiles={(name, "k"): linear(name, "k", 0.001, 0.001, memory=40 * MIB) for name in models},
        fleet=(Kind(name="k", cuts=EVERY_5, count=5, memory=100 * MIB),),
        objective="devices",
    )
    tried: list[int] = []

    def fits(problem: Problem, kind: Kind, cuts: Sequence[PartitionDraft]) -> bool:
        tried.append(len(cuts))
        return fits_device(problem, kind, cuts)

    monkeypatch.setattr(elastic_plus, "fits_device", fits)
    made = plan(problem)
    assert check(made, problem) == [] and not made.unserved
    assert all(len(list(device.partitions)) <= 2 for device in made.devices)
    assert len(tried) < 100
