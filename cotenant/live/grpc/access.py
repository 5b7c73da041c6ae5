"""Say what each method of gRPC needs of its caller, and who that is.

Health and reflection are for everybody: they tell whether the server is ready, and what the protocol is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    "SystemSharedMemoryRegister": Permission.SHARE,
    "SystemSharedMemoryUnregister": Permission.SHARE,
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


def caller_of(peer: object, metadata: Mapping[bytes, bytes]) -> Caller:
    """Return who makes a call. peer: as a socket tells it. No browser speaks gRPC; what has an origin is no program of
    the operator."""
    return Caller(
        peer=str(peer[0]) if isinstance(peer, tuple) else "",
        origin=metadata.get(b"origin", b"").decode("latin-1"),
        proxied=not PROXIED.isdisjoint(metadata),
        authorization=metadata.get(b"authorization", b"").decode("utf-8", "surrogateescape"),
    )
