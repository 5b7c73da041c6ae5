"""Say what each method of gRPC needs of its caller, and who that is.

Health and reflection are for everybody: they tell whether the server is ready, and what the protocol is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import grpc.aio

from cotenant.live.access import Caller, Permission
from cotenant.live.http.request_cycle import PROXIED

Needed = Permission | Callable[[Any], Permission]  # of a message, where that depends on it


def _settings(message: Any) -> Permission:
    """Return what it takes to read settings, or to change some."""
    return Permission.CONTROL if message.settings else Permission.OBSERVE


METHODS: Mapping[str, Needed] = {
    "ServerLive": Permission.PUBLIC,
    "ServerReady": Permission.PUBLIC,
    "ModelReady": Permission.METADATA,
    "ServerMetadata": Permission.METADATA,
    "ModelMetadata": Permission.METADATA,
    "ModelConfig": Permission.METADATA,
    "ModelStatistics": Permission.OBSERVE,
    "ModelInfer": Permission.INFER,
    "ModelStreamInfer": Permission.INFER,
    "RepositoryIndex": Permission.METADATA,
    "RepositoryModelLoad": Permission.CONTROL,
    "RepositoryModelUnload": Permission.CONTROL,
    "SystemSharedMemoryStatus": Permission.METADATA,
    "SystemSharedMemoryRegister": Permission.INFER,
    "SystemSharedMemoryUnregister": Permission.INFER,
    "CudaSharedMemoryStatus": Permission.METADATA,
    "CudaSharedMemoryRegister": Permission.INFER,
    "CudaSharedMemoryUnregister": Permission.INFER,
    "TraceSetting": _settings,
    "LogSettings": _settings,
}


def permission_of(method: str, message: Any) -> Permission:
    """Return what a call needs."""
    needed = METHODS[method]
    return needed if isinstance(needed, Permission) else needed(message)


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """Return who makes a call. No browser speaks gRPC; what has an origin is no program of the operator."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    kind, _, rest = unquote(context.peer()).partition(":")
    peer = rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
    return Caller(
        peer=peer,
        origin=metadata.get("origin", ""),
        proxied=any(name.decode() in metadata for name in PROXIED),
        authorization=metadata.get("authorization", ""),
    )
