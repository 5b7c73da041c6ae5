"""What the server is measured against: raw uvicorn, the least that any asyncio server in Python costs; and our HTTP
layer alone, before a core that computes the identity in process."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import uvicorn
import uvloop

from cotenant.live.http import HttpServer
from tests.live.stub import StubCore

ANSWER = (
    b'{"model_name":"identity","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,1],"data":[1]}]}'
)


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
    core = StubCore()
    core.keep_requests = False
    server = HttpServer(core)
    print(f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}", flush=True)
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run({"raw": serve_raw, "layer": serve_layer}[sys.argv[1]]())
