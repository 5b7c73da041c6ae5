"""A watch whose server is cut off: nothing is heard, and nothing is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from benchmarks.network import hosts, missing
from cotenant.errors import KubernetesError
from cotenant.k8s.resource import CONFIG_MAPS
from tests.k8s.api_double import client_of

# Answers one watch with its head, and is silent from then on.
SERVER = r"""
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.recv(65536)
connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
print("answered", flush=True)
connection.recv(1)
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_watch_that_is_cut_off_fails_though_it_may_be_silent_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("IDLE", 1), ("INTERVAL", 1), ("PROBES", 2)):
        monkeypatch.setattr(f"cotenant.k8s.client.KEEPALIVE_{name}", value)

    async def watch(url: str) -> None:
        async with asyncio.timeout(60), client_of(url) as client:
            assert [each async for each in client.watch(CONFIG_MAPS, "1")] == []

    with hosts(1, wires=True) as (host,):
        server = host.start([sys.executable, "-c", SERVER, host.address], stdout=subprocess.PIPE, text=True)
        try:
            told = server.stdout
            assert told is not None
            url = f"http://{host.address}:{int(told.readline())}"

            async def scenario() -> None:
                watching = asyncio.create_task(watch(url))
                await asyncio.to_thread(told.readline)
                host.cut()
                with pytest.raises(KubernetesError, match="the API server does not answer") as failed:
                    await watching
                assert failed.value.status == 0

            asyncio.run(scenario())
        finally:
            server.kill()
            server.communicate()
