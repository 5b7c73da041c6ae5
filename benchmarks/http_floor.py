"""Serve baselines for HTTP benchmarks.

Raw uvicorn, the lower bound of an asyncio server in Python; uvicorn with an app that does what no server of the
protocol can leave out; and our HTTP front end with a core that computes the identity in process.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
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


class _Tensor(msgspec.Struct):
    name: str
    shape: tuple[int, ...]
    datatype: str
    data: list[float]


class _Request(msgspec.Struct):
    inputs: list[_Tensor]
    id: str = ""


_decoder = msgspec.json.Decoder(_Request)


async def protocol(scope: Any, receive: Any, send: Any) -> None:
    """Read a request, and compute the identity at once: without checks, a worker, batches or deadlines."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    (x,) = _decoder.decode(body).inputs
    y = np.array(x.data, np.float32).reshape(x.shape).copy()
    output = {"name": "y", "datatype": "FP32", "shape": y.shape, "data": y.ravel().tolist()}
    answer = msgspec.json.encode({"model_name": "identity", "model_version": "1", "outputs": [output]})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def serve_uvicorn(app: Any) -> None:
    config = uvicorn.Config(
        app, port=0, loop="uvloop", http="httptools", access_log=False, log_level="critical", lifespan="off"
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
    servers: dict[str, Callable[[], Coroutine[Any, Any, None]]]
    servers = {"raw": partial(serve_uvicorn, raw), "protocol": partial(serve_uvicorn, protocol), "layer": serve_layer}
    uvloop.run(servers[sys.argv[1]]())
