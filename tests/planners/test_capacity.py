from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Partition
from cotenant.core.profile import Profile
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    PartitionDraft,
    RoundShare,
    batched_partitions,
    headroom_batches,
    knee_share,
    largest_slowdown,
    latency_curve,
    max_scale_batches,
    max_throughput_batch,
    smallest_batches,
)
from cotenant.predictors import Load
from tests.planners.problems import MIB, ProportionalInterference, linear, profile

works = st.builds(
    lambda fixed, steps, rate, slo: RoundShare(tuple(itertools.accumulate(steps, initial=fixed)), rate, slo),
    st.floats(0.001, 0.05),
    st.lists(st.floats(0.0, 0.02), max_size=4),
    st.sampled_from((0.0,)) | st.floats(0.1, 200.0),
    st.floats(0.01, 1.0),
)


def holds(works: list[RoundShare], batches: tuple[int, ...], slack: float = 1e-9) -> bool:
    length = sum(work.curve[b - 1] for work, b in zip(works, batches, strict=True))
    return all(
        b >= work.rate * length * (1 - slack) and length + work.curve[b - 1] <= work.slo * (1 + slack)
        for work, b in zip(works, batches, strict=True)
    )


def every_choice(works: list[RoundShare]) -> list[tuple[int, ...]]:
    return [b for b in itertools.product(*(range(1, len(w.curve) + 1) for w in works)) if holds(works, b)]


@given(st.lists(works, min_size=1, max_size=3))
def test_smallest_batches_of_any_rates_are_below_every_feasible_choice(works: list[RoundShare]) -> None:
    choices = every_choice(works)
    least = smallest_batches(works)
    if least is None:
        assert not any(holds(works, choice, slack=-1e-9) for choice in choices)
    else:
        assert holds(works, least)
        assert all(a <= b for choice in choices for a, b in zip(least, choice, strict=True))


@given(st.lists(works, min_size=1, max_size=3))
def test_max_scale_batches_of_any_rates_reach_the_largest_multiple(works: list[RoundShare]) -> None:
    def multiple(batches: tuple[int, ...]) -> float:
        length = sum(work.curve[b - 1] for work, b in zip(works, batches, strict=True))
        return min((b / work.rate / length for work, b in zip(works, batches, strict=True) if work.rate), default=1.0)

    fullest = max_scale_batches(works)
    assert (fullest is None) == (smallest_batches(works) is None)
    if fullest is not None:
        assert holds(works, fullest)
        assert multiple(fullest) >= max(map(multiple, every_choice(works))) * (1 - 1e-6)


@given(st.lists(works, min_size=1, max_size=3))
def test_headroom_batches_of_any_rates_meet_every_target(works: list[RoundShare]) -> None:
    fullest, roomiest = max_scale_batches(works), headroom_batches(works)
    assert (fullest is None) == (roomiest is None)
    if fullest is not None and roomiest is not None:
        assert holds(works, roomiest)
        assert all(a <= b for a, b in zip(fullest, roomiest, strict=True))


def test_headroom_batches_of_a_fast_model_beside_a_slow_one_are_larger() -> None:
    slow = RoundShare((0.040,), rate=10.0, slo=1.0)
    quick = RoundShare(tuple(0.001 + 0.0001 * n for n in range(32)), rate=100.0, slo=0.1)
    assert max_scale_batches([slow, quick]) == (1, 10)  # the slow one limits the multiple, at 2.4
    assert headroom_batches([slow, quick]) == (1, 13)  # three times what comes in a round of 42 ms


@given(works)
def test_largest_slowdown_of_any_model_is_where_smallest_batches_end(work: RoundShare) -> None:
    most = largest_slowdown(work.curve, work.rate, work.slo)

    def keeps_up(factor: float) -> bool:
        slowed = [factor * latency for latency in work.curve]
        return smallest_batches([RoundShare(slowed, work.rate, work.slo)]) is not None

    assert keeps_up(most * (1 - 1e-6)) and not keeps_up(most * (1 + 1e-6))


def test_largest_slowdown_of_a_model_without_a_profile_is_none() -> None:
    assert largest_slowdown((), 1.0, 1.0) == 0


def test_max_throughput_batch_in_isolation_takes_half_the_target() -> None:
    assert max_throughput_batch((0.010, 0.014, 0.020, 0.030), slo=0.041) == (3, 150.0)
    assert max_throughput_batch((0.010, 0.014, 0.020, 0.030), slo=0.040) == (3, 150.0)
    assert max_throughput_batch((0.010,), slo=0.019) == (0, 0.0)
    assert max_throughput_batch((math.inf,), slo=1.0) == (0, 0.0)
    assert max_throughput_batch((), slo=1.0) == (0, 0.0)


def test_max_throughput_batch_larger_but_slower_is_not_taken() -> None:
    assert max_throughput_batch((0.010, 0.030), slo=1.0) == (1, 100.0)


def test_knee_share_is_the_end_of_the_steepest_step() -> None:
    assert knee_share({200: 50.0, 400: 120.0, 600: 150.0, 1000: 160.0}) == 400
    assert knee_share({200: 50.0, 400: 60.0, 1000: 200.0}) == 1000
    assert knee_share({200: 50.0, 400: 52.0, 1000: 53.0}) == 200
    assert knee_share({400: 50.0}) == 400


def small(memory: int = 1 << 40, *, crowding: float = 0.0) -> Problem:
    return Problem(
        models=(Model(name="a", slo=0.2, max_batch=8), Model(name="b", slo=0.5)),
        rates={"a": 10.0, "b": 5.0},
        fleet=(Kind(name="k", cuts=(200, 400, 600, 1000), memory=memory),),
        profiles={(name, "k"): linear(name, "k", 0.001, 0.002, cuts=(200, 600, 1000)) for name in "ab"},
        interference=ProportionalInterference(crowding),
    )


def test_latency_curve_ends_at_the_largest_batch_of_the_model() -> None:
    assert len(latency_curve(small(), "a", "k", 600)) == 8
    assert len(latency_curve(small(), "b", "k", 600)) == 16
    assert latency_curve(small(), "a", "other", 600) == ()


def test_batched_partitions_have_latency_and_duty_of_their_round() -> None:
    problem = small()
    (partition,) = batched_partitions(problem, problem.fleet[0], [PartitionDraft(600, {"a": 10.0, "b": 5.0})]) or ()
    a, b = partition.placements
    assert (a.batch, b.batch) == (1, 1)
    assert (a.latency, a.duty) == pytest.approx((0.005, 0.010))


def test_batched_partitions_beyond_memory_returns_none() -> None:
    problem = small(2 * MIB)
    kind = problem.fleet[0]
    assert (
        batched_partitions(problem, kind, [PartitionDraft(200, {"a": 1.0}), PartitionDraft(200, {"b": 1.0})])
        is not None
    )
    assert (
        batched_partitions(problem, kind, [PartitionDraft(200, {"a": 1.0, "b": 1.0}), PartitionDraft(200, {"b": 1.0})])
        is None
    )


def test_batched_partitions_slowdowns_depend_on_the_batches() -> None:
    problem = small(crowding=1.0)
    kind = problem.fleet[0]
    made = batched_partitions(problem, kind, [PartitionDraft(200, {"a": 10.0}), PartitionDraft(600, {"b": 5.0})])
    assert made is not None

    def slow(victim: Partition, neighbour: Partition) -> float:
        alone = problem.profiles[victim.placements[0].model, "k"].latency(victim.placements[0].batch, victim.share)
        expected = 1 + neighbour.share / 1000 * (1 + neighbour.placements[0].batch / 32)
        assert victim.placements[0].latency == pytest.approx(alone * expected)
        return expected

    assert slow(made[0], made[1]) > slow(made[1], made[0]) > 1


def test_batched_partitions_several_workers_need_memory_each() -> None:
    """Each has 1 MiB: two of `a` and one of `b`."""
    problem = small()
    points = [msgspec.structs.replace(point, procs=2) for point in problem.profiles["a", "k"].points]
    problem = msgspec.structs.replace(problem, profiles={**problem.profiles, ("a", "k"): Profile("a", "k", points)})
    cuts = [PartitionDraft(600, {"a": 10.0}, {"a": 2}), PartitionDraft(400, {"b": 5.0})]
    for memory, fits in ((2 * MIB, False), (3 * MIB, True)):
        kind = msgspec.structs.replace(problem.fleet[0], memory=memory)
        assert (batched_partitions(problem, kind, cuts) is not None) is fits


class SelfishInterference(msgspec.Struct, frozen=True):
    """`a` is slowed where it runs single rows, `b` where `a` does not."""

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        if victim.model == "a":
            return 1.5 if victim.batch == 1 else 1.1
        return 1.3 if colocated[0].batch > 1 else 1.0


def test_batched_partitions_oscillating_slowdowns_end_at_the_worst() -> None:
    """With slowdowns as they were last, `a` would run single rows and two in turn, for ever."""
    latency = {(share, batch): 0.009 + 0.001 * batch for share in (400, 600) for batch in (1, 2, 4)}
    problem = Problem(
        models=(Model(name="a", slo=1.0), Model(name="b", slo=1.0)),
        rates={"a": 80.0, "b": 80.0},
        fleet=(Kind(name="k", count=1),),
        profiles={(name, "k"): profile(name, "k", latency) for name in "ab"},
        interference=SelfishInterference(),
    )
    made = batched_partitions(
        problem, problem.fleet[0], [PartitionDraft(600, {"a": 80.0}), PartitionDraft(400, {"b": 80.0})]
    )
    assert made is not None
    assert [partition.placements[0].batch for partition in made] == [2, 2]
    assert [partition.placements[0].latency for partition in made] == pytest.approx([1.1 * 0.011, 1.3 * 0.011])
