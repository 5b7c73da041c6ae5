"""Be the devices of this machine and of nodes together, for all that plans and observes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cotenant.backends import Backend, Launch
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.live.nodes.registry import Nodes


class Cluster:
    """Add the devices of nodes to a backend's. Partitions are opened where they are: here by `local`, on nodes by the
    nodes. ceilings: for measurements."""

    def __init__(self, local: Backend, nodes: Nodes, *, ceilings: bool = False) -> None:
        self.name = local.name
        self.local = local
        self.nodes = nodes
        self.ceilings = ceilings

    @property
    def divides(self) -> bool:
        return self.local.divides

    def fleet(self) -> tuple[Kind, ...]:
        return (*self.local.fleet(), *self.nodes.fleet())

    def isolation(self) -> str:
        told = [self.local.isolation()] if self.local.fleet() else []
        places: dict[str, list[str]] = {}  # nodes by what keeps their workers to their shares
        for node in self.nodes:
            if node.welcome is not None:
                places.setdefault(node.welcome.isolation, []).append(node.name)
        told += [f"{', '.join(names)}: {words}" for words, names in places.items()]
        return "; ".join(told) or self.local.isolation()

    def capacity_fingerprint(self) -> str:
        return self.local.capacity_fingerprint()

    def hardware_ids(self) -> tuple[str, ...]:
        return self.local.hardware_ids()

    def with_ceilings(self) -> Cluster:
        return Cluster(self.local.with_ceilings(), self.nodes, ceilings=True)

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return self.local.open(lane, share, leaving)

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        return self.local.resize(shares)

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        self.local.on_worker_started(lane, pid)

    def close(self, lane: LaneId) -> None:
        self.local.close(lane)

    def open_job(self, device: DeviceId) -> Launch:
        return self.local.open_job(device)

    def lost(self) -> dict[DeviceId, str]:
        return {**self.local.lost(), **self.nodes.lost()}

    def stop(self) -> None:
        self.local.stop()


def divides(backend: Backend, device: DeviceId) -> bool:
    """Return whether several workers of a partition of a device divide its share (`Backend.divides`)."""
    if not device.node or not isinstance(backend, Cluster):
        return backend.divides
    node = backend.nodes.get(device.node)
    return node is None or node.welcome is None or node.welcome.divides
