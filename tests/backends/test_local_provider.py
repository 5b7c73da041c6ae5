"""The machine's devices as a provider: lost and back."""

from __future__ import annotations

import pytest

from cotenant.backends.fake import Fake
from cotenant.backends.local_provider import LocalProvider
from cotenant.control.adaptation import Acquire, AcquisitionFailed, DevicesFound, DevicesGone, Release
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Plan
from cotenant.errors import DeviceError
from cotenant.planners import Problem

A, B = DeviceId("gpu", 0), DeviceId("gpu", 1)
REMOTE = DeviceId("node-b/gpu", 0)
GPUS, NODE = Kind(name="gpu", count=2), Kind(name="node-b/gpu", count=1)


class Machine(Fake):
    """A fake machine whose devices can be lost, and a node that joins it."""

    def __init__(self) -> None:
        super().__init__(())
        self.kinds: tuple[Kind, ...] = (GPUS,)
        self.gone: dict[DeviceId, str] = {}

    def fleet(self) -> tuple[Kind, ...]:
        return self.kinds

    def lost(self) -> dict[DeviceId, str]:
        return dict(self.gone)


class InForce:
    """The problem and the plan in force."""

    def __init__(self) -> None:
        self.kinds: tuple[Kind, ...] = (GPUS,)
        self.used: tuple[DeviceId, ...] = ()

    def __call__(self) -> tuple[Problem, Plan]:
        plan = Plan(planner="hand", devices=tuple(Device(id=device, partitions=()) for device in self.used))
        return Problem(models=(), rates={}, fleet=self.kinds, profiles={}), plan


def test_lost_devices_go_and_come_back() -> None:
    machine = Machine()
    local = LocalProvider(machine, InForce())
    assert local.news(0.0) == []
    assert local.due == 0.5
    machine.gone = {A: "it fell off the bus"}
    assert local.news(0.5) == [DevicesGone((A,), "it fell off the bus")]
    assert local.news(1.0) == []
    machine.gone = {}
    assert local.news(1.5) == [DevicesFound((A,))]


def test_a_released_device_is_not_missed_and_a_lost_one_not_given_until_it_is_back() -> None:
    machine = Machine()
    local = LocalProvider(machine, InForce())
    local.handle(Release((B,)), 0.0)
    assert local.due == 0.0
    assert local.news(0.0) == [DevicesGone((B,), "released")]
    machine.gone = {B: "it is hot"}
    assert local.news(1.0) == []
    local.handle(Acquire("gpu", 1), 2.0)
    assert local.news(2.0) == []
    machine.gone = {}
    assert local.news(3.0) == [DevicesFound((B,))]


def test_device_is_found_once_the_problem_in_force_has_it() -> None:
    """A controller that hears of it sooner solves a problem without it: it would take what the others serve for what is
    wanted, and give the device back."""
    machine, in_force = Machine(), InForce()
    machine.kinds = (GPUS, NODE)  # it has joined since the problem was made
    local = LocalProvider(machine, in_force)
    assert [offer.kind for offer in local.offers()] == ["gpu"]
    assert local.news(0.0) == []
    in_force.kinds = (GPUS, NODE)
    assert local.news(0.5) == [DevicesFound((REMOTE,))]
    assert local.news(1.0) == []
    assert {offer.kind: offer.quota for offer in local.offers()} == {"gpu": 2, "node-b/gpu": 1}


def test_device_of_a_node_that_was_removed_and_comes_back_is_found_once_it_is_planned_for_again() -> None:
    machine, in_force = Machine(), InForce()
    machine.kinds = in_force.kinds = (GPUS, NODE)
    local = LocalProvider(machine, in_force)
    machine.kinds, machine.gone = (GPUS,), {REMOTE: "node-b was removed"}
    assert local.news(0.0) == [DevicesGone((REMOTE,), "node-b was removed")]
    machine.gone = {}  # it is there again, and has not answered yet
    assert local.news(0.5) == []
    in_force.kinds = (GPUS,)
    machine.kinds = (GPUS, NODE)
    assert local.news(1.0) == []
    in_force.kinds = (GPUS, NODE)
    assert local.news(1.5) == [DevicesFound((REMOTE,))]


def test_device_that_joins_and_is_lost_is_found_once_it_is_back() -> None:
    machine, in_force = Machine(), InForce()
    local = LocalProvider(machine, in_force)
    machine.kinds = in_force.kinds = (GPUS, NODE)
    machine.gone = {REMOTE: "it fell off the bus"}
    assert local.news(0.0) == []
    machine.gone = {}
    assert local.news(0.5) == [DevicesFound((REMOTE,))]


def test_devices_that_settings_leave_out_are_gone() -> None:
    machine, in_force = Machine(), InForce()
    local = LocalProvider(machine, in_force)
    in_force.kinds = (Kind(name="gpu", count=1),)
    assert local.news(0.0) == [DevicesGone((B,), "no plan is made for it any more")]
    machine.gone = {B: "it is hot"}
    assert local.news(0.5) == []
    machine.gone = {}
    assert local.news(1.0) == []
    in_force.kinds = (GPUS,)
    assert local.news(1.5) == [DevicesFound((B,))]


def test_free_device_that_settings_leave_out_cannot_be_had() -> None:
    machine, in_force = Machine(), InForce()
    local = LocalProvider(machine, in_force)
    local.handle(Release((B,)), 0.0)
    assert local.news(0.0) == [DevicesGone((B,), "released")]
    in_force.kinds = (Kind(name="gpu", count=1),)
    assert local.news(0.5) == []
    assert [offer.quota for offer in local.offers()] == [1]
    local.handle(Acquire("gpu", 1), 1.0)
    refused = AcquisitionFailed("gpu", 1, "all 1 devices of kind 'gpu' are in use or lost")
    assert local.news(1.0) == [refused]
    in_force.kinds = (GPUS,)
    assert local.news(1.5) == [DevicesFound((B,))]


def test_released_device_that_a_reload_uses_is_found_again_and_missed_where_it_is_lost() -> None:
    machine, in_force = Machine(), InForce()
    local = LocalProvider(machine, in_force)
    local.handle(Release((B,)), 0.0)
    in_force.used = (A,)
    assert local.news(0.0) == [DevicesGone((B,), "released")]
    in_force.used = (A, B)
    assert local.news(0.5) == [DevicesFound((B,))]
    machine.gone = {B: "it is hot"}
    assert local.news(1.0) == [DevicesGone((B,), "it is hot")]


def test_a_machine_that_does_not_count_its_devices_is_an_error() -> None:
    with pytest.raises(DeviceError, match="how many devices of kind 'gpu'"):
        LocalProvider(Fake((Kind(name="gpu", count=None),)), InForce())
