"""`cotenant endpoint-picker` as a process, before a server with real workers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.request
from pathlib import Path

import grpc
import uvloop

from cotenant.backends.cpu import Cpu
from cotenant.live.http import HttpServer
from cotenant.live.server import Server
from tests.k8s.eventually import eventually
from tests.k8s.picker import envoy
from tests.k8s.picker.envoy import Mode
from tests.k8s.picker.test_service import exchange
from tests.live.deployment import repository, sample_deployment

INFER = "/v2/models/identity/infer"


def test_command_sends_requests_to_a_real_server_until_it_drains(tmp_path: Path) -> None:
    async def main() -> None:
        root = repository(tmp_path)
        deployment = sample_deployment(root)

        async def prepare(*wanted: object) -> None:
            raise AssertionError("nothing is loaded")

        server = Server(deployment, Cpu(), prepare)  # type: ignore[arg-type]
        http = HttpServer(server, admission=server.admission)
        port = await http.listen("127.0.0.1", 0)
        await server.start()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cotenant", "endpoint-picker", f"127.0.0.1:{port}"),
            *("--port=0", "--metrics-port=0", "--interval=20ms", "--json"),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            up = json.loads(await process.stdout.readline())
            async with grpc.aio.insecure_channel(up["address"]) as channel:

                async def asked(path: str = INFER) -> str:
                    [answer] = await exchange(channel, envoy.headers(path, Mode.NONE), answers=1)
                    if answer.HasField("immediate_response"):
                        return str(answer.immediate_response.status.code)
                    return envoy.destination(answer)

                async def is_picked() -> bool:
                    return await asked() == f"127.0.0.1:{port}"

                await eventually(is_picked, 60)
                state = server.admission()
                assert set(state.models) == {"identity", "lookup"} and state.accepting
                assert {queue.model for lane in state.lanes for queue in lane.queues} == {"identity", "lookup"}
                assert all(lane.free_in is not None for lane in state.lanes)
                assert await asked("/v2/models/unknown/infer") == f"127.0.0.1:{port}"  # the server says 404 itself
                metrics = await asyncio.to_thread(
                    lambda: urllib.request.urlopen(f"http://{up['metrics']}/metrics").read().decode()
                )
                assert "cotenant_picker_ready_replicas 1.0" in metrics
                await server.drain(1.0)

                async def is_out() -> bool:
                    return await asked() == "503"

                await eventually(is_out, 60)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await http.stop(0.0)
            await server.stop(5.0)

    uvloop.run(asyncio.wait_for(main(), 180))
