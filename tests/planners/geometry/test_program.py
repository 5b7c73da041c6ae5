"""Solve programs that are small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.modes import Mode, PartitionSize
from cotenant.planners.geometry.program import MilpInstance, MilpSolution, solve_milp

WHOLE, HALF = PartitionSize(0, 1000, 100), PartitionSize(0, 500, 100)
UNCUT, HALVES = CuttingPattern(0, ((0, 1),)), CuttingPattern(0, ((1, 2),))


def mode(slot: int, rates: dict[int, float], memory: int = 0) -> Mode:
    ones = (1,) * len(rates)
    return Mode(slot, tuple(rates), tuple(rates.values()), ones, ones, memory)


def milp_instance(
    *rates: float, scale: bool = False, count: float = math.inf, memory_limit: int | None = None
) -> MilpInstance:
    return MilpInstance(
        rates=np.array(rates), counts=[count], prices=[1.0], memory_limits=[memory_limit], maximize_scale=scale
    )


def solved(
    instance: MilpInstance,
    modes: Sequence[Mode],
    patterns: Sequence[CuttingPattern] = (UNCUT, HALVES),
    *,
    whole_devices: bool = False,
) -> MilpSolution:
    answer = solve_milp(instance, [WHOLE, HALF], patterns, modes, whole_devices=whole_devices)
    assert answer is not None
    return answer


def test_solve_milp_returns_parts_of_devices_or_whole_ones() -> None:
    """A device sustains 10 requests/s; the demand is 25."""
    alone = [mode(0, {0: 10.0})]
    parts = solved(milp_instance(25.0), alone)
    assert (parts.value, parts.bound) == pytest.approx((2.5, 2.5))
    assert parts.modes == pytest.approx([2.5]) and parts.patterns == pytest.approx([2.5, 0])
    assert parts.demand_duals == pytest.approx([0.1])  # a request/s is worth a tenth of a device
    assert parts.slot_duals[0] == pytest.approx(1.0)
    whole = solved(milp_instance(25.0), alone, whole_devices=True)
    assert whole.bound == pytest.approx(3)


def test_solve_milp_with_whole_devices_of_two_kinds_takes_the_cheapest_fleet() -> None:
    """A device of one kind sustains 10 requests/s for 1, of the other 4 for 0.41; the demand is 25."""
    slots = [PartitionSize(0, 1000, 1), PartitionSize(1, 1000, 1)]
    patterns = [CuttingPattern(0, ((0, 1),)), CuttingPattern(1, ((1, 1),))]
    modes = [mode(0, {0: 10.0}), mode(1, {0: 4.0})]
    instance = MilpInstance(
        rates=np.array([25.0]),
        counts=[math.inf] * 2,
        prices=[1.0, 0.41],
        memory_limits=[None] * 2,
        maximize_scale=False,
    )
    parts = solve_milp(instance, slots, patterns, modes)
    whole = solve_milp(instance, slots, patterns, modes, whole_devices=True)
    assert parts is not None and whole is not None
    assert parts.bound == pytest.approx(2.5)
    # Two and two: 28 requests/s for 2.82; three of the first 3, one and four 2.64, none and seven 2.87.
    assert whole.bound == pytest.approx(2.64)


def test_solve_milp_maximizing_scale_returns_largest_multiple() -> None:
    answer = solved(milp_instance(25.0, scale=True, count=2), [mode(0, {0: 10.0})])
    assert answer.value == pytest.approx(0.8)
    assert answer.bound == pytest.approx(0.8)


def test_solve_milp_with_two_patterns_cuts_devices_for_their_modes() -> None:
    """Half a device sustains 6 requests/s of one model and 3 of the other; a whole one 10 of either."""
    modes = [mode(0, {0: 10.0}), mode(1, {0: 6.0}), mode(0, {1: 10.0}), mode(1, {1: 3.0})]
    answer = solved(milp_instance(12.0, 10.0), modes)
    assert (answer.value, answer.modes.tolist(), answer.patterns.tolist()) == (2, [0, 2, 1, 0], [1, 1])


def test_solve_milp_with_too_few_devices_returns_none() -> None:
    for whole in (False, True):
        instance = milp_instance(25.0, count=2)
        assert solve_milp(instance, [WHOLE, HALF], [UNCUT], [mode(0, {0: 10.0})], whole_devices=whole) is None


def test_solve_milp_of_two_kinds_exhausts_the_cheaper_first() -> None:
    slots, patterns = (
        [PartitionSize(0, 1000, 1), PartitionSize(1, 1000, 1)],
        [CuttingPattern(0, ((0, 1),)), CuttingPattern(1, ((1, 1),))],
    )
    instance = MilpInstance(
        rates=np.array([30.0]), counts=[5, 2], prices=[3.0, 1.0], memory_limits=[None, None], maximize_scale=False
    )
    answer = solve_milp(instance, slots, patterns, [mode(0, {0: 10.0}), mode(1, {0: 10.0})])
    assert answer is not None
    assert (answer.value, answer.patterns.tolist()) == (5, [1, 2])


def test_solve_milp_with_memory_limit_separates_modes() -> None:
    """Two halves of 60 bytes each: on average a device with 100 bytes holds 5/3 of them, with 60 one."""
    halves = [mode(1, {0: 5.0}, memory=60)]
    assert solved(milp_instance(20.0), halves).value == pytest.approx(2)
    assert solved(milp_instance(20.0, memory_limit=100), halves).value == pytest.approx(2.4)
    assert solved(milp_instance(20.0, memory_limit=100), halves, whole_devices=True).bound == pytest.approx(3)
    assert solved(milp_instance(20.0, memory_limit=60), halves).value == pytest.approx(4)


@pytest.mark.parametrize("scale", [False, True])
def test_solve_milp_of_random_instances_bounds_more_with_whole_devices(scale: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        modes = [mode(int(s), {int(i): float(rng.uniform(1, 9))}) for s in (0, 1) for i in (0, 1, 2)]
        instance = milp_instance(*rng.uniform(1, 60, 3).tolist(), scale=scale, count=30)
        parts, whole = solved(instance, modes), solved(instance, modes, whole_devices=True)
        assert whole.bound == pytest.approx(parts.value if scale else math.ceil(parts.value - 1e-9))
        served = np.zeros(3)
        for each, n in zip(modes, parts.modes, strict=True):
            served[each.models[0]] += each.rates[0] * n
        assert (served >= instance.rates * (parts.value if scale else 1.0) * (1 - 1e-6)).all()
        assert parts.modes[[0, 1, 2]].sum() <= parts.patterns[0] + 1e-9
        assert parts.modes[[3, 4, 5]].sum() <= 2 * parts.patterns[1] + 1e-9
