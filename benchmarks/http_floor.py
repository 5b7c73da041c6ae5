"""Serve baselines for HTTP benchmarks.

One is raw uvicorn, the lower bound of an asyncio server in Python; the other is our HTTP front end with a core that
computes the identity in process.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any, cast

import uvicorn
import uvloop

from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.live.http import HttpServer
from cotenant.live.oip import Core, Done, InferRequest, InferResponse

ANSWER = (
    b'{"model_name":"identity","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,1],"data":[1]}]}'
)


class IdentityCore:
    """Implement as much of `oip.Core` as inference needs; its one model answers with its input at once."""

    def __init__(self) -> None:
        self._info = ModelInfo(
            name="identity",
            version="1",
            platform="onnxruntime_onnx",
            inputs=(TensorSpec("x", "FP32", (-1, -1)),),
            outputs=(TensorSpec("y", "FP32", (-1, -1)),),
            max_batch_size=64,
        )

    def model(self, name: str, version: str = "") -> ModelInfo:
        return self._info

    def allocate(self, size: int) -> None:
        """Allocate nothing: tensors are sent inline."""

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        return False

    def poll(self) -> None:
        """Do nothing: there are no workers."""

    def reject_unread(self, model: str, waited: float) -> None:
        """Count nothing."""

    def infer(self, request: InferRequest, done: Done, *, lost: float = 0.0) -> int:
        (x,) = request.inputs
        y = Tensor("y", x.datatype, x.shape, x.data)
        done(InferResponse(model="identity", version="1", id=request.id, outputs=(y,)))
        return 1

    def cancel(self, handle: int) -> None:
        """Do nothing: no request is ever pending."""


async def raw(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


async def serve_raw() -> None:
    config = uvicorn.Config(
        raw, port=0, loop="uvloop", http="httptools", access_log=False, log_level="critical", lifespan="off"
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    await task


async def serve_layer() -> None:
    server = HttpServer(cast(Core, IdentityCore()))
    print(f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}", flush=True)
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run({"raw": serve_raw, "layer": serve_layer}[sys.argv[1]]())
