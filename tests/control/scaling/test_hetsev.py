"""HetSev's integer program against brute force, and its heuristic rule by rule."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cotenant.control.scaling import Observation, ScalingContext
from cotenant.control.scaling.hetsev import (
    GreedyScaling,
    InstanceType,
    LeastCostScaling,
    cheapest_addition,
    instance_capacity,
    least_cost_action,
    most_saving_removal,
)
from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from tests.control.scaling.contexts import context, instances, problem

PRICES = st.integers(1, 20).map(float)
TYPES = st.lists(
    st.builds(
        lambda cost, launch, capacity, running, more: InstanceType(
            kind="", cost=cost, launch=launch, capacity=capacity, running=running, most=float(running + more)
        ),
        PRICES,
        st.integers(0, 60).map(float),
        st.integers(1, 40).map(float),
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=3,
).map(lambda types: [msgspec.structs.replace(each, kind=f"k{i}") for i, each in enumerate(types)])


@settings(max_examples=150)
@given(types=TYPES, rate=st.integers(0, 300).map(float), unpredictability=st.sampled_from([0.0, 0.01, 1.0]))
@example([InstanceType(kind="k0", cost=2.0, launch=0.0, capacity=10.0, running=0, most=0.0)], 0.0, 0.0)
def test_integer_program_is_solved_exactly(types: list[InstanceType], rate: float, unpredictability: float) -> None:
    """Every action within the bounds of each type is tried."""
    best = math.inf
    for counts in itertools.product(*(range(int(each.most) + 1) for each in types)):
        if sum(each.capacity * count for each, count in zip(types, counts, strict=True)) >= rate:
            best = min(
                best,
                sum(
                    each.objective(count - each.running, unpredictability)
                    for each, count in zip(types, counts, strict=True)
                ),
            )
    action = least_cost_action(types, rate, unpredictability)
    if action is None:
        assert best == math.inf
        return
    assert all(0 <= each.running + action[each.kind] <= each.most for each in types)
    assert sum(each.capacity * (each.running + action[each.kind]) for each in types) >= rate
    assert sum(each.objective(action[each.kind], unpredictability) for each in types) == pytest.approx(best)


@given(types=TYPES, rate=st.integers(0, 300).map(float), unpredictability=st.sampled_from([0.0, 0.01, 1.0]))
def test_heuristic_adds_of_one_kind_what_there_is_and_never_less_than_needed(
    types: list[InstanceType], rate: float, unpredictability: float
) -> None:
    added = cheapest_addition(types, rate, 0.8, unpredictability)
    assert len(added) <= 1
    by_kind = {each.kind: each for each in types}
    for kind, count in added.items():
        assert 0 <= count <= by_kind[kind].most - by_kind[kind].running
    capacity = sum(each.capacity * each.running for each in types)
    enough = [each for each in types if capacity + each.capacity * (each.most - each.running) >= rate / 0.8]
    if enough and any(each.most > each.running for each in enough):
        after = sum(each.capacity * (each.running + added.get(each.kind, 0)) for each in types)
        assert after * 0.8 >= rate * (1 - 1e-9)


@given(types=TYPES, rate=st.integers(0, 300).map(float))
def test_removal_leaves_enough_and_saves_most(types: list[InstanceType], rate: float) -> None:
    kind = most_saving_removal(types, rate, 0.8)
    capacity = sum(each.capacity * each.running for each in types)
    possible = [each for each in types if each.running and (capacity - each.capacity) * 0.8 >= rate]
    assert (kind is None) == (not possible)
    if kind is not None:
        assert next(each.cost for each in possible if each.kind == kind) == max(each.cost for each in possible)


def test_unpredictability_prefers_what_launches_quickly() -> None:
    slow = InstanceType(kind="slow", cost=1.0, launch=100.0, capacity=10.0, running=0, most=9.0)
    quick = InstanceType(kind="quick", cost=2.0, launch=1.0, capacity=10.0, running=0, most=9.0)
    assert least_cost_action([slow, quick], 20.0, 0.0) == {"slow": 2, "quick": 0}
    assert least_cost_action([slow, quick], 20.0, 1.0) == {"slow": 0, "quick": 2}
    assert cheapest_addition([slow, quick], 16.0, 0.8, 0.0) == {"slow": 2}
    assert cheapest_addition([slow, quick], 16.0, 0.8, 1.0) == {"quick": 2}


def test_program_switches_to_cheaper_hardware_and_heuristic_does_not() -> None:
    dear = InstanceType(kind="dear", cost=9.0, launch=0.0, capacity=10.0, running=1, most=9.0)
    cheap = InstanceType(kind="cheap", cost=1.0, launch=0.0, capacity=10.0, running=0, most=9.0)
    assert least_cost_action([dear, cheap], 8.0, 0.0) == {"dear": -1, "cheap": 1}
    assert most_saving_removal([dear, cheap], 8.0, 0.8) is None


def test_capacity_is_of_the_best_batch_within_the_slo() -> None:
    points = [Point(share=WHOLE, batch=n, latency=0.05 * n**0.5, memory=0) for n in (1, 2, 4, 16)]
    asked = msgspec.structs.replace(problem({"a": 1.0}, slo=0.1), profiles={("a", "gpu"): Profile("a", "gpu", points)})
    assert instance_capacity(asked, "a", "gpu", WHOLE) == pytest.approx(4 / 0.1)
    assert instance_capacity(problem({"a": 1.0}, slo=0.001), "a", "gpu", WHOLE) == 0


def lately(rates: list[float], every: float = 15.0) -> list[Observation]:
    return [Observation(time=every * n, seconds=every, rates={"a": rate}) for n, rate in enumerate(rates, 1)]


def priced(*kinds: tuple[str, float]) -> tuple[Kind, ...]:
    return tuple(Kind(name=name, price=price, count=4) for name, price in kinds)


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ([79.0] * 30, 1),
        ([79.0] * 29 + [81.0], 2),
        ([241.0] * 30, 4),  # 4 · 0.8 · 100 ≥ 241 > 3 · 0.8 · 100
        ([999.0] * 30, 8),  # all there are
        ([0.0] * 30, 0),
    ],
)
def test_greedy_keeps_saturation_below_the_threshold(rates: list[float], wanted: int) -> None:
    given = context(lately(rates), ready=1, rates={"a": rates[-1]})
    assert GreedyScaling()(given) == {"gpu": wanted}


def test_greedy_scales_out_only_what_lasts() -> None:
    given = context(lately([10.0, 90.0, 90.0]), ready=1, rates={"a": 90.0})
    assert GreedyScaling(sustained=30.0)(given) == {"gpu": 2}
    assert GreedyScaling(sustained=45.0)(given) == {"gpu": 1}


def test_greedy_scales_in_after_the_cool_down() -> None:
    quiet = GreedyScaling(cool_down=60.0)
    assert quiet(context(lately([300.0, 100.0, 100.0, 100.0]), ready=4, rates={"a": 100.0})) == {"gpu": 4}
    assert quiet(context(lately([100.0, 100.0, 100.0, 100.0]), ready=4, rates={"a": 100.0})) == {"gpu": 2}
    assert quiet(context(lately([100.0, 100.0, 100.0]), ready=4, rates={"a": 100.0})) == {"gpu": 4}  # 45 s


def test_what_is_on_its_way_is_neither_ordered_twice_nor_taken_back() -> None:
    for rate in (150.0, 50.0):
        given = context(lately([rate] * 3), ready=1, launching=1, rates={"a": rate})
        assert GreedyScaling()(given) == {"gpu": 2}


def test_kinds_are_chosen_by_price() -> None:
    kinds = priced(("dear", 3.0), ("cheap", 1.0))
    asked = problem({"a": 150.0}, *kinds)
    given = msgspec.structs.replace(
        context(lately([150.0] * 2), of=asked, plan=instances(("a", "dear", 1))), ready={"dear": 1}
    )
    assert GreedyScaling()(given) == {"dear": 1, "cheap": 1}
    assert LeastCostScaling()(given) == {"dear": 0, "cheap": 2}


def test_models_share_what_there_is() -> None:
    asked = problem({"a": 300.0, "b": 300.0}, Kind(name="gpu", count=4))
    given = context(lately([300.0] * 2), of=asked, plan=Plan(planner="hand"))
    assert LeastCostScaling()(given) == {"gpu": 4}
    assert GreedyScaling()(given) == {"gpu": 4}


@settings(max_examples=100)
@given(
    rates=st.lists(st.floats(0, 500), min_size=1, max_size=25),
    running=st.integers(0, 8),
    launching=st.integers(0, 3),
    share=st.sampled_from([WHOLE, 500, 333]),
    scaling=st.sampled_from([GreedyScaling, LeastCostScaling]),
)
def test_devices_wanted_are_within_the_fleet(
    rates: list[float],
    running: int,
    launching: int,
    share: int,
    scaling: type[GreedyScaling] | type[LeastCostScaling],
) -> None:
    asked = problem({"a": rates[-1]}, Kind(name="gpu", count=8))
    points = [Point(share=cut, batch=1, latency=0.01 * WHOLE / cut, memory=0) for cut in (333, 500, WHOLE)]
    asked = msgspec.structs.replace(asked, profiles={("a", "gpu"): Profile("a", "gpu", points)})
    given: ScalingContext = context(lately(rates), ready=running, launching=launching, of=asked)
    wanted = scaling(share=share)(given)
    assert 0 <= wanted["gpu"] <= 8
