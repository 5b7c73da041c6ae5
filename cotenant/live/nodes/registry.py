"""Know the nodes: those that the settings list, and those that are added and removed while the server runs."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterator

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.errors import ConfigError
from cotenant.live.nodes.credentials import check_guarded, split_address
from cotenant.live.nodes.node import Node, NodeSettings
from cotenant.worker.arena import Arena

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")  # as Kubernetes and DNS have it


class Nodes:
    """Hold the nodes of a front end. All methods belong to the event loop.

    on_session: called when a node has answered, for the first time or again, and when one was removed: there may be
    other devices than before. One that is cut off is no reason: its devices are lost meanwhile. own: hardware ids of
    this machine's devices.
    """

    def __init__(self, settings: NodeSettings, own: Collection[str] = ()) -> None:
        self.on_session: Callable[[], None] = lambda: None
        self._settings = settings
        self._own = frozenset(own)
        self._nodes: dict[str, Node] = {}
        self._removed: dict[str, tuple[DeviceId, ...]] = {}  # devices that plans may still name
        self._arena: Arena | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._heard = asyncio.Event()

    def add(self, name: str, address: str) -> None:
        """Add a node, and dial it from now on. Harmless where it is there with that address. Raises ConfigError."""
        check_node(name, address, guarded=bool(self._settings.tokens) or self._settings.tls is not None)
        known = self._nodes.get(name)
        if known is not None and known.address == address:
            return
        if known is not None:
            self.remove(name)
        self._removed.pop(name, None)
        node = self._nodes[name] = Node(name, address, self._settings, self._changed, self._owner)
        node.arena = self._arena
        node.start()

    def remove(self, name: str) -> None:
        """Forget a node: what runs there is lost, and tried elsewhere. Harmless where it is not there."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self._removed[name] = node.devices()
        task = asyncio.get_running_loop().create_task(node.stop(f"{name} was removed"))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        self.on_session()

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def receive_into(self, arena: Arena) -> None:
        """Let what nodes send be received in an arena, where the front ends take answers from."""
        self._arena = arena
        for node in self:
            node.arena = arena

    def fleet(self) -> tuple[Kind, ...]:
        """Return the kinds of devices of all nodes that have answered."""
        return tuple(kind for node in self for kind in node.fleet())

    def lost(self) -> dict[DeviceId, str]:
        """Return why nothing can run on devices of nodes now."""
        lost = {device: f"{name} was removed" for name, devices in self._removed.items() for device in devices}
        for node in self:
            lost |= node.lost()
        return lost

    async def heard(self, patience: float) -> list[str]:
        """Wait until all nodes have answered once, for `patience` seconds at most; return why others have not."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        while (silent := [node for node in self if node.welcome is None]) and loop.time() < until:
            self._heard.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._heard.wait()
            except TimeoutError:
                break
        return [node.reason for node in silent]

    def let_go(self) -> None:
        """Begin to `close`."""
        task = asyncio.get_running_loop().create_task(self.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all sessions. Harmless where they have ended."""
        self.on_session = lambda: None
        await asyncio.gather(*self._stopping, *(node.stop("the front end stops") for node in self))

    def _owner(self, node: Node, hardware_id: str) -> str:
        """Return who has a device besides a node: another node that is up, or this server; empty where nobody has."""
        if hardware_id in self._own:
            return "this server itself"
        for other in self:
            if other is not node and other.is_up and other.welcome and hardware_id in other.welcome.hardware_ids:
                return other.name
        return ""

    def _changed(self, node: Node) -> None:
        self._heard.set()
        if self._nodes.get(node.name) is node and node.is_up:
            self.on_session()


def check_node(name: str, address: str, *, guarded: bool, place: str = "node") -> None:
    """Raise ConfigError for a name that identities cannot hold, an address that is none, and one beyond this machine
    that nothing guards."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{place}: {name!r} is not a valid node name: use letters, digits, '-' and '.', such as node-a"
        )
    host, _ = split_address(address, f"{place} {name}")
    check_guarded(host, f"{place} {name}", guarded=guarded)
