"""Nodes as processes of their own in network namespaces: slow and lossy networks, cuts, and deaths."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.network import Host, hosts, missing
from cotenant.core.identity import DeviceId, LaneId
from cotenant.live.nodes.registry import Nodes
from cotenant.live.supervised_pool import SupervisedPool
from tests.cli.program import alive, until, workers_of
from tests.live.nodes.agents import TOKEN, nodes_of, remote_pool, up
from tests.live.workers import PATIENCE, Recorder, floats
from tests.worker import graphs

LANE = LaneId(DeviceId("cpu", node="node-a"), 0)


@pytest.fixture
def host() -> Iterator[Host]:
    why = missing()
    if why:
        pytest.skip(why)
    with hosts(1, wires=True) as (host,):
        yield host


@contextmanager
def node_process(host: Host, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a node and its address."""
    (folder / "token").write_text(TOKEN.replace(" ", "-"))
    settings = folder / "node.toml"
    settings.write_text(f'[node]\nport = 0\nhost = "{host.address}"\ncache = "cache"\n[cluster]\ntoken = "token"\n')
    node = host.start(
        [sys.executable, "-m", "cotenant", "node", str(settings), "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdout is not None
        yield node, json.loads(node.stdout.readline())["address"]
    finally:
        node.kill()
        node.communicate()


@asynccontextmanager
async def lane_of(address: str, folder: Path, width: int) -> AsyncIterator[tuple[Nodes, SupervisedPool, Recorder]]:
    """Yield a pool with one lane of the node, which is ready."""
    async with nodes_of(address, tokens=(TOKEN.replace(" ", "-"),)) as nodes:
        await up(nodes)
        async with remote_pool(nodes) as (pool, told):
            await pool.start(LANE, share=500, models=[graphs.identity(folder / "m.onnx", width)])
            await told.next()
            yield nodes, pool, told


def test_batches_over_a_slow_and_lossy_network_are_answered_right(host: Host, tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        width = 20_000
        assert host.wire is not None
        host.wire.delay = 0.005  # from the first round trip on
        async with lane_of(address, tmp_path, width) as (nodes, pool, told):
            host.wire.loss = 0.01
            values = np.random.default_rng(0).random((20, 1, width), np.float32)
            for batch, each in enumerate(values):
                pool.run(LANE, batch, "identity", [floats(*each[0], width=width)])
                what, _, number, answers, _ = await told.next()
                assert (what, number) == ("finished", batch)
                np.testing.assert_array_equal(answers[0][0].array(), each)
                del answers
            node = nodes.get("node-a")
            assert node is not None and node.sessions == 1
            assert node.round_trip > 2 * host.wire.delay

    with node_process(host, tmp_path) as (_, address):
        asyncio.run(scenario(address))


def test_node_behind_a_cut_is_lost_soon_and_its_lanes_come_back(host: Host, tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        async with lane_of(address, tmp_path, 2) as (nodes, pool, told):
            assert host.wire is not None
            host.cut()
            pool.run(LANE, 1, "identity", [floats(1, 2)])
            what, lane, why = await told.next()
            assert (what, lane) == ("died", LANE) and "node-a is cut off: nothing was heard for" in why
            assert pool.status()[0].state == "lost"
            host.heal()
            assert await told.next() == ("ready", LANE)
            node = nodes.get("node-a")
            assert node is not None and node.sessions == 2
            pool.run(LANE, 2, "identity", [floats(3, 4)])
            what, _, batch, answers, _ = await told.next()
            assert (what, batch) == ("finished", 2) and answers[0][0].array().tolist() == [[3, 4]]

    with node_process(host, tmp_path) as (_, address):
        asyncio.run(scenario(address))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_node_that_is_killed_or_stopped_is_lost(host: Host, tmp_path: Path, number: signal.Signals) -> None:
    async def scenario(node: subprocess.Popen[str], address: str) -> None:
        async with lane_of(address, tmp_path, 2) as (_, _, told):
            node.send_signal(number)
            what, lane, why = await told.next()
            assert (what, lane) == ("died", LANE) and "node-a is cut off" in why

    with node_process(host, tmp_path) as (node, address):
        asyncio.run(scenario(node, address))


FRONT_END = """
import asyncio, sys
from pathlib import Path
from tests.live.nodes.test_namespaces import lane_of

async def serve():
    async with lane_of(sys.argv[1], Path(sys.argv[2]), 2):
        print("serving", flush=True)
        await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_front_end_that_is_killed_leaves_a_node_that_serves_the_next(host: Host, tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        async with lane_of(address, tmp_path, 2) as (_, pool, told):
            pool.run(LANE, 1, "identity", [floats(1, 2)])
            assert (await told.next())[0] == "finished"

    with node_process(host, tmp_path) as (node, address):
        front_end = subprocess.Popen(
            [sys.executable, "-c", FRONT_END, address, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert front_end.stdout is not None and front_end.stdout.readline() == "serving\n"
        workers = workers_of(node.pid)  # `ip netns exec` becomes what it runs
        assert workers
        front_end.kill()
        front_end.communicate()
        until(lambda: not any(map(alive, workers)))
        asyncio.run(scenario(address))
        node.send_signal(signal.SIGTERM)
        assert node.wait(PATIENCE) == 0
