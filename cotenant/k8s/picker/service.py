"""Serve the endpoint picker over gRPC, with the health services that the protocol names."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection

from grpc_health.v1 import health

from cotenant.errors import UnavailableError
from cotenant.k8s.picker.exchange import BrokenMessageError, Exchange
from cotenant.k8s.picker.metrics import PickerMetrics
from cotenant.k8s.picker.picker import Decision, EndpointPicker
from cotenant.live.access import Permission
from cotenant.live.grpc.call import Call, Method
from cotenant.live.grpc.health import HealthMethods
from cotenant.live.grpc.listener import GrpcListener
from cotenant.live.grpc.status import CallError, Status
from cotenant.live.http.request_handler import TOO_MUCH
from cotenant.live.limits import grpc_limits
from cotenant.protocol.ext_proc import SERVICE

RAPID_RESETS = 1 << 20  # within a second, of a gateway's connection: Envoy resets each call once it needs it no more
MEMORY = 1 << 30  # bytes of all bodies that are held
MAX_MESSAGE = 1 << 24  # bytes: Envoy sends bodies in chunks, but a buffered one at once


class PickerService:
    """Answer Envoy from a picker."""

    def __init__(self, picker: EndpointPicker, clock: Callable[[], float], metrics: PickerMetrics) -> None:
        self._picker = picker
        self._clock = clock
        self._metrics = metrics

    def listener(self, tls: ssl.SSLContext | None = None) -> GrpcListener:
        """Return what serves on a socket. tls: None to serve in the clear."""
        health_service = HealthMethods(
            {"": self.ready, "liveness": lambda: True, "readiness": self.ready, SERVICE: self.ready}
        )
        process = Method(stream=self._process, permission=Permission.PUBLIC, message_size=MAX_MESSAGE)
        return GrpcListener(
            {SERVICE: {"Process": process}, health.SERVICE_NAME: health_service.methods()},
            message_size=MAX_MESSAGE,
            tls=tls,
            limits=grpc_limits(MEMORY),
            rapid_resets=RAPID_RESETS,
        )

    def ready(self) -> bool:
        """Return whether a replica takes requests."""
        return self._picker.ready(self._clock()) > 0

    async def _process(self, call: Call) -> None:
        exchange, held = Exchange(self._pick), 0
        try:
            while (wire := await call.receive()) is not None:
                answers = exchange.handle(wire)
                if exchange.held != held:
                    call.keep(exchange.held - held)
                    held = exchange.held
                    if call.connection.shared.memory.exceeded:
                        raise UnavailableError(TOO_MUCH)
                for answer in answers:
                    call.write(answer)
        except BrokenMessageError as error:
            raise CallError(Status.INVALID_ARGUMENT, str(error)) from None

    def _pick(self, model: str | None, timeout: float | None, subset: Collection[str] | None) -> Decision:
        began = self._clock()
        decision = self._picker.pick(model, began, timeout=timeout, subset=subset)
        self._metrics.decided(decision, self._clock() - began)
        return decision
