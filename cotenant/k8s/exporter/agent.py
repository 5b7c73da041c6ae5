"""Read the GPUs of a node again and again, and report them to the API where they have changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from cotenant.errors import DeviceError, KubernetesError
from cotenant.k8s.client import CONFLICT, ApiClient
from cotenant.k8s.exporter.readings import DeviceReading
from cotenant.k8s.informer import Informer
from cotenant.k8s.pods.inventory import DEVICES, write_devices
from cotenant.k8s.pods.kept import kept_of_pod
from cotenant.k8s.pods.objects import read_cuts
from cotenant.k8s.pods.request import SharePlacement, SharePod, read_pod
from cotenant.k8s.resource import NODES, PODS, ObjectKey

logger = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between two readings


class DeviceAgent:
    """Know the devices of a node, and who uses them.

    read: reads the GPUs; it is called in a thread. client: of the API that they are reported to, under the name of the
    node; None: to nobody, and there are no users. cut: cuts a GPU into MIG instances, given its UUID and the shares in
    ‰; None: nobody may.
    """

    def __init__(
        self,
        node: str,
        read: Callable[[], Sequence[DeviceReading]],
        client: ApiClient | None = None,
        cut: Callable[[str, tuple[int, ...]], None] | None = None,
        *,
        interval: float = INTERVAL,
    ) -> None:
        self._node = ObjectKey("", node)
        self._read = read
        self._client = client
        self._cut = cut
        self._interval = interval
        self._readings: Sequence[DeviceReading] = ()
        self._pods = None if client is None else Informer(client, PODS, everywhere=True, keep=kept_of_pod)
        self._error = ""
        self._refused: set[tuple[str, tuple[int, ...]]] = set()

    @property
    def readings(self) -> Sequence[DeviceReading]:
        """What was read last."""
        return self._readings

    def users(self) -> dict[ObjectKey, SharePlacement]:
        """Return the shares of the pods on this node; from any thread."""
        if self._pods is None:
            return {}
        found = {}
        for key, raw in list(self._pods.objects.items()):
            pod = read_pod(raw)
            if isinstance(pod, SharePod) and pod.placement is not None and pod.placement.node == self._node.name:
                found[key] = pod.placement
        return found

    async def run(self) -> None:
        """Read and report until cancelled."""
        following = None if self._pods is None else asyncio.create_task(self._pods.run())
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._interval)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def look(self) -> None:
        """Read the GPUs once, report them, and cut those that are to be cut. Errors are logged once."""
        try:
            self._readings = await asyncio.to_thread(self._read)
            if self._client is not None:
                await self._report(self._client)
        except (DeviceError, KubernetesError) as error:
            if isinstance(error, KubernetesError) and error.status == CONFLICT:
                return  # somebody else has changed the node; the next look reports
            if str(error) != self._error:
                logger.warning("devices of %s: %s", self._node, error)
            self._error = str(error)
        else:
            self._error = ""

    async def _report(self, client: ApiClient) -> None:
        node = await client.get(NODES, self._node.name)
        if self._cut is not None and self._pods is not None and self._pods.is_synced:
            for device, shares in read_cuts(node).items():
                await self._recut(device, shares)
        text = write_devices(tuple(each.report for each in self._readings))
        if (node["metadata"].get("annotations") or {}).get(DEVICES) != text:
            change = {"resourceVersion": node["metadata"]["resourceVersion"], "annotations": {DEVICES: text}}
            await client.patch(NODES, self._node, {"metadata": change})

    async def _recut(self, device: str, shares: tuple[int, ...]) -> None:
        """Cut a GPU as it is asked, where nobody uses it and it is not cut so already."""
        assert self._cut is not None
        reading = next((each for each in self._readings if each.report.uuid == device), None)
        if reading is None or not reading.report.recut or reading.processes:
            return
        if sorted(shares) == sorted(one.share for one in reading.report.instances):
            return
        if any(placed.device == device for placed in self.users().values()) or (device, shares) in self._refused:
            return
        try:
            await asyncio.to_thread(self._cut, device, shares)
        except DeviceError as error:
            self._refused.add((device, shares))
            logger.warning("%s cannot be cut into %s ‰: %s", device, ", ".join(map(str, shares)), error)
        else:
            logger.info("%s is cut into %s ‰", device, ", ".join(map(str, shares)))
        self._readings = await asyncio.to_thread(self._read)
