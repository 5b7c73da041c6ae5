"""Tell of nodes: to people, programs and Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cotenant.backends import Backend
from cotenant.live.nodes.cluster import Cluster


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a node. up: it has a session. reason: why not. round_trip: seconds to the node and back; 0 where that is
    not known. sessions: that have begun. devices: how many it has, by kind."""

    name: str
    address: str
    up: bool
    reason: str
    round_trip: float
    sessions: int
    devices: dict[str, int]

    def row(self) -> list[str]:
        """Return it as text: name, address, state, devices, round trip, sessions, why it has none."""
        devices = ", ".join(f"{count} × {kind}" for kind, count in self.devices.items())
        trip = f"{1e3 * self.round_trip:.2f} ms" if self.round_trip else "-"
        state = "up" if self.up else "down"
        return [self.name, self.address, state, devices or "-", trip, str(self.sessions), self.reason]


def node_statuses(backend: Backend) -> tuple[NodeStatus, ...]:
    """Return the status of all nodes; none where devices are of this machine alone."""
    if not isinstance(backend, Cluster):
        return ()
    return tuple(
        NodeStatus(
            name=node.name,
            address=node.address,
            up=node.is_up,
            reason="" if node.is_up else node.reason,
            round_trip=node.round_trip,
            sessions=node.sessions,
            devices={} if node.welcome is None else {kind.name: kind.count or 0 for kind in node.welcome.kinds},
        )
        for node in backend.nodes
    )


def node_families(nodes: Iterable[NodeStatus]) -> Iterator[Metric]:
    """Yield the metrics of nodes."""
    up = GaugeMetricFamily("cotenant_node_up", "Whether a node has a session.", labels=["node"])
    trip = GaugeMetricFamily(
        "cotenant_node_round_trip_seconds",
        "Time to a node and back, lower quartile of the handshake and the last heartbeats.",
        labels=["node"],
    )
    sessions = CounterMetricFamily("cotenant_node_sessions", "Sessions with a node that have begun.", labels=["node"])
    for node in nodes:
        up.add_metric([node.name], float(node.up))
        sessions.add_metric([node.name], node.sessions)
        if node.round_trip:
            trip.add_metric([node.name], node.round_trip)
    yield from (up, trip, sessions)
