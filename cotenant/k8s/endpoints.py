"""Lead a Service to the front end that leads, by an EndpointSlice that this one writes. Pure.

Readiness could not: a front end that stands by would never be ready, a Deployment never rolled out, and no node with
the one that leads could be drained.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from cotenant.errors import ConfigError
from cotenant.k8s.resource import KubeObject

SERVICE_LABEL = "kubernetes.io/service-name"
MANAGED_LABEL = "endpointslice.kubernetes.io/managed-by"
MANAGER = "cotenant.dev"


def endpoint_slice(service: str, address: str, ports: Mapping[str, int]) -> KubeObject:
    """Return the slice of a Service: one address, and its ports by name. Raises ConfigError for an address that others
    cannot reach."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError(f"kubernetes.address: {address!r} is not an IP address") from None
    if ip.is_loopback or ip.is_unspecified:
        raise ConfigError(f"kubernetes.address: {address} is of this machine alone; set the address of the pod")
    return {
        "metadata": {"name": service, "labels": {SERVICE_LABEL: service, MANAGED_LABEL: MANAGER}},
        "addressType": f"IPv{ip.version}",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in sorted(ports.items())],
    }


def differs(found: KubeObject, wanted: KubeObject) -> bool:
    """Tell whether a slice that was found leads elsewhere than it should."""
    labels = found["metadata"].get("labels") or {}
    fields = ("addressType", "endpoints", "ports")
    return any(labels.get(key) != value for key, value in wanted["metadata"]["labels"].items()) or any(
        found.get(key) != wanted[key] for key in fields
    )
