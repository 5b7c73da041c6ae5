"""Serve inference over gRPC: Triton's service, with gRPC's health and reflection."""

from __future__ import annotations

import ssl

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from cotenant.live.access import Access
from cotenant.live.grpc.access import METHODS
from cotenant.live.grpc.health import INFERENCE_SERVICE, HealthMethods, reflection_methods
from cotenant.live.grpc.inference import InferenceMethods
from cotenant.live.grpc.listener import GrpcListener, Services
from cotenant.live.grpc.methods import ManagementMethods
from cotenant.live.limits import MAX_BODY, Limits, MemoryBudget
from cotenant.live.oip import Core


class GrpcServer(GrpcListener):
    """Serve a core over gRPC. The options are those of `GrpcListener`."""

    def __init__(
        self,
        core: Core,
        *,
        message_size: int = MAX_BODY,
        limits: Limits | None = None,
        memory: MemoryBudget | None = None,
        access: Access | None = None,
        tls: ssl.SSLContext | None = None,
        log_access: bool = False,
    ) -> None:
        super().__init__(
            _services(core),
            message_size=message_size,
            limits=limits,
            memory=memory,
            access=access,
            tls=tls,
            log_access=log_access,
        )


def _services(core: Core) -> Services:
    inference = ManagementMethods(core).methods() | InferenceMethods(core).methods()
    assert inference.keys() == METHODS.keys()
    return {
        INFERENCE_SERVICE: inference,
        health.SERVICE_NAME: HealthMethods({"": core.ready, INFERENCE_SERVICE: core.ready}).methods(),
        reflection.SERVICE_NAME: reflection_methods(),
    }
