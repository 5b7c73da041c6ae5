"""The gRPC front end: Triton's GRPCInferenceService, with gRPC's health and reflection services.

It is an HTTP/2 server of its own, since the official library costs a small request more than all the rest of the server
(docs/decisions.md). Imports go one way: `frames` (HTTP/2's wire form) and `status` (gRPC's codes), then `headers` (of
calls and responses), `call` (one call: its messages, deadline and flow control), `misuse` (floods of frames),
`connection` (frames to calls), `tensors` (messages of inference), `inference`, `methods` and `health` (what is served),
`listener` (the socket), `server`.
"""

from __future__ import annotations

from cotenant.live.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
