"""A node's agent and a front end's pool, in one event loop: what is between them is a real connection on loopback."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trustme

from cotenant.backends import Backend
from cotenant.backends.none import NoDevices
from cotenant.live.confinement import Confinement
from cotenant.live.nodes.agent import Agent
from cotenant.live.nodes.cluster import Cluster
from cotenant.live.nodes.model_store import ModelStore
from cotenant.live.nodes.node import Node, NodeSettings
from cotenant.live.nodes.registry import Nodes
from cotenant.live.nodes.session import NodeOffer
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.worker.arena import Arena
from tests.live.workers import PATIENCE, Recorder

TOKEN = "a token of a test, which is long enough"  # noqa: S105


def tls_context(purpose: ssl.Purpose, by: trustme.CA | None, trusts: trustme.CA) -> ssl.SSLContext:
    """An end that shows a certificate signed `by` this authority, or none, and accepts those of `trusts`."""
    made = ssl.create_default_context(purpose)
    made.verify_mode = ssl.CERT_REQUIRED
    trusts.configure_trust(made)
    if by is not None:
        by.issue_cert("127.0.0.1").configure_cert(made)
    return made


class RunningAgent:
    """port: where it listens. arena: of its workers."""

    def __init__(self, agent: Agent, arena: Arena, port: int) -> None:
        self.agent = agent
        self.arena = arena
        self.port = port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def agent_of(
    backend: Backend,
    folder: Path,
    *,
    tokens: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
    bound: int = 1 << 26,
    repository: Path | None = None,
    size: int = 1 << 24,
    port: int = 0,
) -> AsyncIterator[RunningAgent]:
    """Offers a backend on loopback. Checks at the end that not a byte of its arena is left."""
    arena = Arena(size)
    offer = NodeOffer(
        backend=backend,
        kinds=backend.fleet(),
        arena=arena,
        store=await asyncio.to_thread(ModelStore, folder, bound, repository),
        machine="a machine of a test",
        warm_workers=0,
        confinement=Confinement(),
        grace=5.0,
    )
    agent = Agent(offer, tokens, tls)
    try:
        yield RunningAgent(agent, arena, await agent.listen("127.0.0.1", port))
    finally:
        await agent.stop("the test is over")
    gc.collect()  # what was wrong is held by the error that said so
    async with asyncio.timeout(PATIENCE):
        while arena.free != arena.size:  # a thread that has hashed a part may hold it for a moment longer
            await asyncio.sleep(0)
    arena.close()


@asynccontextmanager
async def nodes_of(
    *addresses: str, tokens: tuple[str, ...] = (), tls: ssl.SSLContext | None = None
) -> AsyncIterator[Nodes]:
    """Dials nodes, which are called node-a, node-b, …"""
    nodes = Nodes(NodeSettings(tokens=tokens, tls=tls))
    for letter, address in zip("abcdef", addresses, strict=False):
        nodes.add(f"node-{letter}", address)
    try:
        yield nodes
    finally:
        await nodes.close()


@asynccontextmanager
async def remote_pool(nodes: Nodes) -> AsyncIterator[tuple[SupervisedPool, Recorder]]:
    """A pool over nodes alone, as `workers.pool_of` has one of this machine."""
    recorder, arena = Recorder(), Arena(1 << 24)
    nodes.receive_into(arena)
    pool = SupervisedPool(Cluster(NoDevices(), nodes), arena, recorder)
    try:
        yield pool, recorder
    finally:
        await pool.close(grace=5.0)
    while not recorder.told.empty():
        recorder.told.get_nowait()
    assert arena.free == arena.size
    arena.close()


async def up(nodes: Nodes, name: str = "node-a", *, sessions: int = 1) -> Node:
    """Wait for a node's session: the first, or one of those after."""
    node = nodes.get(name)
    assert node is not None
    async with asyncio.timeout(PATIENCE):
        while not node.is_up or node.sessions < sessions:
            await asyncio.sleep(0.01)
    return node


async def reason(nodes: Nodes, words: str, name: str = "node-a") -> str:
    """Wait until there is a reason with these words why there is no session; return it."""
    node = nodes.get(name)
    assert node is not None
    async with asyncio.timeout(PATIENCE):
        while words not in node.reason:
            await asyncio.sleep(0.01)
    return node.reason
