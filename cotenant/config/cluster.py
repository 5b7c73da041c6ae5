"""Read the settings of nodes: those that a server dials, what both prove to each other, and what a node offers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.config.toml import parse_target
from cotenant.core import units
from cotenant.errors import ConfigError


class NodeAddress(msgspec.Struct, frozen=True):
    """Name a node, and say where it listens, as ``host:port``."""

    name: str
    address: str


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configure nodes for both ends. nodes: those that a server dials. patience: seconds that its start waits for them.

    token: a file of tokens, one a line; a server proves the first, a node takes any. certificate, key, authority: PEM
    files: what this end shows, and who has to have signed what the other shows; None: no TLS.
    lease: a file that several front ends see, of which the one that holds it serves; None: there is one.
    """

    nodes: tuple[NodeAddress, ...] = ()
    patience: float = 10.0
    token: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    lease: Path | None = None


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configure what `cotenant node` offers. cache: folder of the models that are sent to it; None: beside the profile
    cache. cache_size: bytes of these. model_repository: one that the server sees, too; None: all models are sent."""

    host: str = "127.0.0.1"
    port: int = 8010
    cache: Path | None = None
    cache_size: int = 20 << 30
    model_repository: Path | None = None


class NodeAddressEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    address: str


class ClusterEntry(msgspec.Struct, forbid_unknown_fields=True):
    patience: str | int | float = "10s"
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    authority: str | None = None
    lease: str | None = None


class NodeEntry(msgspec.Struct, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8010
    cache: str | None = None
    cache_size: str = "20GiB"
    model_repository: str | None = None


def read_cluster_settings(
    nodes: Sequence[NodeAddressEntry], entry: ClusterEntry, place: str, base: Path
) -> ClusterSettings:
    """Check the nodes of a server, and what it proves to them. base: what paths are relative to. Raises ConfigError."""
    files = {"certificate": entry.certificate, "key": entry.key, "authority": entry.authority}
    missing = [name for name, file in files.items() if file is None]
    if 0 < len(missing) < len(files):
        raise ConfigError(
            f"{place}: cluster.{missing[0]}: it is missing; certificates are of both ends, which takes certificate, key"
            " and authority"
        )
    for i, node in enumerate(nodes):
        for other in nodes[:i]:
            if node.name == other.name or node.address == other.address:
                raise ConfigError(
                    f"{place}: nodes[{i}]: {node.name!r} at {node.address!r} has the name or the address of "
                    f"{other.name!r}; keep one entry"
                )

    def path(file: str | None) -> Path | None:
        return None if file is None else base / file

    return ClusterSettings(
        nodes=tuple(NodeAddress(node.name, node.address) for node in nodes),
        patience=parse_target(entry.patience, f"{place}: cluster.patience"),
        token=path(entry.token),
        certificate=path(entry.certificate),
        key=path(entry.key),
        authority=path(entry.authority),
        lease=path(entry.lease),
    )


def read_node_settings(entry: NodeEntry, place: str, base: Path) -> NodeSettings:
    """Check what a node offers. base: what paths are relative to. Raises ConfigError."""
    if not 0 <= entry.port <= 65535:
        raise ConfigError(f"{place}.port: {entry.port} is not a port; write 0 (any free port) to 65535")
    return NodeSettings(
        host=entry.host,
        port=entry.port,
        cache=None if entry.cache is None else base / entry.cache,
        cache_size=units.parse_memory(entry.cache_size, f"{place}.cache_size"),
        model_repository=None if entry.model_repository is None else base / entry.model_repository,
    )
