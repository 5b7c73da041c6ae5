from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.planners import Problem
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.modes import Mode
from cotenant.planners.geometry.ruin_recreate import DeviceState, ModePool, ruin_and_recreate

# Slots 0 and 1: a whole and a half of the one kind of device.
WAYS = [[[0], [1, 1]]]


def mode(slot: int, rates: dict[int, float], memory: int = 0) -> Mode:
    ones = (1,) * len(rates)
    return Mode(slot, tuple(rates), tuple(rates.values()), ones, ones, memory)


def empty_devices(count: int) -> list[DeviceState]:
    return [DeviceState(0, None, [], []) for _ in range(count)]


def search(
    start: Sequence[DeviceState],
    modes: Sequence[Mode],
    rates: Sequence[float],
    *,
    memory_limit: int | None = None,
    target_scale: float = 1.0,
    steps: int = 300,
) -> tuple[float, list[DeviceState]]:
    prices = np.ones(len(rates)) / len(rates)
    served, devices = ruin_and_recreate(
        start,
        ModePool(modes, np.array(rates)),
        WAYS,
        [memory_limit],
        prices,
        target_scale=target_scale,
        steps=steps,
        budget=WorkBudget(Problem(models=(), rates={}, fleet=(), profiles={}, time_limit=60.0)),
    )
    return served, devices


def served_rates(devices: Sequence[DeviceState], models: int) -> list[float]:
    total = np.zeros(models)
    for device in devices:
        for each in device.modes:
            if each is not None:
                total[list(each.models)] += each.rates
    return total.tolist()


def test_ruin_and_recreate_of_two_models_divides_the_device() -> None:
    served, devices = search(empty_devices(1), [mode(0, {0: 10.0}), mode(1, {0: 6.0}), mode(1, {1: 6.0})], [5.0, 5.0])
    assert served >= 1
    assert devices[0].pieces == [1, 1]
    assert served_rates(devices, 2) == [6.0, 6.0]


def test_ruin_and_recreate_with_shared_mode_uses_it() -> None:
    served, devices = search(
        empty_devices(1), [mode(0, {0: 9.0}), mode(0, {1: 9.0}), mode(0, {0: 4.0, 1: 4.0})], [4.0, 4.0]
    )
    assert (served, [each.models for each in devices[0].modes if each]) == (1.0, [(0, 1)])


def test_ruin_and_recreate_of_sufficient_devices_changes_nothing() -> None:
    """The first mode would serve more, but the current one suffices."""
    there = mode(1, {0: 6.0})
    start = [DeviceState(0, 7, [1], [there])]
    served, devices = search(start, [mode(0, {0: 10.0}), there], [6.0])
    assert (served, devices) == (1.0, start)


def test_ruin_and_recreate_leaves_its_arguments_unchanged() -> None:
    start = [DeviceState(0, 7, [1], [mode(1, {0: 6.0})])]
    search(start, [mode(0, {0: 10.0}), mode(1, {0: 6.0})], [10.0])
    assert start == [DeviceState(0, 7, [1], [mode(1, {0: 6.0})])]


def test_ruin_and_recreate_with_memory_limit_respects_it() -> None:
    heavy = [mode(1, {0: 6.0}, memory=60), mode(1, {0: 4.0}, memory=40)]
    served, devices = search(empty_devices(1), heavy, [12.0], memory_limit=100)
    assert served == pytest.approx(10 / 12)
    assert sum(each.memory for each in devices[0].modes if each) <= 100


def test_ruin_and_recreate_of_low_rate_model_serves_it() -> None:
    """Two devices: one model could use both of them, the other needs a little of one."""
    modes = [mode(0, {0: 10.0}), mode(1, {0: 5.0}), mode(1, {1: 5.0})]
    served, _ = search(empty_devices(2), modes, [10.0, 0.001], target_scale=5.0)
    assert served == pytest.approx(1.5)


def test_ruin_and_recreate_of_unreachable_target_serves_every_model() -> None:
    """The target is far beyond what the devices can serve."""
    modes = [mode(1, {i: 1.0}) for i in range(4)]
    served, _ = search(empty_devices(2), modes, [1.0] * 4, target_scale=1000.0)
    assert served == 1.0


@given(
    rates=st.lists(st.floats(0.5, 20), min_size=1, max_size=4),
    count=st.integers(1, 4),
    memory_limit=st.sampled_from((None, 50, 100)),
    seed=st.integers(0, 99),
)
def test_ruin_and_recreate_of_random_pools_reports_the_scale_of_its_devices(
    rates: list[float], count: int, memory_limit: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    modes = [
        mode(int(s), {int(i): float(rng.uniform(1, 9)) for i in some}, int(rng.integers(10, 60)))
        for s in (0, 1)
        for some in ([i] for i in range(len(rates)))
    ] + [mode(0, {0: 1.0, i: 2.0}, 30) for i in range(1, len(rates))]
    served, devices = search(empty_devices(count), modes, rates, memory_limit=memory_limit, steps=40)
    assert search(empty_devices(count), modes, rates, memory_limit=memory_limit, steps=40) == (served, devices)
    parts = [have / want for have, want in zip(served_rates(devices, len(rates)), rates, strict=True)]
    assert served == pytest.approx(min(parts))
    for device in devices:
        assert device.pieces in WAYS[0]
        assert [each.slot for each in device.modes if each] == [
            s for s, each in zip(device.pieces, device.modes, strict=True) if each
        ]
        assert memory_limit is None or sum(each.memory for each in device.modes if each) <= memory_limit
