"""Read the settings of the controller on Kubernetes."""

from __future__ import annotations

import re
import socket

import msgspec

from cotenant.config.toml import parse_target
from cotenant.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SHORTEST_LEASE, LONGEST_LEASE = 1.0, 300.0  # seconds


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Configure the controller.

    namespace: of the resources, the lease and the agents; None: that of the pod, or of the kubeconfig. lease: its name;
    front ends with one lease take turns. identity: of this front end; None: the name of the host, which a pod's is.
    lease_duration: seconds without a renewal after which another takes over. service: the Service that is led to the
    front end that leads; None: none is. address: of this front end's pod; None: that of its host's name. agents: the
    label selector of their pods.
    """

    namespace: str | None = None
    lease: str = "cotenant"
    identity: str | None = None
    lease_duration: float = 15.0
    service: str | None = None
    address: str | None = None
    agents: str = "app.kubernetes.io/name=cotenant,app.kubernetes.io/component=agent"

    @property
    def own_identity(self) -> str:
        """Return what this front end is called in the lease."""
        return self.identity or socket.gethostname()

    def own_address(self) -> str:
        """Return the address that others reach this front end by. Raises ConfigError."""
        if self.address is not None:
            return self.address
        try:
            return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ConfigError(
                f"kubernetes.address: the name of this host has no address ({error.strerror}); set one"
            ) from None


class KubernetesEntry(msgspec.Struct, forbid_unknown_fields=True):
    namespace: str | None = None
    lease: str = "cotenant"
    identity: str | None = None
    lease_duration: str | int | float = "15s"
    service: str | None = None
    address: str | None = None
    agents: str = "app.kubernetes.io/name=cotenant,app.kubernetes.io/component=agent"


def read_kubernetes(entry: KubernetesEntry, place: str) -> KubernetesSettings:
    """Check the settings of the controller. Raises ConfigError."""
    for key, name in (("namespace", entry.namespace), ("lease", entry.lease), ("service", entry.service)):
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigError(f"{place}.{key}: {name!r} is not a name; use lower-case letters, digits and hyphens")
    duration = parse_target(entry.lease_duration, f"{place}.lease_duration")
    if not SHORTEST_LEASE <= duration <= LONGEST_LEASE:
        raise ConfigError(
            f"{place}.lease_duration: {entry.lease_duration!r} is out of range; write {SHORTEST_LEASE:g}s to "
            f"{LONGEST_LEASE:g}s"
        )
    return KubernetesSettings(
        namespace=entry.namespace,
        lease=entry.lease,
        identity=entry.identity,
        lease_duration=duration,
        service=entry.service,
        address=entry.address,
        agents=entry.agents,
    )
