"""Serve gRPC's health and reflection services, for probes such as grpc_health_probe and tools such as grpcurl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from cotenant.live.oip import Core
from cotenant.protocol import messages

INFERENCE_SERVICE = "inference.GRPCInferenceService"
WATCH_INTERVAL = 1.0  # seconds between two readings of a watched status

_Status = health_pb2.HealthCheckResponse.ServingStatus
_Context = grpc.aio.ServicerContext[Any, Any]


def add_health_and_reflection(server: grpc.aio.Server, core: Core) -> None:
    """Add health (whether the core is ready) and reflection (services, methods and messages) to a gRPC server."""
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(core), server)
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        messages.pool.AddSerializedFile(file.serialized_pb)
    services = (INFERENCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(services, server, messages.pool)


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Tell the readiness of a core as that of the server and of its inference service.

    The core is asked each time. The package's own servicer wants to be told of every change, and when one watcher of a
    service leaves, it forgets the others.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Check(self, request: Any, context: _Context) -> Any:  # noqa: N802
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: _Context) -> AsyncIterator[Any]:  # noqa: N802
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_INTERVAL)

    def _status(self, service: str) -> Any:
        if service not in ("", INFERENCE_SERVICE):
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._core.ready() else _Status.NOT_SERVING
