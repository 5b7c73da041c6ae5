"""Serve one front end on a node: the handshake, its models, its pools, until the connection ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec

from cotenant import __version__
from cotenant.backends import Backend
from cotenant.core.model import Kind
from cotenant.core.units import show_seconds
from cotenant.errors import NodeError
from cotenant.live.confinement import Confinement
from cotenant.live.nodes.credentials import NONCE, known_token, new_nonce, prove
from cotenant.live.nodes.link import Body, Link, Receiver
from cotenant.live.nodes.messages import (
    PROTOCOL,
    Batch,
    Challenge,
    ClosePool,
    Hello,
    Message,
    ModelFile,
    ModelState,
    OfferModel,
    OpenPool,
    Proof,
    ResizeLanes,
    SendFile,
    Spawn,
    Welcome,
)
from cotenant.live.nodes.model_store import PART, Incoming, ModelStore
from cotenant.live.nodes.session_pool import SessionPool
from cotenant.worker.arena import Arena, Block

logger = logging.getLogger(__name__)

HANDSHAKE = 5.0  # seconds
OBSERVE = 0.5  # seconds between two readings
MAX_POOLS = 8
MAX_INCOMING = 8  # models that are received at once
MAX_TEXT = 256  # characters of what a front end says of itself


class NodeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a node has for its front end. kinds: the backend's, as they are offered. machine: describes its
    processors. warm_workers, confinement: of its pools. grace: seconds that batches have to end once the front end has
    gone."""

    backend: Backend
    kinds: tuple[Kind, ...]
    arena: Arena
    store: ModelStore
    machine: str
    warm_workers: int
    confinement: Confinement
    grace: float


class BusyError(NodeError):
    """Another front end has the node now."""


Claim = Callable[["Session", str, str, str], None]


class Session(Receiver):
    """One connection of a front end. claim: takes the node for a front end that has proven itself, given its identity,
    what it calls the node, and its host; raises BusyError where the node is taken."""

    def __init__(self, offer: NodeOffer, tokens: Sequence[str], claim: Claim, ended: Callable[[Session], None]) -> None:
        self._offer = offer
        self._tokens = tokens
        self._claim = claim
        self._ended = ended
        self._hello: Hello | None = None
        self._nonce = new_nonce()
        self._begun = False
        self._name = secrets.token_hex(4)
        self._pools: dict[int, SessionPool] = {}
        self._models: dict[bytes, Path] = {}
        self._offered: set[Path] = set()  # that no lane uses yet
        self._incoming: dict[bytes, tuple[Incoming, str]] = {}
        self._looking: set[bytes] = set()  # models that a thread is at work for
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.link = Link(self, at_node=True, allocate=offer.arena.allocate)

    @property
    def peer(self) -> str:
        """The address of the front end."""
        return self.link.peer

    def connected(self) -> None:
        """Begin: the front end has to prove itself within HANDSHAKE seconds."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE, self.link.close, f"no handshake within {show_seconds(HANDSHAKE)}")

    # The handshake

    def received(self, link: Link, message: Message, body: Body, block: Block | None) -> None:
        if self._begun:
            self._command(message, body, block)
            return
        match message:
            case Hello() if self._hello is None:
                self._greet(message)
            case Proof(code) if self._hello is not None:
                self._welcome(self._hello, code)
            case _:
                raise NodeError(f"{type(message).__name__} came before the handshake")

    def _greet(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            raise NodeError(
                f"this node runs Cotenant {__version__} and speaks version {PROTOCOL} of the protocol; the front end"
                f" runs {hello.version[:MAX_TEXT]} and speaks {hello.protocol}: install the same on both"
            )
        sizes = len(hello.front_end), len(hello.node), len(hello.host)
        if len(hello.nonce) != NONCE or sizes[0] < 16 or max(sizes) > MAX_TEXT:
            raise NodeError("malformed greeting of the front end")
        self._hello = hello
        self.link.send(Challenge(PROTOCOL, __version__, self._nonce, bool(self._tokens)))

    def _welcome(self, hello: Hello, code: bytes) -> None:
        token = known_token(self._tokens, code, "front end", hello.nonce, self._nonce)
        if self._tokens and token is None:
            logger.warning("%s does not know the token", self.peer)
            raise NodeError("the front end does not know this node's token; give both the same (cluster.token)")
        try:
            self._claim(self, hello.front_end, hello.node, f"{hello.host} ({self.peer})")
        except BusyError as error:
            self.link.close(str(error), busy=True)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._begun = self.link.begun = True
        backend = self._offer.backend
        self.link.send(
            Welcome(
                session=self._name,
                code=b"" if token is None else prove(token, "node", hello.nonce, self._nonce),
                backend=backend.name,
                kinds=self._offer.kinds,
                hardware_ids=backend.hardware_ids(),
                divides=backend.divides,
                isolation=backend.isolation(),
                isolation_of_profiles=backend.with_ceilings().isolation(),
                capacity=backend.capacity_fingerprint(),
                machine=self._offer.machine,
            )
        )
        logger.info("session %s of %s (%s) begins", self._name, hello.host, self.peer)
        self._timer = asyncio.get_running_loop().call_later(OBSERVE, self._observe)

    # The session

    def _command(self, message: Message, body: Body, block: Block | None) -> None:
        match message:
            case Batch():  # first, as most are
                self._pool_of(message).run(message, body, block)
            case OpenPool(number, ceilings):
                self._open(number, ceilings=ceilings)
            case ClosePool(number):
                pool = self._pools.pop(number, None)
                if pool is not None:
                    self._spawn_task(pool.end("the front end has closed its pool", 0.0))
            case OfferModel(digest, name, files):
                self._begin_task(digest, self._look_up(digest, name, files))
            case SendFile(digest, file, offset):
                part = memoryview(b"") if body is None else body  # that of an empty file
                if digest not in self._incoming or len(part) > PART:
                    raise NodeError("a part of a model was sent that was not asked for, or a larger one")
                self._begin_task(digest, self._take(digest, file, offset, part))
            case _:
                pool = self._pool_of(message)
                pool.carry_out(message)
                if isinstance(message, Spawn | ResizeLanes):  # a batch uses no other folders than its lane
                    self._offered -= pool.folders

    def _pool_of(self, message: Message) -> SessionPool:
        pool = self._pools.get(getattr(message, "pool", -1))
        if pool is None:
            raise NodeError(f"{type(message).__name__} is for a pool that is not open")
        return pool

    def _open(self, number: int, *, ceilings: bool) -> None:
        if number in self._pools or len(self._pools) >= MAX_POOLS:
            raise NodeError(f"pool {number} is open already, or more than {MAX_POOLS} are")
        offer = self._offer
        self._pools[number] = SessionPool(
            number,
            offer.backend.with_ceilings() if ceilings else offer.backend,
            offer.arena,
            self.link,
            self._models,
            warm_workers=0 if ceilings else offer.warm_workers,
            confinement=offer.confinement,
        )

    def _observe(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(OBSERVE, self._observe)
        for pool in self._pools.values():
            pool.observe()

    # Models

    async def _look_up(self, digest: bytes, name: str, files: tuple[ModelFile, ...]) -> None:
        store = self._offer.store
        found = await asyncio.to_thread(store.find, digest, name, files)
        if found is not None:
            self._held(digest, found)
            return
        if len(self._incoming) >= MAX_INCOMING:
            raise NodeError(f"more than {MAX_INCOMING} models are being received")
        used = self._offered.union(*(pool.folders for pool in self._pools.values()))
        incoming = await asyncio.to_thread(store.receive, digest, files, used)
        self._incoming[digest] = incoming, name
        logger.info("model %s is received from %s", name, self.peer)
        self.link.send(ModelState(digest, wanted=True))

    async def _take(self, digest: bytes, file: int, offset: int, body: memoryview) -> None:
        incoming, _ = self._incoming[digest]
        whole = await asyncio.to_thread(incoming.take, file, offset, body)
        if whole is None:
            self.link.send(ModelState(digest, wanted=True))
        else:
            del self._incoming[digest]
            self._held(digest, whole)

    def _held(self, digest: bytes, folder: Path) -> None:
        self._models[digest] = folder
        self._offered.add(folder)
        self.link.send(ModelState(digest, wanted=False))

    def _begin_task(self, digest: bytes, work: Coroutine[None, None, None]) -> None:
        if digest in self._looking:
            work.close()
            raise NodeError("more was sent of a model than was asked for")
        self._looking.add(digest)
        self._spawn_task(self._with_answer(digest, work))

    async def _with_answer(self, digest: bytes, work: Coroutine[None, None, None]) -> None:
        """Answer an offer or a part; what is wrong with it ends neither the session nor the process."""
        try:
            await work
        except NodeError as error:
            incoming, _ = self._incoming.pop(digest, (None, ""))
            if incoming is not None:
                await asyncio.to_thread(incoming.drop)
            self.link.send(ModelState(digest, wanted=False, reason=str(error)))
        finally:
            self._looking.discard(digest)

    def _spawn_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The end

    def link_lost(self, link: Link, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._begun:
            level = logging.INFO if link.dismissed else logging.WARNING
            logger.log(level, "session %s with %s is over: %s", self._name, self.peer, reason)
        elif self._hello is not None:
            logger.info("%s was not served: %s", self.peer, reason)
        asyncio.get_running_loop().create_task(self._end(reason)).add_done_callback(_done)

    async def _end(self, reason: str) -> None:
        try:
            pools, self._pools = self._pools, {}
            reason = f"its front end has gone: {reason}"
            await asyncio.gather(*(pool.end(reason, self._offer.grace) for pool in pools.values()))
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for incoming, _ in self._incoming.values():
                await asyncio.to_thread(incoming.drop)
        finally:
            self._ended(self)


def _done(task: asyncio.Task[None]) -> None:
    """Report what a task raised, if it did."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("a session did not end in good order", exc_info=task.exception())
