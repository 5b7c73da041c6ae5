"""Name the kinds of objects that are read and written, as the API server's URLs do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

# An object as the API server sends it: JSON, decoded. What is decided upon is read out of it into types.
KubeObject = dict[str, Any]

GROUP = "cotenant.dev"
VERSION = "v1alpha1"


class Resource(msgspec.Struct, frozen=True):
    """Name a kind of objects. group: "" for the core's. plural: the kind's name in URLs."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Return what stands in ``apiVersion`` of an object."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of an object's URL, or that of a collection. namespace: None: all of them, or none."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/" + "/".join(parts)


CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
PODS = Resource("", "v1", "pods", "Pod")
POD_TEMPLATES = Resource("", "v1", "podtemplates", "PodTemplate")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
RESOURCE_CLAIMS = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim")
RESOURCE_SLICES = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", namespaced=False)
CUSTOM_RESOURCES = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
SERVED_MODELS = Resource(GROUP, VERSION, "servedmodels", "ServedModel")
DEVICE_POOLS = Resource(GROUP, VERSION, "devicepools", "DevicePool")


class ObjectKey(msgspec.Struct, frozen=True, order=True):
    """Tell objects of one kind apart. namespace: "" where the kind has none."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def key_of(each: Mapping[str, Any]) -> ObjectKey:
    """Return an object's key."""
    metadata = each["metadata"]
    return ObjectKey(metadata.get("namespace", ""), metadata["name"])


def version_of(each: Mapping[str, Any]) -> str:
    """Return an object's resource version: opaque, and another after each change."""
    version: str = each["metadata"]["resourceVersion"]
    return version
