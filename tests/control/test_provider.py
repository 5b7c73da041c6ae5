"""The provider of a fixed set of devices."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cotenant.control.adaptation import Acquire, AcquisitionFailed, DevicesFound, DevicesGone, Release
from cotenant.control.provider import DeviceOffer, FixedProvider
from cotenant.core.identity import DeviceId

DEVICES = tuple(DeviceId("gpu", index) for index in range(4))


def test_devices_are_given_and_taken_at_once() -> None:
    fixed = FixedProvider(DEVICES, DEVICES[:1])
    assert fixed.offers() == (DeviceOffer(kind="gpu", quota=4),)
    assert fixed.due == math.inf
    fixed.handle(Acquire("gpu", 2), 3.0)
    assert fixed.due == 3.0
    assert fixed.news(3.0) == [DevicesFound(DEVICES[1:3])]
    assert fixed.due == math.inf
    fixed.handle(Release(DEVICES[:1]), 4.0)
    fixed.handle(Acquire("gpu", 3), 4.0)
    assert fixed.news(4.0) == [
        DevicesGone(DEVICES[:1], "released"),
        DevicesFound((DEVICES[0], DEVICES[3])),
        AcquisitionFailed("gpu", 1, "all 4 devices of kind 'gpu' are in use or lost"),
    ]


def test_unknown_kinds_fail_and_strangers_are_not_taken() -> None:
    fixed = FixedProvider(DEVICES)
    fixed.handle(Acquire("tpu", 1), 0.0)
    fixed.handle(Release((DeviceId("tpu"), DEVICES[0])), 0.0)
    assert fixed.news(0.0) == [AcquisitionFailed("tpu", 1, "there is no device of kind 'tpu'")]


def test_devices_that_are_in_use_are_not_given() -> None:
    fixed = FixedProvider(DEVICES[:2], DEVICES[:1])
    assert fixed.use(DEVICES[:3]) == DEVICES[1:3]
    assert fixed.used == fixed.devices == set(DEVICES[:3])
    assert fixed.offers() == (DeviceOffer(kind="gpu", quota=3),)
    fixed.handle(Acquire("gpu", 1), 0.0)
    assert fixed.news(0.0) == [AcquisitionFailed("gpu", 1, "all 3 devices of kind 'gpu' are in use or lost")]


def test_devices_that_are_dropped_are_neither_given_nor_taken() -> None:
    fixed = FixedProvider(DEVICES, DEVICES[:2])
    fixed.drop({DEVICES[1], DEVICES[2], DeviceId("tpu")})
    assert fixed.used == {DEVICES[0]}
    assert fixed.offers() == (DeviceOffer(kind="gpu", quota=2),)
    fixed.handle(Release((DEVICES[1],)), 0.0)
    fixed.handle(Acquire("gpu", 2), 0.0)
    assert fixed.news(0.0) == [
        DevicesFound((DEVICES[3],)),
        AcquisitionFailed("gpu", 1, "all 2 devices of kind 'gpu' are in use or lost"),
    ]
    fixed.drop({DEVICES[0], DEVICES[3]})
    assert fixed.offers() == ()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=30))
def test_every_device_is_in_use_or_free(commands: list[tuple[bool, int]]) -> None:
    fixed = FixedProvider(DEVICES)
    used: set[DeviceId] = set()
    for now, (acquire, count) in enumerate(commands):
        fixed.handle(Acquire("gpu", count) if acquire else Release(tuple(sorted(used)[:count])), float(now))
        given = failed = 0
        for event in fixed.news(float(now)):
            match event:
                case DevicesFound(devices):
                    assert not used & set(devices)
                    used |= set(devices)
                    given += len(devices)
                case DevicesGone(devices):
                    assert set(devices) <= used
                    used -= set(devices)
                case AcquisitionFailed(_, missing, _):
                    failed += missing
        assert not acquire or given + failed == count
        assert used <= set(DEVICES)
