"""Solve programs that are small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
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
    **options: object,
) -> MilpSolution:
    answer, _ = solve_milp(instance, [WHOLE, HALF], patterns, modes, **options)  # type: ignore[arg-type]
    assert answer is not None
    return answer


def test_solve_milp_relaxed_or_integer_returns_fractional_or_whole_devices() -> None:
    """A device sustains 10 requests/s; the demand is 25."""
    alone = [mode(0, {0: 10.0})]
    parts = solved(milp_instance(25.0), alone, integer=False)
    assert (parts.value, parts.bound) == pytest.approx((2.5, 2.5))
    assert parts.modes == pytest.approx([2.5]) and parts.patterns == pytest.approx([2.5, 0])
    assert parts.demand_duals == pytest.approx([0.1])  # a request/s is worth a tenth of a device
    assert parts.slot_duals[0] == pytest.approx(1.0)
    whole = solved(milp_instance(25.0), alone)
    assert (whole.value, whole.modes.tolist(), whole.patterns.tolist()) == (3, [3], [3, 0])
    assert 2.5 <= whole.bound <= 3


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
    assert (
        solve_milp(milp_instance(25.0, count=2), [WHOLE, HALF], [UNCUT], [mode(0, {0: 10.0})], integer=False)[0] is None
    )
    assert solve_milp(milp_instance(25.0, count=2), [WHOLE, HALF], [UNCUT], [mode(0, {0: 10.0})])[0] is None


def test_solve_milp_of_two_kinds_exhausts_the_cheaper_first() -> None:
    slots, patterns = (
        [PartitionSize(0, 1000, 1), PartitionSize(1, 1000, 1)],
        [CuttingPattern(0, ((0, 1),)), CuttingPattern(1, ((1, 1),))],
    )
    instance = MilpInstance(
        rates=np.array([30.0]), counts=[5, 2], prices=[3.0, 1.0], memory_limits=[None, None], maximize_scale=False
    )
    answer, _ = solve_milp(instance, slots, patterns, [mode(0, {0: 10.0}), mode(1, {0: 10.0})])
    assert answer is not None
    assert (answer.value, answer.patterns.tolist()) == (5, [1, 2])


def test_solve_milp_with_memory_limit_separates_modes() -> None:
    """Two halves of 60 bytes each: a device with 100 holds one of them."""
    halves = [mode(1, {0: 5.0}, memory=60)]
    assert solved(milp_instance(20.0), halves).value == 2
    assert (
        solved(milp_instance(20.0, memory_limit=100), halves).patterns.sum() == 3
    )  # on average 100 a device, which bounds more
    assert solved(milp_instance(20.0, memory_limit=60), halves).value == 4


def test_solve_milp_with_demand_ignores_excess_rate() -> None:
    both = [mode(0, {0: 10.0, 1: 2.0}), mode(0, {1: 4.0})]
    assert solved(milp_instance(20.0, 4.0), both).value == 2
    # Only 5 of a partition's 10 requests/s count.
    assert solved(milp_instance(20.0, 4.0), both, demand=np.array([5.0, 4.0])).value == 4


def test_solve_milp_with_preferred_modes_breaks_only_ties() -> None:
    same = [mode(0, {0: 10.0}), mode(0, {0: 10.0}, memory=1), mode(0, {0: 20.0})]
    for n in (0, 1):
        answer = solved(milp_instance(10.0), same[:2], preferred=[n])
        assert answer.modes[n] == 1 and answer.patterns.sum() == 1
    assert solved(milp_instance(20.0), same, preferred=[0]).patterns.sum() == 1


def test_solve_milp_with_lower_bounds_keeps_unneeded_modes() -> None:
    one = mode(0, {0: 10.0})
    answer = solved(milp_instance(10.0), [one], lower_bounds={one: 2.0, UNCUT: 3.0})
    assert (answer.modes.tolist(), answer.patterns.tolist()) == ([2], [3, 0])


@pytest.mark.parametrize("scale", [False, True])
def test_solve_milp_of_random_instances_respects_bound_and_relaxation(scale: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        modes = [mode(int(s), {int(i): float(rng.uniform(1, 9))}) for s in (0, 1) for i in (0, 1, 2)]
        instance = milp_instance(*rng.uniform(1, 60, 3).tolist(), scale=scale, count=30)
        whole, parts = solved(instance, modes), solved(instance, modes, integer=False)
        sign = -1 if scale else 1
        assert sign * parts.value <= sign * whole.bound + 1e-6 <= sign * whole.value + 2e-6
        served = np.zeros(3)
        for each, n in zip(modes, whole.modes, strict=True):
            served[each.models[0]] += each.rates[0] * n
        assert (served >= instance.rates * (whole.value if scale else 1.0) * (1 - 1e-6)).all()
        assert whole.modes[[0, 1, 2]].sum() <= whole.patterns[0]
        assert whole.modes[[3, 4, 5]].sum() <= 2 * whole.patterns[1]


def test_solve_milp_without_time_returns_none_or_feasible_solution() -> None:
    instance = msgspec.structs.replace(milp_instance(25.0), counts=[3])
    answer, took = solve_milp(instance, [WHOLE, HALF], [UNCUT], [mode(0, {0: 10.0})], seconds=0.0)
    assert answer is None or answer.value == 3
    assert took < 1
