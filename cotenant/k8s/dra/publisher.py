"""Keep the node's ResourceSlice as its devices are: look at them, watch the slice, write what differs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from cotenant.errors import DeviceError, KubernetesError
from cotenant.k8s.background import beside
from cotenant.k8s.client import CONFLICT, ApiClient
from cotenant.k8s.dra.devices import NodeDevice
from cotenant.k8s.dra.resource_slice import keeps_shares, pool_generation, selector, slice_change
from cotenant.k8s.informer import Informer
from cotenant.k8s.resource import NODES, RESOURCE_SLICES, KubeObject, version_of

logger = logging.getLogger(__name__)

PERIOD = 5.0  # seconds between two looks at the devices
PATIENCE = 10.0  # seconds for a look; a driver that takes longer counts as one that shows no devices
RETRY = 1.0  # seconds until what could not be written is tried again

Look = Callable[[], tuple[NodeDevice, ...]]


class SlicePublisher:
    """Publish the devices of one node. look: finds them, in a thread; raises DeviceError."""

    def __init__(
        self, client: ApiClient, node: str, look: Look, *, period: float = PERIOD, patience: float = PATIENCE
    ) -> None:
        self._client = client
        self._node = node
        self._look = look
        self._period = period
        self._patience = patience
        self._changed = asyncio.Event()
        self._slices = Informer(client, RESOURCE_SLICES, self._changed.set, fields=selector(node))
        self._devices: dict[str, NodeDevice] = {}
        self._looking: asyncio.Task[tuple[NodeDevice, ...]] | None = None
        self._fault = ""
        self._failure = ""
        self._seen = 0  # largest generation
        self._written: tuple[tuple[NodeDevice, ...], str] | None = None  # devices, and the version that tells them

    @property
    def devices(self) -> Mapping[str, NodeDevice]:
        """Return the devices as they were last seen, by name."""
        return self._devices

    async def look(self) -> None:
        """Look at the devices. Without an answer there are none, so that nothing more is placed on them."""
        if self._looking is None:
            self._looking = asyncio.create_task(asyncio.to_thread(self._look))
        done, _ = await asyncio.wait([self._looking], timeout=self._patience)
        found: tuple[NodeDevice, ...] = ()
        fault = "" if done else "the driver of the devices does not answer"
        if done:
            looking, self._looking = self._looking, None
            try:
                found = looking.result()
            except DeviceError as error:
                fault = str(error)
        if fault and fault != self._fault:
            logger.warning("no devices are published: %s", fault)
        self._fault = fault
        self._devices = {each.name: each for each in found}

    async def run(self) -> None:
        """Publish until cancelled."""
        async with beside(self._slices.run()):
            await self._slices.synced()
            while True:
                self._changed.clear()
                await self.look()
                complete = await self._publish()
                try:
                    async with asyncio.timeout(self._period if complete else min(RETRY, self._period)):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def _publish(self) -> bool:
        """Write what differs; return whether nothing is left to write."""
        try:
            await self._write()
        except KubernetesError as error:
            if error.status != CONFLICT and str(error) != self._failure:
                logger.warning("the devices cannot be published, and stand as they did: %s", error)
                self._failure = str(error)
            return False
        self._failure = ""
        return True

    async def _write(self) -> None:
        present = self._slices.objects
        self._seen = max(self._seen, pool_generation(present.values()))
        devices = tuple(self._devices.values())
        if self._written is not None and self._written in [(devices, version_of(each)) for each in present.values()]:
            return  # as the server keeps it, which may be less than it was sent
        uid = ""
        for each in present.values():
            owners = each["metadata"].get("ownerReferences") or ()
            uid = next((owner["uid"] for owner in owners if owner.get("name") == self._node), uid)
        change = slice_change(self._node, uid, devices, present, self._seen)
        if change.create or change.replace or not uid:
            # A node that has come back under its name is another one, and the slice has to go with it.
            uid = str((await self._client.get(NODES, self._node))["metadata"].get("uid", ""))
            change = slice_change(self._node, uid, devices, present, self._seen)
        if change.create is not None:
            self._note(devices, await self._client.create(RESOURCE_SLICES, change.create))
        if change.replace is not None:
            self._note(devices, await self._client.replace(RESOURCE_SLICES, change.replace))
        for key in change.delete:
            await self._client.delete(RESOURCE_SLICES, key)

    def _note(self, devices: tuple[NodeDevice, ...], stored: KubeObject) -> None:
        self._written = devices, version_of(stored)
        self._seen = max(self._seen, pool_generation([stored]))
        logger.info("published %d devices, generation %d of the pool", len(devices), self._seen)
        if not keeps_shares(stored):
            logger.warning(
                "the API server does not keep that several claims may have a device: its feature DRAConsumableCapacity "
                "is off, and a claim gets a device whole"
            )
