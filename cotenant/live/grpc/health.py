"""Serve gRPC's health and reflection services, for probes such as grpc_health_probe and tools such as grpcurl."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from cotenant.live.access import Permission
from cotenant.live.grpc.call import Call, Method
from cotenant.live.grpc.status import CallError, Status
from cotenant.protocol import messages

INFERENCE_SERVICE = "inference.GRPCInferenceService"
WATCH_INTERVAL = 1.0  # seconds between two readings of a watched status

_Status = health_pb2.HealthCheckResponse.ServingStatus
for _file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
    messages.pool.AddSerializedFile(_file.serialized_pb)


class HealthMethods:
    """Tell which services are ready. services: by name, whether each is; "" is the server as a whole.

    They are asked each time. The package's own servicer wants to be told of every change, and when one watcher of a
    service leaves, it forgets the others.
    """

    def __init__(self, services: Mapping[str, Callable[[], bool]]) -> None:
        self._services = services

    def methods(self) -> dict[str, Method]:
        """Return all of them by name."""
        return {
            "Check": Method(unary=self._check, permission=Permission.PUBLIC),
            "Watch": Method(stream=self._watch, permission=Permission.PUBLIC),
        }

    def _check(self, call: Call, wire: bytes) -> None:
        try:
            request = _parse(health_pb2.HealthCheckRequest, wire)
            status = self._status(request.service)
            if status == _Status.SERVICE_UNKNOWN:
                raise CallError(Status.NOT_FOUND, f"unknown service {request.service!r}")
        except CallError as error:
            call.fail(error)
        else:
            call.respond(health_pb2.HealthCheckResponse(status=status).SerializeToString())

    async def _watch(self, call: Call) -> None:
        request = _parse(health_pb2.HealthCheckRequest, await call.receive() or b"")
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                await call.send(health_pb2.HealthCheckResponse(status=status).SerializeToString())
            await asyncio.sleep(WATCH_INTERVAL)

    def _status(self, service: str) -> Any:
        ready = self._services.get(service)
        if ready is None:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if ready() else _Status.NOT_SERVING


def reflection_methods() -> dict[str, Method]:
    """Return the methods that tell services, methods and messages. They are the package's own."""
    services = (INFERENCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    servicer = reflection.ReflectionServicer(services, messages.pool)

    async def tell(call: Call) -> None:
        while (wire := await call.receive()) is not None:
            requests = iter((_parse(reflection_pb2.ServerReflectionRequest, wire),))
            for answer in servicer.ServerReflectionInfo(requests, None):
                await call.send(answer.SerializeToString())

    return {"ServerReflectionInfo": Method(stream=tell, permission=Permission.PUBLIC)}


def _parse(kind: Any, wire: bytes) -> Any:
    try:
        message: Message = kind.FromString(wire)
    except DecodeError:
        raise CallError(Status.INTERNAL, f"not the message {kind.DESCRIPTOR.full_name}") from None
    return message
