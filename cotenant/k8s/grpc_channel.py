"""Open channels to gRPC services of this package, and call their methods."""

from __future__ import annotations

from typing import Any

import grpc

MAX_ANSWER = 1 << 26  # bytes


def open_channel(address: str, authority: bytes | None) -> grpc.aio.Channel:
    """Open a channel to ``host:port``. authority: certificates (PEM) of who signed that of the service; None: in the
    clear."""
    options = [("grpc.max_receive_message_length", MAX_ANSWER)]
    if authority is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options)


def unary_call(channel: grpc.aio.Channel, path: str, request: Any, answer: Any) -> Any:
    """Return the callable of a method, for requests of one type and answers of another. path: ``SERVICE/METHOD``."""
    return channel.unary_unary(
        f"/{path}", request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
    )
