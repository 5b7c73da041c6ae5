"""Write a line of the access log for each call of gRPC."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cotenant.core.units import show_seconds
from cotenant.live.grpc.access import caller_of
from cotenant.live.grpc.status import Status

if TYPE_CHECKING:
    from cotenant.live.grpc.connection import Connection
    from cotenant.live.grpc.headers import CallHead

access = logging.getLogger("cotenant.access")


def log_call(connection: Connection, head: CallHead, status: Status, size: int, seconds: float) -> None:
    """Log a call that has ended, where there is an access log. size: of the messages that it was answered with, in
    bytes."""
    if not connection.shared.log_access:
        return
    transport = connection.transport
    peer = caller_of(None if transport is None else transport.get_extra_info("peername"), head.metadata).peer
    path = head.path.decode("latin-1")
    fields = {
        "peer": peer,
        "method": "POST",
        "url": path,
        "status": 200,  # of HTTP
        "grpc_status": status.name,
        "bytes": size,
        "seconds": seconds,
    }
    access.info("%s gRPC %s %s %d B %s", peer, path, status.name, size, show_seconds(seconds), extra={"fields": fields})
