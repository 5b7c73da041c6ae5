from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.planners import Problem
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.device_assembly import (
    CurrentDevice,
    CurrentPartition,
    DeviceGroup,
    assemble_devices,
    current_devices,
    partition_drafts,
    reduce_interference,
)
from cotenant.planners.geometry.modes import Mode, ModeCatalog, partition_sizes
from cotenant.predictors.linear import Coefficients, Linear, Utilisation
from tests.planners.problems import linear

CUTS = (200, 300, 500, 1000)
A, B = CuttingPattern(0, ((2, 2),)), CuttingPattern(0, ((0, 1), (1, 1), (2, 1)))  # 5:5 and 2:3:5


def problem(current: Plan | None = None, **changes: object) -> Problem:
    plain = Problem(
        models=tuple(Model(name=name, slo=1.0) for name in "abcd"),
        rates=dict.fromkeys("abcd", 10.0),
        fleet=(Kind(name="k", cuts=CUTS, count=None),),
        profiles={(name, "k"): linear(name, "k", 0.01, 0.01, cuts=CUTS) for name in "abcd"},
        current=current,
    )
    return msgspec.structs.replace(plain, **changes)


def catalog(of: Problem) -> ModeCatalog:
    slots, names = partition_sizes(of), list(of.rates)
    return ModeCatalog(of, names, slots, np.ones((len(slots), len(names))))


def mode(slot: int, model: int, rate: float = 1.0, memory: int = 1) -> Mode:
    return Mode(slot, (model,), (rate,), (1,), (1,), memory)


def placed(groups: Sequence[DeviceGroup]) -> Counter[Mode]:
    return Counter(each for group in groups for each in group.modes for _ in group.ids)


def numbers(groups: Sequence[DeviceGroup]) -> list[tuple[int, int]]:
    return sorted((group.kind, number) for group in groups for number in group.ids)


def test_assemble_devices_of_matching_patterns_places_every_mode() -> None:
    modes = [(mode(2, 0), 60), (mode(2, 1), 41), (mode(0, 2), 5), (mode(1, 3), 3)]
    groups = assemble_devices(modes, [(A, 48), (B, 5)], [None], [])
    assert placed(groups) == Counter(dict(modes))
    assert numbers(groups) == [(0, n) for n in range(53)]
    assert len(groups) < 10  # devices that are alike are one group
    for group in groups:
        pieces = Counter(each.slot for each in group.modes)
        assert any(pieces <= Counter(dict(pattern.pieces)) for pattern in (A, B))


def test_assemble_devices_without_modes_returns_no_device() -> None:
    assert numbers(assemble_devices([(mode(2, 0), 1)], [(A, 4)], [None], [])) == [(0, 0)]


def test_assemble_devices_with_tight_memory_separates_large_modes() -> None:
    """Two large and two small halves on two devices."""
    groups = assemble_devices([(mode(2, 0, memory=60), 2), (mode(2, 1, memory=30), 2)], [(A, 2)], [100], [])
    assert placed(groups).total() == 4
    assert all(sum(each.memory for each in group.modes) <= 100 for group in groups)
    # Modes that do not fit are left out.
    groups = assemble_devices([(mode(2, 0, memory=60), 4)], [(A, 2)], [100], [])
    assert placed(groups).total() == 2


def current_device(number: int, *places: tuple[int, int]) -> CurrentDevice:
    return CurrentDevice(0, number, tuple(CurrentPartition(s, (i,), (1.0,), (1,)) for s, i in places))


def test_assemble_devices_with_current_plan_keeps_matching_devices() -> None:
    current = [current_device(4, (2, 0), (2, 1)), current_device(9, (0, 2), (1, 3), (2, 0))]
    modes = [(mode(2, 0), 2), (mode(2, 1), 1), (mode(0, 2), 1), (mode(1, 3), 1)]
    groups = assemble_devices(modes, [(A, 1), (B, 1)], [None], current)
    assert {group.ids: sorted(each.models[0] for each in group.modes) for group in groups} == {
        (4,): [0, 1],
        (9,): [0, 2, 3],
    }


def test_assemble_devices_with_changed_device_reuses_closest_number() -> None:
    """Model 1 leaves device 4; the device with most in common keeps number 4."""
    current = [current_device(4, (2, 0), (2, 1)), current_device(0, (2, 2), (2, 2))]
    groups = assemble_devices(
        [(mode(2, 0), 2), (mode(2, 2), 2), (mode(0, 3), 1), (mode(1, 3), 1)], [(A, 2), (B, 1)], [None], current
    )
    by_number = {number: Counter(each.models[0] for each in group.modes) for group in groups for number in group.ids}
    assert by_number[0] == Counter({2: 2})
    assert 0 in by_number[4]
    assert len(numbers(groups)) == len(set(numbers(groups))) == 3


def test_current_devices_of_foreign_plan_omits_what_the_problem_lacks() -> None:
    def partition(share: int, *models: str) -> Partition:
        placements = tuple(Placement(model=name, batch=1, rate=2.0, duty=0.1, latency=0.1) for name in models)
        return Partition(share=share, placements=placements)

    current = Plan(
        planner="p",
        devices=(
            Device(
                id=DeviceId("k", 3), partitions=(partition(500, "b", "a"), partition(333, "c"), partition(300, "gone"))
            ),
            Device(id=DeviceId("gone", 1), partitions=(partition(500, "a"),)),
        ),
    )
    current_problem = problem(current)
    assert current_devices(current_problem, partition_sizes(current_problem), list(current_problem.rates)) == [
        CurrentDevice(0, 3, (CurrentPartition(2, (0, 1), (2.0, 2.0), (1, 1)),))
    ]
    assert current_devices(problem(), partition_sizes(current_problem), list(current_problem.rates)) == []


def test_reduce_interference_of_mixed_models_pairs_the_compatible() -> None:
    """Two models that use the cache and two that do not: one of each on a device."""
    used = {name: Utilisation(name, {(1, 1000): (busy, 0.0)}) for name, busy in zip("abcd", (1, 1, 0, 0), strict=True)}
    current_problem = problem(interference=Linear(Coefficients(0.5, 0.5, 0.0, 0.0, 1.0), used))
    start = [DeviceGroup(0, (mode(2, 0), mode(2, 1)), (0,)), DeviceGroup(0, (mode(2, 2), mode(2, 3)), (1,))]
    improved = reduce_interference(current_problem, catalog(current_problem), start, [None])
    assert placed(improved) == placed(start)
    assert numbers(improved) == [(0, 0), (0, 1)]
    assert all(len({each.models[0] < 2 for each in group.modes}) == 2 for group in improved)
    # Nothing is swapped where memory does not allow it, nor without interference.
    heavy = [
        DeviceGroup(0, (mode(2, 0, memory=40), mode(2, 1, memory=40)), (0,)),
        DeviceGroup(0, (mode(2, 2, memory=70), mode(2, 3, memory=10)), (1,)),
    ]
    assert all(
        sum(each.memory for each in group.modes) <= 80
        for group in reduce_interference(current_problem, catalog(current_problem), heavy, [80])
    )
    assert reduce_interference(problem(), catalog(problem()), start, [None]) == start


def test_partition_drafts_with_factors_scale_rates_of_modes() -> None:
    current_problem = problem()
    both = Mode(2, (0, 2), (8.0, 4.0), (2, 1), (1, 3), 1)
    (cut,) = partition_drafts(catalog(current_problem), DeviceGroup(0, (both,), (0,)), np.array([0.5, 1.0, 0.25, 1.0]))
    assert (cut.share, cut.procs) == (500, {"c": 3})
    assert cut.rates == pytest.approx({"a": 4.0, "c": 1.0})
