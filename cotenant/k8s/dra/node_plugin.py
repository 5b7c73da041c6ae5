"""Run what a node needs: the driver, its sockets, and the publisher of its devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cotenant.errors import ConfigError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.dra.container_edits import ContainerOptions
from cotenant.k8s.dra.devices import DRIVER
from cotenant.k8s.dra.driver import Driver
from cotenant.k8s.dra.kubelet_plugin import KubeletPlugin
from cotenant.k8s.dra.publisher import PERIOD, Look, SlicePublisher

KUBELET = Path("/var/lib/kubelet")
CDI = Path("/var/run/cdi")


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """node: its name in the cluster. kubelet: the kubelet's folder. cdi: the folder where the container runtime looks
    for specifications. period: seconds between two looks at the devices."""

    node: str
    kubelet: Path = KUBELET
    cdi: Path = CDI
    container: ContainerOptions = ContainerOptions()
    period: float = PERIOD

    @property
    def directory(self) -> Path:
        """Return the folder of the driver's socket and checkpoint."""
        return self.kubelet / "plugins" / DRIVER

    @property
    def registry(self) -> Path:
        """Return the folder where the kubelet looks for plugins."""
        return self.kubelet / "plugins_registry"


class NodePlugin(msgspec.Struct, frozen=True):
    driver: Driver
    plugin: KubeletPlugin
    publisher: SlicePublisher
    publishing: asyncio.Task[None]


@asynccontextmanager
async def node_plugin(client: ApiClient, options: NodeOptions, look: Look) -> AsyncIterator[NodePlugin]:
    """Serve the kubelet and publish the devices within the block. look: finds the devices.

    Raises ConfigError for a checkpoint that cannot be read, and folders that cannot be written.
    """
    publisher = SlicePublisher(client, options.node, look, period=options.period)
    driver = Driver(client, options.node, options.directory, options.cdi, options.container, lambda: publisher.devices)
    try:
        for folder in (options.directory, options.cdi, options.registry):
            folder.mkdir(parents=True, exist_ok=True)
        driver.recover()
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; the driver needs to write into the folders of kubelet and CDI"
        ) from None
    await publisher.look()
    plugin = KubeletPlugin(driver, options.directory, options.registry)
    publishing = asyncio.create_task(publisher.run())
    try:
        await plugin.start()
        yield NodePlugin(driver, plugin, publisher, publishing)
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await plugin.stop()
