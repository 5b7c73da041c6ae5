"""Slices as they are kept on an API server's double."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cotenant.errors import DeviceError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.dra.devices import NodeDevice
from cotenant.k8s.dra.publisher import SlicePublisher
from cotenant.k8s.dra.resource_slice import slice_name
from tests.k8s.api_double import ApiDouble
from tests.k8s.dra.published import check_slice
from tests.k8s.dra.samples import NODE, gpu
from tests.k8s.eventually import eventually
from tests.k8s.play import play


class Machine:
    """What is found on a node."""

    def __init__(self, api: ApiDouble) -> None:
        self.devices: list[NodeDevice] = [gpu(0), gpu(1)]
        self.fault = ""
        self.hangs = threading.Event()
        self.hangs.set()
        self.looks = 0
        self._api = api
        api.put("nodes", {"metadata": {"name": NODE}})

    def look(self) -> tuple[NodeDevice, ...]:
        self.looks += 1
        self.hangs.wait(30)
        if self.fault:
            raise DeviceError(self.fault)
        return tuple(self.devices)

    def published(self) -> tuple[int, list[str]]:
        """The generation, and the names of the devices."""
        slices = self._api.objects("resourceslices")
        if not slices:
            return 0, []
        (body,) = slices
        check_slice(body)
        return body["spec"]["pool"]["generation"], [each["name"] for each in body["spec"]["devices"]]

    async def looked(self, times: int = 3) -> None:
        """Wait for some more rounds."""
        wanted = self.looks + times
        await eventually(lambda: self.looks >= wanted)


@asynccontextmanager
async def publishing(client: ApiClient, machine: Machine, patience: float = 10.0) -> AsyncIterator[SlicePublisher]:
    publisher = SlicePublisher(client, NODE, machine.look, period=0.02, patience=patience)
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_devices_are_published_once_and_again_where_they_change() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        async with publishing(client, machine) as publisher:
            await eventually(lambda: machine.published() == (1, [gpu(0).name, gpu(1).name]))
            await machine.looked()
            assert api.writes == ["POST /apis/resource.k8s.io/v1/resourceslices"]
            machine.devices = [gpu(1)]
            await eventually(lambda: machine.published() == (2, [gpu(1).name]))
            machine.devices = [gpu(0), gpu(1)]
            await eventually(lambda: machine.published() == (3, [gpu(0).name, gpu(1).name]))
            await machine.looked()
            assert len(api.writes) == 3
            assert set(publisher.devices) == {gpu(0).name, gpu(1).name}

    play(scenario)


def test_restarted_publisher_writes_nothing_where_nothing_changed() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        async with publishing(client, machine):
            await eventually(lambda: machine.published()[0] == 1)
        async with publishing(client, machine):
            await machine.looked()
            assert len(api.writes) == 1
            machine.devices = [gpu(0)]
            await eventually(lambda: machine.published() == (2, [gpu(0).name]))

    play(scenario)


def test_slice_that_a_kubelet_deletes_comes_back() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        async with publishing(client, machine):
            await eventually(lambda: machine.published()[0] == 1)
            api.remove("resourceslices", slice_name(NODE))
            await eventually(lambda: machine.published() == (2, [gpu(0).name, gpu(1).name]))

    play(scenario)


def test_slices_of_other_nodes_and_drivers_are_left_alone() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        others = {
            "other-node": {"driver": "cotenant.dev", "nodeName": "node-b", "pool": {"name": "node-b"}},
            "other-driver": {"driver": "gpu.nvidia.com", "nodeName": NODE, "pool": {"name": NODE}},
        }
        former = {"driver": "cotenant.dev", "nodeName": NODE, "pool": {"name": NODE, "generation": 7}}
        for name, spec in {**others, "former": former}.items():
            api.put("resourceslices", {"metadata": {"name": name}, "spec": spec})
        async with publishing(client, machine):
            await eventually(
                lambda: (
                    {each["metadata"]["name"] for each in api.objects("resourceslices")} == {*others, slice_name(NODE)}
                )
            )
        own = next(each for each in api.objects("resourceslices") if each["metadata"]["name"] == slice_name(NODE))
        assert own["spec"]["pool"]["generation"] == 8

    play(scenario)


def test_server_that_is_away_gets_the_devices_later() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        async with publishing(client, machine) as publisher:
            await eventually(lambda: machine.published()[0] == 1)
            with api.away():
                machine.devices = [gpu(0)]
                await eventually(lambda: set(publisher.devices) == {gpu(0).name})
            await eventually(lambda: machine.published() == (2, [gpu(0).name]))

    play(scenario)


def test_conflict_is_written_again() -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        async with publishing(client, machine):
            await eventually(lambda: machine.published()[0] == 1)
            with api.failing(409, "PUT"):
                machine.devices = [gpu(0)]
                await eventually(lambda: sum("PUT" in each for each in api.writes) > 0)
            await eventually(lambda: machine.published() == (2, [gpu(0).name]))

    play(scenario)


def test_no_device_is_published_while_the_driver_of_the_gpus_fails_or_hangs(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        async with publishing(client, machine, patience=0.2) as publisher:
            await eventually(lambda: machine.published()[1])
            machine.fault = "no driver"
            await eventually(lambda: machine.published() == (2, []))
            machine.fault = ""
            await eventually(lambda: machine.published()[0] == 3)
            machine.hangs.clear()
            await eventually(lambda: machine.published() == (4, []))
            looks = machine.looks
            for _ in range(3):
                await publisher.look()
            assert machine.looks == looks  # one thread waits, and no more
            machine.hangs.set()
            await eventually(lambda: len(machine.published()[1]) == 2)

    play(scenario)
    assert "no devices are published: no driver" in caplog.text
    assert "no devices are published: the driver of the devices does not answer" in caplog.text


def test_server_without_consumable_capacity_is_written_to_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: ApiDouble, client: ApiClient) -> None:
        machine = Machine(api)
        store = api._store

        def dropping(collection: Any, key: Any, body: Any) -> Any:
            for device in body.get("spec", {}).get("devices", []):
                device.pop("allowMultipleAllocations", None)
                device["capacity"]["share"].pop("requestPolicy", None)
            return store(collection, key, body)

        api._store = dropping  # type: ignore[method-assign]
        async with publishing(client, machine):
            await machine.looked(6)
            assert len(api.writes) == 1
            machine.devices = [gpu(0)]
            await eventually(lambda: [len(each["spec"]["devices"]) for each in api.objects("resourceslices")] == [1])
            await machine.looked(3)
            assert len(api.writes) == 2

    play(scenario)
    assert "its feature DRAConsumableCapacity is off" in caplog.text
