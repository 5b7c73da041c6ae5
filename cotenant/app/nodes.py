"""Connect a server to its nodes, and run a node, as settings say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec

from cotenant.app.access import read_tokens
from cotenant.app.backend import worker_confinement
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.reloader import Reloader
from cotenant.backends import Backend
from cotenant.config import Settings
from cotenant.config.cluster import ClusterSettings
from cotenant.core.model import Kind
from cotenant.errors import ConfigError, CotenantError
from cotenant.live.nodes.agent import Agent
from cotenant.live.nodes.cluster import Cluster
from cotenant.live.nodes.credentials import check_guarded
from cotenant.live.nodes.model_store import ModelStore
from cotenant.live.nodes.node import NodeSettings
from cotenant.live.nodes.registry import Nodes
from cotenant.live.nodes.session import NodeOffer
from cotenant.live.server import ARENA, Server
from cotenant.profiling import cache
from cotenant.worker.arena import Arena

logger = logging.getLogger(__name__)

SETTLE = 0.5  # seconds for further nodes to come or go before there is a plan with those that have
RETRY = 5.0  # seconds until a plan that could not be made is made again

# Adds nodes to a registry, and removes them, within its block.
Discovery = Callable[[Nodes], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def clustered(settings: Settings, backend: Backend, discovery: Discovery | None = None) -> AsyncIterator[Backend]:
    """Return the devices of this machine, and of nodes that are yet to be dialled, by `joined`. Raises ConfigError."""
    if not settings.cluster.nodes and discovery is None:
        if settings.backend == "none":
            raise ConfigError('backend = "none": this machine gives no device, and no nodes are listed; add [[nodes]]')
        yield backend
        return
    nodes = Nodes(_dial_settings(settings.cluster), backend.hardware_ids())
    try:
        yield Cluster(backend, nodes)
    finally:
        await nodes.close()


@asynccontextmanager
async def joined(settings: Settings, backend: Backend, discovery: Discovery | None = None) -> AsyncIterator[None]:
    """Dial the nodes that the settings list, or that are discovered within the block. Waits for those listed; one that
    does not answer joins later. Raises ConfigError."""
    if not isinstance(backend, Cluster):
        yield
        return
    cluster, nodes = settings.cluster, backend.nodes
    for node in cluster.nodes:
        nodes.add(node.name, node.address)
    for reason in await nodes.heard(cluster.patience):
        logger.warning("starting without a node: %s", reason)
    async with discovery(nodes) if discovery is not None else contextlib.nullcontext():
        if settings.backend == "none" and not nodes.fleet() and discovery is None:
            raise ConfigError('backend = "none", and no node has answered: ' + "; ".join(node.reason for node in nodes))
        yield


def let_go(backend: Backend) -> None:
    """Close all sessions with nodes at once: another front end is to have them."""
    if isinstance(backend, Cluster):
        backend.nodes.let_go()


@asynccontextmanager
async def following_nodes(
    backend: Backend, server: Server, builder: DeploymentBuilder, reloader: Reloader
) -> AsyncIterator[None]:
    """Plan anew within the block when nodes have joined, or were removed. Nodes that are cut off, and those that come
    back, are the controller's affair."""
    if not isinstance(backend, Cluster):
        yield
        return
    changed = asyncio.Event()
    changed.set()  # since the first plan was made
    backend.nodes.on_session = changed.set

    def is_planned() -> bool:
        # Of the deployment in force: others that were made since may have been rejected.
        planned = server.deployment.available
        there = {kind.name for kind in backend.fleet()}
        return set(builder.available()) <= set(planned) and {kind.name for kind in planned} <= there

    async def follow() -> None:
        while True:
            await changed.wait()
            await asyncio.sleep(SETTLE)
            changed.clear()
            if is_planned():
                continue
            try:
                await reloader.replan("nodes have joined or left")
            except CotenantError as error:
                logger.error("no plan for the present devices, keeping the old one: %s", error)
            except Exception:  # or nodes to come would not be planned for any more
                logger.exception("no plan for the present devices, keeping the old one")
            if not is_planned():
                asyncio.get_running_loop().call_later(RETRY, changed.set)

    task = asyncio.get_running_loop().create_task(follow())
    try:
        yield
    finally:
        backend.nodes.on_session = lambda: None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _dial_settings(cluster: ClusterSettings) -> NodeSettings:
    tokens = () if cluster.token is None else tuple(read_tokens(cluster.token))
    return NodeSettings(tokens=tokens, tls=_tls(cluster, ssl.Purpose.SERVER_AUTH))


def _tls(cluster: ClusterSettings, purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Return what a link is encrypted with; both ends show certificates. None: there are none. Raises ConfigError."""
    certificate, key, authority = cluster.certificate, cluster.key, cluster.authority
    if certificate is None or key is None or authority is None:
        return None
    try:
        context = ssl.create_default_context(purpose, cafile=str(authority))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        words = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ConfigError(
            f"cluster: {certificate}, {key} and {authority} are no certificate in PEM, with the key that fits it and"
            f" has no password, and no authority: {words}"
        ) from None
    return context


class RunningNode(msgspec.Struct, frozen=True):
    """Hold a node that listens. address: with the port that it was given."""

    agent: Agent
    address: str
    kinds: tuple[Kind, ...]


@asynccontextmanager
async def running_node(settings: Settings, backend: Backend) -> AsyncIterator[RunningNode]:
    """Offer a backend's devices within the block. Raises ConfigError."""
    node, cluster = settings.node, settings.cluster
    tokens = [] if cluster.token is None else read_tokens(cluster.token)
    tls = _tls(cluster, ssl.Purpose.CLIENT_AUTH)
    check_guarded(node.host, "node.host", guarded=bool(tokens) or tls is not None)
    kinds = backend.fleet()
    if not kinds:
        raise ConfigError('backend = "none": a node without devices has nothing to offer; use another backend')
    if settings.cuts is not None:
        kinds = tuple(msgspec.structs.replace(kind, cuts=settings.cuts) for kind in kinds)
    folder = node.cache or _cache_folder(node.port)
    store = await asyncio.to_thread(ModelStore, folder, node.cache_size, node.model_repository)
    arena = Arena(ARENA)
    offer = NodeOffer(
        backend=backend,
        kinds=kinds,
        arena=arena,
        store=store,
        machine=cache.machine_fingerprint(),
        warm_workers=settings.warm_workers,
        confinement=worker_confinement(settings),
        grace=settings.grace,
    )
    agent = Agent(offer, tokens, tls)
    try:
        port = await agent.listen(node.host, node.port)
        host = f"[{node.host}]" if ":" in node.host else node.host
        yield RunningNode(agent, f"{host}:{port}", kinds)
    finally:
        await agent.stop("the node stops")
        arena.close()


def _cache_folder(port: int) -> Path:
    """Return the folder of a node's models: one for each node of a machine, which remove what they do not use."""
    return cache.cache_folder().parent / "node-models" / str(port)
