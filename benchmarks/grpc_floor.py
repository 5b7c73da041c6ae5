"""Serve baselines for the gRPC benchmark.

Two are bare servers of the official library that return fixed bytes, on asyncio and with threads: the lower bounds of
what is built on it. The third is our gRPC front end with a core that computes the identity in process.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import grpc.aio
import uvloop

from benchmarks.http_floor import IdentityCore
from cotenant.live.grpc import GrpcServer
from cotenant.live.oip import Core
from cotenant.protocol import messages

SERVICE = "inference.GRPCInferenceService"

REQUEST: bytes = messages.ModelInferRequest(
    model_name="identity",
    inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 16]}],
    raw_input_contents=[bytes(64)],
).SerializeToString()
ANSWER: bytes = messages.ModelInferResponse(
    model_name="identity",
    model_version="1",
    outputs=[{"name": "y", "datatype": "FP32", "shape": [1, 16]}],
    raw_output_contents=[bytes(64)],
).SerializeToString()


def echo(wire: bytes, context: Any) -> bytes:
    return ANSWER


async def echo_aio(wire: bytes, context: Any) -> bytes:
    return ANSWER


def handlers(function: Any) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": grpc.unary_unary_rpc_method_handler(function)})


async def serve_aio() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers(echo_aio),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def serve_threads() -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((handlers(echo),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


async def serve_layer() -> None:
    server = GrpcServer(cast(Core, IdentityCore()))
    print(f"127.0.0.1:{await server.listen('127.0.0.1', 0)}", flush=True)
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    match sys.argv[1]:
        case "aio":
            uvloop.run(serve_aio())
        case "threads":
            serve_threads()
        case "layer":
            uvloop.run(serve_layer())
