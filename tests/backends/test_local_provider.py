"""The machine's devices as a provider: lost and back."""

from __future__ import annotations

import pytest

from cotenant.backends.fake import Fake
from cotenant.backends.local_provider import LocalProvider
from cotenant.control.adaptation import Acquire, DevicesFound, DevicesGone, Release
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.errors import DeviceError

A, B = DeviceId("gpu", 0), DeviceId("gpu", 1)


class Machine(Fake):
    """A fake machine whose devices can be lost."""

    def __init__(self) -> None:
        super().__init__((Kind(name="gpu", count=2),))
        self.gone: dict[DeviceId, str] = {}

    def lost(self) -> dict[DeviceId, str]:
        return dict(self.gone)


def test_lost_devices_go_and_come_back() -> None:
    machine = Machine()
    local = LocalProvider(machine)
    assert local.news(0.0) == []
    assert local.due == 0.5
    machine.gone = {A: "it fell off the bus"}
    assert local.news(0.5) == [DevicesGone((A,), "it fell off the bus")]
    assert local.news(1.0) == []
    machine.gone = {}
    assert local.news(1.5) == [DevicesFound((A,))]


def test_a_released_device_is_not_missed_and_a_lost_one_not_given_until_it_is_back() -> None:
    machine = Machine()
    local = LocalProvider(machine)
    local.handle(Release((B,)), 0.0)
    assert local.due == 0.0
    assert local.news(0.0) == [DevicesGone((B,), "released")]
    machine.gone = {B: "it is hot"}
    assert local.news(1.0) == []
    local.handle(Acquire("gpu", 1), 2.0)
    assert local.news(2.0) == []
    machine.gone = {}
    assert local.news(3.0) == [DevicesFound((B,))]


def test_a_machine_that_does_not_count_its_devices_is_an_error() -> None:
    with pytest.raises(DeviceError, match="how many devices of kind 'gpu'"):
        LocalProvider(Fake((Kind(name="gpu", count=None),)))
