"""What a small JSON infer costs the HTTP layer alone, beside the least that any asyncio server in Python costs.

The floor is raw uvicorn with an ASGI app that reads the body and answers fixed bytes. Ours parses, checks and answers
through a core that computes the identity in process. Runs alternate; the figure is the median of the rounds.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
from typing import Any

import uvicorn
import uvloop

from benchmarks.harness import SMALL, drive, serving
from cotenant.live.http import HttpServer
from tests.live.stub import StubCore

ROUNDS = 5
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


async def serve_ours() -> None:
    core = StubCore()
    core.keep_requests = False
    server = HttpServer(core)
    print(f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}", flush=True)
    gc.freeze()
    await asyncio.Event().wait()


def main() -> None:
    costs: dict[str, list[float]] = {"raw": [], "ours": []}
    with serving("-m", "benchmarks.floor", "raw") as floor, serving("-m", "benchmarks.floor", "ours") as ours:
        for pid, url in (floor, ours):
            drive(pid, f"{url}/v2/models/identity/infer", SMALL, seconds=1)
        for _ in range(ROUNDS):
            for name, (pid, url) in {"raw": floor, "ours": ours}.items():
                load = drive(pid, f"{url}/v2/models/identity/infer", SMALL, seconds=2)
                assert not load.errors
                costs[name].append(load.cpu * 1e6)
    least, cost = (statistics.median(costs[name]) for name in ("raw", "ours"))
    print(
        f"floor: {cost:.1f} µs of processor time for a small JSON infer in the HTTP layer, "
        f"raw uvicorn {least:.1f} µs ({cost / least:.2f} times)"
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        uvloop.run(serve_raw() if sys.argv[1] == "raw" else serve_ours())
