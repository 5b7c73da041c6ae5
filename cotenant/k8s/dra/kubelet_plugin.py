"""Serve the kubelet over two Unix sockets: one on which it finds and registers the driver, one on which it has claims
prepared."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from cotenant.errors import ConfigError
from cotenant.k8s.dra.container_edits import cdi_device_ids
from cotenant.k8s.dra.devices import DRIVER
from cotenant.k8s.dra.driver import ClaimReference, Driver
from cotenant.k8s.dra.preparation import PreparedClaim
from cotenant.protocol import Messages
from cotenant.protocol.kubelet import DRA_SERVICE, DRA_VERSION, REGISTRATION_SERVICE, dra, registration

logger = logging.getLogger(__name__)

PLUGIN_TYPE: Final = "DRAPlugin"
SOCKET: Final = "dra.sock"
REGISTRATION_SOCKET: Final = f"{DRIVER}-reg.sock"
LONGEST_PATH: Final = 107  # bytes of a Unix socket's path
GRACE: Final = 5.0  # seconds for calls that are being answered when the plugin stops

Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Awaitable[Any]]


class KubeletPlugin:
    """Serve a driver. directory: where its socket is. registry: where the kubelet looks for plugins."""

    def __init__(self, driver: Driver, directory: Path, registry: Path) -> None:
        self._driver = driver
        self._socket = directory / SOCKET
        self._registration_socket = registry / REGISTRATION_SOCKET
        self._servers: list[grpc.aio.Server] = []
        self._registered: bool | None = None

    @property
    def socket(self) -> Path:
        """Return the socket on which claims are prepared."""
        return self._socket

    @property
    def is_registered(self) -> bool | None:
        """Whether the kubelet has taken the driver; None as long as it has not said."""
        return self._registered

    async def start(self) -> None:
        """Serve. The socket for claims is there before the kubelet can hear of it. Raises ConfigError."""
        claims = {"NodePrepareResources": self._prepare, "NodeUnprepareResources": self._unprepare}
        self._servers.append(await _serve(self._socket, DRA_SERVICE, dra, claims))
        plugin = {"GetInfo": self._info, "NotifyRegistrationStatus": self._notified}
        self._servers.append(await _serve(self._registration_socket, REGISTRATION_SERVICE, registration, plugin))

    async def stop(self) -> None:
        """Leave the kubelet's registry, answer what was asked, and stop."""
        self._registration_socket.unlink(missing_ok=True)
        for server in reversed(self._servers):
            await server.stop(GRACE)
        self._servers.clear()
        self._socket.unlink(missing_ok=True)

    async def _info(self, request: Any, context: Context) -> Any:
        return registration.PluginInfo(
            type=PLUGIN_TYPE, name=DRIVER, endpoint=str(self._socket), supported_versions=[DRA_VERSION]
        )

    async def _notified(self, request: Any, context: Context) -> Any:
        self._registered = request.plugin_registered
        if request.plugin_registered:
            logger.info("registered with the kubelet")
        else:
            logger.error("the kubelet does not take this driver: %s", request.error)
        return registration.RegistrationStatusResponse()

    async def _prepare(self, request: Any, context: Context) -> Any:
        outcomes = await self._driver.prepare([_reference(each) for each in request.claims])
        response = dra.NodePrepareResourcesResponse()
        for uid, outcome in outcomes.items():
            answer = response.claims[uid]
            if isinstance(outcome, PreparedClaim):
                answer.devices.extend(self._devices(outcome))
            else:
                answer.error = str(outcome)
        return response

    async def _unprepare(self, request: Any, context: Context) -> Any:
        outcomes = await self._driver.unprepare([_reference(each) for each in request.claims])
        response = dra.NodeUnprepareResourcesResponse()
        for uid, error in outcomes.items():
            response.claims[uid].error = "" if error is None else str(error)
        return response

    def _devices(self, claim: PreparedClaim) -> list[Any]:
        return [
            dra.Device(
                request_names=[each.request.partition("/")[0]],
                pool_name=each.pool,
                device_name=each.device,
                cdi_device_ids=cdi_device_ids(claim, each, self._driver.options),
            )
            for each in claim.devices
        ]


def _reference(claim: Any) -> ClaimReference:
    return ClaimReference(uid=claim.uid, namespace=claim.namespace, name=claim.name)


async def _serve(path: Path, service: str, messages: Messages, methods: Mapping[str, Method]) -> grpc.aio.Server:
    """Serve methods of one service on a Unix socket. A socket that a former process has left is replaced."""
    if len(bytes(path)) > LONGEST_PATH:
        raise ConfigError(f"{path}: is longer than the {LONGEST_PATH} bytes of a socket's path; choose another folder")
    by_name = {each.name: each for each in messages.pool.FindServiceByName(service).methods}
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: grpc.unary_unary_rpc_method_handler(
            method,
            request_deserializer=getattr(messages, by_name[name].input_type.name).FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, method in methods.items()
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path.absolute()}")
        await server.start()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"cannot serve on {path}: {error}; the driver needs to write there") from None
    return server
