from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.planners.geometry.modes import Mode
from cotenant.planners.geometry.ruin_recreate import DeviceState, ModePool, ruin_and_recreate

# Slots 0 and 1: a whole and a half of the one kind of device.
WAYS = [[[0], [1, 1]]]


def mode(slot: int, rates: dict[int, float], memory: int = 0) -> Mode:
    ones = (1,) * len(rates)
    return Mode(slot, tuple(rates), tuple(rates.values()), ones, ones, memory)


def boxes(count: int) -> list[DeviceState]:
    return [DeviceState(0, None, [], []) for _ in range(count)]


def filled(
    given: Sequence[DeviceState],
    modes: Sequence[Mode],
    rates: Sequence[float],
    *,
    room: int | None = None,
    enough: float = 1.0,
    steps: int = 300,
) -> tuple[float, list[DeviceState]]:
    worth = np.ones(len(rates)) / len(rates)
    served, found, _ = ruin_and_recreate(
        given, ModePool(modes, np.array(rates)), WAYS, [room], worth, target_scale=enough, steps=steps
    )
    return served, found


def carried(found: Sequence[DeviceState], models: int) -> list[float]:
    total = np.zeros(models)
    for box in found:
        for each in box.modes:
            if each is not None:
                total[list(each.models)] += each.rates
    return total.tolist()


def test_a_device_is_cut_where_two_models_need_it() -> None:
    served, found = filled(boxes(1), [mode(0, {0: 10.0}), mode(1, {0: 6.0}), mode(1, {1: 6.0})], [5.0, 5.0])
    assert served >= 1
    assert found[0].pieces == [1, 1]
    assert carried(found, 2) == [6.0, 6.0]


def test_models_that_share_a_partition_are_put_there() -> None:
    served, found = filled(boxes(1), [mode(0, {0: 9.0}), mode(0, {1: 9.0}), mode(0, {0: 4.0, 1: 4.0})], [4.0, 4.0])
    assert (served, [each.models for each in found[0].modes if each]) == (1.0, [(0, 1)])


def test_nothing_is_moved_where_all_is_served() -> None:
    """The first mode would do better, but what is there does."""
    there = mode(1, {0: 6.0})
    start = [DeviceState(0, 7, [1], [there])]
    served, found = filled(start, [mode(0, {0: 10.0}), there], [6.0])
    assert (served, found) == (1.0, start)


def test_what_was_given_stays_as_it_was() -> None:
    start = [DeviceState(0, 7, [1], [mode(1, {0: 6.0})])]
    filled(start, [mode(0, {0: 10.0}), mode(1, {0: 6.0})], [10.0])
    assert start == [DeviceState(0, 7, [1], [mode(1, {0: 6.0})])]


def test_memory_is_kept_to() -> None:
    heavy = [mode(1, {0: 6.0}, memory=60), mode(1, {0: 4.0}, memory=40)]
    served, found = filled(boxes(1), heavy, [12.0], room=100)
    assert served == pytest.approx(10 / 12)
    assert sum(each.memory for each in found[0].modes if each) <= 100


def test_a_model_that_is_asked_for_little_is_not_forgotten() -> None:
    """Two devices; one model could use both of them, the other needs a little of one."""
    modes = [mode(0, {0: 10.0}), mode(1, {0: 5.0}), mode(1, {1: 5.0})]
    served, _ = filled(boxes(2), modes, [10.0, 0.001], enough=5.0)
    assert served == pytest.approx(1.5)


def test_more_than_can_be_had_is_tried_for_in_vain() -> None:
    """What every model is asked for lies far beyond what there is."""
    modes = [mode(1, {i: 1.0}) for i in range(4)]
    served, _ = filled(boxes(2), modes, [1.0] * 4, enough=1000.0)
    assert served == 1.0


@given(
    rates=st.lists(st.floats(0.5, 20), min_size=1, max_size=4),
    count=st.integers(1, 4),
    room=st.sampled_from((None, 50, 100)),
    seed=st.integers(0, 99),
)
def test_what_is_answered_is_what_is_there(rates: list[float], count: int, room: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    modes = [
        mode(int(s), {int(i): float(rng.uniform(1, 9)) for i in some}, int(rng.integers(10, 60)))
        for s in (0, 1)
        for some in ([i] for i in range(len(rates)))
    ] + [mode(0, {0: 1.0, i: 2.0}, 30) for i in range(1, len(rates))]
    served, found = filled(boxes(count), modes, rates, room=room, steps=40)
    assert filled(boxes(count), modes, rates, room=room, steps=40) == (served, found)
    parts = [have / want for have, want in zip(carried(found, len(rates)), rates, strict=True)]
    assert served == pytest.approx(min(parts))
    for box in found:
        assert box.pieces in WAYS[0]
        assert [each.slot for each in box.modes if each] == [
            s for s, each in zip(box.pieces, box.modes, strict=True) if each
        ]
        assert room is None or sum(each.memory for each in box.modes if each) <= room
