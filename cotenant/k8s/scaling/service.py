"""Answer the calls of the instance controller over gRPC."""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health

from cotenant.control.scaling.provisioning import Instance, Provision
from cotenant.errors import ConfigError
from cotenant.k8s.grpc_method import MAX_MESSAGE, unary_method
from cotenant.k8s.scaling.instance_pods import InstancePods
from cotenant.live.access import Access, Permission
from cotenant.live.grpc.health import HealthMethods
from cotenant.live.grpc.listener import GrpcListener
from cotenant.protocol.instances import SERVICE, instances

logger = logging.getLogger(__name__)


class InstanceService:
    """Provision, release and list instances. Without tokens only callers of this machine may change any."""

    def __init__(self, pods: InstancePods) -> None:
        self._pods = pods

    def listener(self, access: Access | None = None, tls: ssl.SSLContext | None = None) -> GrpcListener:
        """Return what serves on a socket. access: whose tokens are known. tls: None to serve in the clear."""
        calls: dict[str, tuple[Any, Callable[[Any], Any], Permission]] = {
            "Provision": (instances.ProvisionRequest, self._provision, Permission.CONTROL),
            "Release": (instances.ReleaseRequest, self._release, Permission.CONTROL),
            "List": (instances.ListRequest, self._list, Permission.OBSERVE),
        }
        methods = {name: unary_method(*call) for name, call in calls.items()}
        healthy = HealthMethods({"": lambda: True, SERVICE: lambda: True}).methods()
        services = {SERVICE: methods, health.SERVICE_NAME: healthy}
        return GrpcListener(services, message_size=MAX_MESSAGE, access=access, tls=tls)

    async def _provision(self, request: Any) -> Any:
        for place, text in (("model", request.model), ("kind", request.kind)):
            if not text:
                raise ConfigError(f"{place}: missing")
        for place, value in (("slo_ms", request.slo_ms), ("qps", request.qps)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{place}: {value:g} must be above 0 and finite")
        wanted = Provision(
            name=request.name, model=request.model, kind=request.kind, slo=request.slo_ms / 1e3, rate=request.qps
        )
        found, created = await self._pods.provision(wanted)
        if created:
            logger.info("provisioned %s: %s on %s", found.name, found.model, found.kind)
        return instances.ProvisionResponse(instance=_message(found), created=created)

    async def _release(self, request: Any) -> Any:
        released = await self._pods.release(request.name)
        if released:
            logger.info("released %s", request.name)
        return instances.ReleaseResponse(released=released)

    async def _list(self, request: Any) -> Any:
        return instances.ListResponse(instances=map(_message, await self._pods.list()))


def _message(of: Instance) -> Any:
    state = instances.pool.FindEnumTypeByName("cotenant.instances.v1.State").values_by_name[of.state.upper()].number
    return instances.Instance(name=of.name, model=of.model, kind=of.kind, state=state, reason=of.reason)
