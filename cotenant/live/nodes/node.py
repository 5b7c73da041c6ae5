"""Keep a session with one node, from the front end: dial, prove, dial again where the connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cotenant import __version__
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.errors import ModelError, NodeError
from cotenant.live.limits import MAX_ERROR
from cotenant.live.nodes.credentials import known_token, new_nonce, prove, split_address
from cotenant.live.nodes.link import Body, Link, Receiver
from cotenant.live.nodes.messages import (
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    ModelState,
    NodeModel,
    Observed,
    OfferModel,
    OpenPool,
    Proof,
    SendFile,
    Welcome,
)
from cotenant.live.nodes.model_files import FolderReader, ModelFolder
from cotenant.live.nodes.model_store import PART
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import WorkerModel

logger = logging.getLogger(__name__)

DIAL_LIMIT = 3.0  # seconds for a connection, and again for its handshake
FIRST_DELAY = 0.1  # seconds until a node is dialled again, doubling up to
LONGEST_DELAY = 1.0
TRANSFER_LIMIT = 60.0  # seconds for the answer to an offer or a part of a model, and
TRANSFER_RATE = 20e6  # bytes/s at which a node reads a model at least: it answers when it has hashed all of it
MAX_KINDS = 64
MAX_DEVICES = 1 << 10  # of a kind
MAX_WORDS = 1 << 10  # characters of what a node says of itself

# Why a node may end a connection without a word.
HINT_WITHOUT_TLS = "if it has certificates, set cluster.certificate, key and authority here, too"
HINT_WITH_TLS = "has the authority that it names (cluster.authority) signed the certificate that is shown to it?"

FRONT_END = secrets.token_hex(16)  # names this process to nodes, so that they know it again after a cut


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes are dialled. tokens: the first is proven to nodes; none: nodes need none. tls: None for the clear."""

    tokens: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None


class NodePool(Protocol):
    """What a node tells of its session: a pool of workers there."""

    ceilings: bool

    def attached(self, link: Link) -> None: ...

    def received(self, message: Message, body: Body, block: Block | None) -> None: ...

    def cut(self, reason: str) -> None: ...


class Node(Receiver):
    """Hold one node, as the front end sees it. changed: called when a session begins or ends. owner: returns whose a
    device is, by its hardware id; empty where it is nobody's but this node's. All methods belong to the event loop."""

    def __init__(
        self,
        name: str,
        address: str,
        settings: NodeSettings,
        changed: Callable[[Node], None],
        owner: Callable[[Node, str], str],
    ) -> None:
        self.name = name
        self.address = address
        self.reason = f"{name} has not answered yet"  # why there is no session
        self.arena: Arena | None = None  # where what it sends is received
        self.sessions = 0  # that have begun
        self._host, self._port = split_address(address)
        self._settings = settings
        self._changed = changed
        self._owner = owner
        self._link: Link | None = None  # of the session
        self._welcome: Welcome | None = None  # of the last session
        self._nonce = b""
        self._challenge: Challenge | None = None
        self._proven = 0.0  # when the challenge was answered
        self._over: asyncio.Future[bool] | None = None  # of the connection: whether a session had begun
        self._pools: dict[int, NodePool] = {}
        self._numbers = itertools.count()
        self._lost: dict[DeviceId, str] = {}  # as the node says
        self._reader = FolderReader()
        self._states: dict[bytes, asyncio.Future[ModelState]] = {}
        self._sending: dict[bytes, asyncio.Lock] = {}
        self._dialling: asyncio.Task[None] | None = None
        self._stopped = False

    # What it has

    @property
    def is_up(self) -> bool:
        return self._link is not None

    @property
    def link(self) -> Link:
        """The connection of the session. Raises NodeError where there is none."""
        if self._link is None:
            raise NodeError(self.reason)
        return self._link

    @property
    def welcome(self) -> Welcome | None:
        """What the node last said of itself; None before the first session."""
        return self._welcome

    def fleet(self) -> tuple[Kind, ...]:
        """Return its kinds of devices, as they are called here; none before the first session."""
        kinds = () if self._welcome is None else self._welcome.kinds
        return tuple(msgspec.structs.replace(kind, name=f"{self.name}/{kind.name}") for kind in kinds)

    def devices(self) -> tuple[DeviceId, ...]:
        return tuple(DeviceId(kind.name, index) for kind in self.fleet() for index in range(kind.count or 0))

    def lost(self) -> dict[DeviceId, str]:
        """Return why nothing can run on its devices now: those that it says, or all while it is cut off."""
        if self._link is None:
            return dict.fromkeys(self.devices(), self.reason)
        return {device.on(self.name): reason for device, reason in self._lost.items()}

    @property
    def round_trip(self) -> float:
        """Return the seconds to the node and back; 0 where that is not known."""
        return 0.0 if self._link is None else self._link.round_trip

    # Its life

    def start(self) -> None:
        """Dial from now on, until `stop`."""
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def stop(self, reason: str) -> None:
        """End the session, and dial no more."""
        self._stopped = True
        if self._dialling is not None:
            self._dialling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._dialling
        if self._link is not None:
            self._link.close(reason)

    async def _dial(self) -> None:
        delay, said = FIRST_DELAY, ""
        while True:
            if await self._connection():
                delay, said = FIRST_DELAY, ""
                continue
            if self.reason != said:
                said = self.reason
                logger.warning("%s; it is dialled again until it answers", said)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    async def _connection(self) -> bool:
        """Connect, and wait until the connection is over. Return whether a session had begun."""
        loop = asyncio.get_running_loop()
        over = self._over = loop.create_future()
        link = Link(self, at_node=False, allocate=self._allocate)
        late = None
        try:
            async with asyncio.timeout(DIAL_LIMIT):
                await loop.create_connection(lambda: link, self._host, self._port, ssl=self._settings.tls)
                self._nonce, self._challenge = new_nonce(), None
                host = socket.gethostname()
                link.send(Hello(PROTOCOL, __version__, FRONT_END, host, self._nonce, self.name))
            late = loop.call_later(DIAL_LIMIT, self._give_up, link)
            begun: bool = await over
            return begun
        except (OSError, TimeoutError, ssl.SSLError, ssl.CertificateError) as error:
            link.abort("it cannot be reached")
            self.reason = f"{self.name} cannot be reached at {self.address}: {_connect_error(error)}"
            return False
        except asyncio.CancelledError:
            if self._link is not link:
                link.abort("it is not dialled any more")
            raise
        finally:
            if late is not None:
                late.cancel()

    def _give_up(self, link: Link) -> None:
        if link is not self._link:
            link.abort(f"no handshake within {DIAL_LIMIT:g} s")

    def _allocate(self, size: int) -> Block | None:
        return None if self.arena is None else self.arena.allocate(size)

    # What it says

    def received(self, link: Link, message: Message, body: Body, block: Block | None) -> None:
        if link is self._link:
            self._in_session(message, body, block)
            return
        match message:
            case Challenge() if self._challenge is None:
                self._prove(link, message)
            case Welcome() if self._challenge is not None:
                self._begin(link, message, self._challenge)
            case _:
                raise NodeError(f"{type(message).__name__} came before the handshake")

    def _prove(self, link: Link, challenge: Challenge) -> None:
        self._challenge = challenge
        if challenge.protocol != PROTOCOL:
            raise NodeError(
                f"it runs Cotenant {challenge.version[:MAX_WORDS]} and speaks version {challenge.protocol} of the "
                f"protocol, this is {__version__} with {PROTOCOL}: install the same on both"
            )
        tokens = self._settings.tokens
        if challenge.asks and not tokens:
            raise NodeError("it asks for a token, and there is none here; set cluster.token to the same file as there")
        if tokens and not challenge.asks:
            raise NodeError("it has no token, and so cannot prove that it is the node; set cluster.token there, too")
        self._proven = time.monotonic()
        link.send(Proof(prove(tokens[0], "front end", self._nonce, challenge.nonce) if tokens else b""))

    def _begin(self, link: Link, welcome: Welcome, challenge: Challenge) -> None:
        tokens = self._settings.tokens[:1]
        if tokens and known_token(tokens, welcome.code, "node", self._nonce, challenge.nonce) is None:
            raise NodeError("it does not know the token, and so may be anybody")
        check_welcome(welcome)
        for hardware_id in welcome.hardware_ids:
            if owner := self._owner(self, hardware_id):
                raise NodeError(
                    f"its device {hardware_id} is used by {owner} already; stop one of the two, or give them different"
                    " devices"
                )
        link.begun = True
        link.answered_after(time.monotonic() - self._proven)
        self._link, self._welcome, self._lost = link, welcome, {}
        self.sessions += 1
        level = logging.INFO if self.sessions == 1 else logging.WARNING  # whoever read that it was cut off reads on
        logger.log(level, "%s is connected (%s, session %s)", self.name, self.address, welcome.session)
        for number, pool in self._pools.items():
            self._attach(number, pool)
        self._changed(self)

    def _in_session(self, message: Message, body: Body, block: Block | None) -> None:
        if isinstance(message, ModelState):
            state = self._states.pop(message.digest, None)
            if state is None or state.done():
                raise NodeError("it tells of a model that it was not offered")
            state.set_result(message)
            return
        if isinstance(message, Observed):
            known = {device.local for device in self.devices()}
            if not message.lost.keys() <= known:
                raise NodeError("it tells of devices that it does not have")
            self._lost = {device: f"{reason[:MAX_ERROR]}" for device, reason in message.lost.items()}
        pool = self._pools.get(getattr(message, "pool", -1))
        if pool is not None:  # else it is closed, and the node has not heard of that yet
            pool.received(message, body, block)

    def link_lost(self, link: Link, reason: str) -> None:
        over = self._over
        begun = link is self._link
        if begun:
            self._cut(reason)
        elif over is not None and not over.done():
            if not link.dismissed and self._challenge is None:
                reason += "; " + (HINT_WITHOUT_TLS if self._settings.tls is None else HINT_WITH_TLS)
            self.reason = f"{self.name} ({self.address}) does not serve this front end: {reason[:MAX_ERROR]}"
        if over is not None and not over.done():
            over.set_result(begun)

    def _cut(self, reason: str) -> None:
        """End the session: all that runs there is lost."""
        self._link = None
        self.reason = f"{self.name} is cut off: {reason[:MAX_ERROR]}"
        logger.log(logging.INFO if self._stopped else logging.ERROR, "%s", self.reason)
        for state in self._states.values():
            if not state.done():
                state.set_exception(NodeError(self.reason))
        self._states.clear()
        for pool in list(self._pools.values()):
            pool.cut(self.reason)
        self._changed(self)

    # Workers

    def open_pool(self, pool: NodePool) -> int:
        """Open a pool on the node, now and in each session to come; return its number."""
        number = next(self._numbers)
        self._pools[number] = pool
        if self._link is not None:
            self._attach(number, pool)
        return number

    def _attach(self, number: int, pool: NodePool) -> None:
        link = self.link
        link.send(OpenPool(number, pool.ceilings))
        pool.attached(link)

    def close_pool(self, number: int) -> None:
        """Forget a pool; harmless where it is closed."""
        self._pools.pop(number, None)

    async def send_models(self, models: Sequence[WorkerModel]) -> tuple[NodeModel, ...]:
        """Return models with paths that the node has, which is sent what it lacks. Raises ModelError, NodeError."""
        return tuple([await self._sent(model) for model in models])

    async def _sent(self, model: WorkerModel) -> NodeModel:
        if not model.path:
            return NodeModel(model, b"")
        folder = await asyncio.to_thread(self._reader.read, Path(model.path))
        async with self._sending.setdefault(folder.digest, asyncio.Lock()):
            await self._offer(model.name, folder)
        return NodeModel(msgspec.structs.replace(model, path=folder.path), folder.digest)

    async def _offer(self, name: str, folder: ModelFolder) -> None:
        state = await self._ask(OfferModel(folder.digest, folder.root.name, folder.files), folder)
        if not state.wanted:
            return
        logger.info("model %s is sent to %s", name, self.name)
        for number, listed in enumerate(folder.files):
            for offset in range(0, max(listed.size, 1), PART):
                part = await asyncio.to_thread(_read_part, folder.root / listed.path, offset)
                if not state.wanted or (not part and listed.size):
                    raise ModelError(f"{folder.root / listed.path} changed while it was sent to {self.name}")
                state = await self._ask(SendFile(folder.digest, number, offset), folder, part)

    async def _ask(self, message: OfferModel | SendFile, folder: ModelFolder, part: bytes = b"") -> ModelState:
        link = self.link
        answer = self._states[folder.digest] = asyncio.get_running_loop().create_future()
        link.send(message, [part] if part else ())
        try:
            async with asyncio.timeout(TRANSFER_LIMIT + sum(file.size for file in folder.files) / TRANSFER_RATE):
                state: ModelState = await answer
        except TimeoutError:
            self._states.pop(folder.digest, None)
            raise NodeError(f"{self.name} does not take model {folder.root.name}") from None
        if state.reason:
            raise NodeError(f"{self.name} does not take model {folder.root.name}: {state.reason[:MAX_ERROR]}")
        return state


def _connect_error(error: Exception) -> str:
    """Return why a node cannot be reached."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not one that cluster.authority has signed for this address: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return (
            "it does not use TLS; give certificates (cluster.certificate, key and authority) to both ends, or to none"
        )
    return str(error) or f"no answer within {DIAL_LIMIT:g} s"


def _read_part(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PART)


def check_welcome(welcome: Welcome) -> None:
    """Raise NodeError for devices that no machine has."""
    names = [kind.name for kind in welcome.kinds]
    if not names or len(names) > MAX_KINDS or len(set(names)) < len(names):
        raise NodeError(f"it says that it has {len(names)} kinds of devices, each of which needs a name of its own")
    for kind in welcome.kinds:
        cuts = list(kind.cuts)
        fits = cuts == sorted(set(cuts)) and cuts and cuts[0] > 0 and cuts[-1] <= WHOLE
        count = kind.count or 0
        if not kind.name or "/" in kind.name or not 0 < count <= MAX_DEVICES or not fits or kind.memory < 0:
            raise NodeError(f"it says that it has {count} devices of kind {kind.name[:MAX_WORDS]!r} with cuts {cuts}")
        if not 0 <= kind.processors < 1 << 20 or list(kind.in_place) != sorted(set(kind.in_place)):
            raise NodeError(f"it says that kind {kind.name!r} has properties that no device has")
    if len(welcome.hardware_ids) > MAX_KINDS * MAX_DEVICES:
        raise NodeError(f"it says that it has {len(welcome.hardware_ids)} devices")
    for words in (
        *welcome.hardware_ids,
        welcome.session,
        welcome.backend,
        welcome.isolation,
        welcome.isolation_of_profiles,
        welcome.capacity,
        welcome.machine,
    ):
        if len(words) > MAX_WORDS:
            raise NodeError("it says more of itself than fits")
