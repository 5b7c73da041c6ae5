"""A network in memory: connections of TCP between machines, whose bytes come late, not at all for a while, or never.

Nothing is lost from within a stream, and nothing overtakes: that is TCP's part. What is lost is the connection: at once
(`cut`), or without either end hearing of it (`hole`, a machine that vanishes).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from tests.chaos.cluster.hosts import HERE, Host, HostLoop

LATENCY = 0.0004  # seconds one way
KERNEL = 1 << 14  # bytes that an end's kernel takes before the program has to wait
Address = tuple[str, int]


class Network:
    """Between two machines, by their names, latencies and holes may be set."""

    def __init__(self, loop: NetworkLoop, seed: int) -> None:
        self.loop = loop
        self.rng = random.Random(seed)  # noqa: S311  # to be repeated, not to be secret
        self.listeners: dict[Address, tuple[Host, Callable[[], asyncio.BaseProtocol]]] = {}
        self.hosts: dict[str, Host] = {}  # the machine that has a name now; one that vanished is not there
        self.ends: list[End] = []
        self.holes: dict[tuple[str, str], float] = {}  # from whom to whom nothing comes, until when
        self.lags: dict[tuple[str, str], float] = {}  # seconds more, one way

    # What goes wrong

    def hole(self, source: str, target: str, until: float) -> None:
        """Let nothing from one machine reach another until then; what was sent comes afterwards."""
        self.holes[source, target] = max(until, self.holes.get((source, target), 0.0))
        self.loop.call_at(until, self._mended)

    def mend(self) -> None:
        self.holes.clear()
        self.lags.clear()
        self._mended()

    def _mended(self) -> None:
        for end in [*self.ends]:
            end.schedule()

    def open_until(self, source: str, target: str) -> float:
        """When something that is sent now is under way: now, or when the hole ends."""
        return max(self.loop.now, self.holes.get((source, target), 0.0))

    def cut(self, first: str, second: str) -> None:
        """Reset all connections between two machines: both ends hear of it."""
        for end in [*self.ends]:
            if {end.host.name, end.peer.host.name} == {first, second}:
                end.reset()

    def died(self, host: Host, *, vanished: bool) -> None:
        """The ends of a dead machine are closed by its kernel; or there is no kernel any more."""
        self.listeners = {address: each for address, each in self.listeners.items() if each[0] is not host}
        if self.hosts.get(host.name) is host:
            del self.hosts[host.name]
        for end in [end for end in self.ends if end.host is host]:
            end.host_died(vanished=vanished)

    # What works

    def delay(self, source: str, target: str) -> float:
        lag = self.lags.get((source, target), 0.0)
        return (LATENCY + lag) * (1 + 0.3 * self.rng.random())

    async def connect(self, factory: Callable[[], asyncio.BaseProtocol], address: Address) -> tuple[Any, Any]:
        here = HERE.get()
        assert here is not None
        name = address[0]
        due = self.open_until(here.name, name) + self.delay(here.name, name)
        await asyncio.sleep(due - self.loop.now)
        while name not in self.hosts:  # nobody answers: the caller has a limit
            await asyncio.sleep(0.2)
        listener = self.listeners.get(address)
        back = self.open_until(name, here.name) + self.delay(name, here.name)
        if listener is None:
            await asyncio.sleep(back - self.loop.now)
            raise ConnectionRefusedError(111, f"Connect call failed {address}")
        there, served = listener
        ours, theirs = End(self, here), End(self, there)
        ours.peer, theirs.peer = theirs, ours
        self.ends = [end for end in self.ends if not (end._lost and end.peer._lost)] + [ours, theirs]
        there.context.copy().run(self.loop.call_soon, theirs.accept, served)
        try:
            await asyncio.sleep(back - self.loop.now)
        except asyncio.CancelledError:
            ours.reset_peer()
            raise
        if ours.broken:
            raise ConnectionResetError(104, "Connection reset by peer")
        ours.begin(factory())
        await asyncio.sleep(0)  # as asyncio does: until the program has heard of it
        return ours, ours.protocol


class End(asyncio.Transport):
    """One end of a connection: what asyncio gives a protocol."""

    peer: End

    def __init__(self, network: Network, host: Host) -> None:
        super().__init__()
        self.network = network
        self.host = host
        self.protocol: asyncio.BufferedProtocol | None = None
        self.broken = False  # by the other end, or by the network
        self._loop = network.loop
        self._outgoing: deque[tuple[float, bytes | None]] = deque()  # when each arrives; None: the end of the stream
        self._unread: deque[bytes | None] = deque()  # arrived, and not taken by the program
        self._unsent = 0  # bytes of the two, from this end
        self._last = 0.0
        self._high = 1 << 16
        self._closing = self._lost = False
        self._reading = True
        self._paused = False  # the program was told not to write
        self._vanished = False
        self._timer: asyncio.TimerHandle | None = None

    # A connection begins

    def accept(self, served: Callable[[], asyncio.BaseProtocol]) -> None:
        self.begin(served())

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast(asyncio.BufferedProtocol, protocol)
        self._in_program(self.protocol.connection_made, self)
        if self.broken:
            self._lose(ConnectionResetError(104, "Connection reset by peer"))
        self._in_program(self._feed)

    def _in_program(self, call: Callable[..., Any], *args: Any) -> None:
        """Call the program from its own machine, whoever is at work now."""
        self._loop.call_soon(call, *args, context=self.host.context.copy())

    # What the program calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.peer.host.name, 8010) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 1 << 16 if high is None else high

    def get_write_buffer_size(self) -> int:
        return max(self._unsent - KERNEL, 0)

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        if self._closing or self._vanished:
            return
        whole = bytes(data)
        # The network may divide a stream anywhere.
        cut = self.network.rng.randrange(len(whole) + 1) if whole and self.network.rng.random() < 0.3 else 0
        for piece in (whole[:cut], whole[cut:]):
            if piece:
                self._unsent += len(piece)
                self._queue(piece)
        if not self._paused and self.get_write_buffer_size() > self._high:
            self._paused = True
            assert self.protocol is not None
            self.protocol.pause_writing()

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._in_program(self._feed)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._queue(None)
        self._in_program(self._close_if_sent)

    def _close_if_sent(self) -> None:
        if self.get_write_buffer_size() == 0:
            self._lose(None)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self._lose(None)
            self.reset_peer()

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._unread.clear()
            if self.protocol is not None:
                self._in_program(self.protocol.connection_lost, error)

    # The stream

    def _queue(self, piece: bytes | None) -> None:
        source, target = self.host.name, self.peer.host.name
        due = self.network.open_until(source, target) + self.network.delay(source, target)
        self._last = max(self._last, due)
        self._outgoing.append((self._last, piece))
        self.schedule()

    def schedule(self) -> None:
        """Deliver what is due, not before a hole ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._outgoing and not self._vanished:
            due = max(self._outgoing[0][0], self.network.open_until(self.host.name, self.peer.host.name))
            self._timer = self._loop.call_at(due, self._deliver, context=self.network.loop.outside)

    def _deliver(self) -> None:
        self._timer = None
        peer = self.peer
        if self.network.open_until(self.host.name, peer.host.name) > self._loop.now:
            self.schedule()
            return
        arrived = False
        while self._outgoing and self._outgoing[0][0] <= self._loop.now + 1e-9:
            _, piece = self._outgoing.popleft()
            if peer._vanished:
                if self.network.hosts.get(peer.host.name) is not None:  # it was started again, and knows of nothing
                    self._broke()
                return  # nobody is there, nobody says so
            if peer._lost:
                if piece is not None:
                    self._broke()
                return
            peer._unread.append(piece)
            arrived = True
        if arrived:
            peer._in_program(peer._feed)
        self.schedule()

    def _feed(self) -> None:
        """Give the program what has arrived, as long as it reads."""
        while self._unread and self._reading and not self._lost and self.protocol is not None:
            piece = self._unread.popleft()
            if piece is None:
                self.protocol.eof_received()
                self._lose(None)
                return
            while piece and not self._lost:
                buffer = cast(memoryview, self.protocol.get_buffer(-1))
                size = min(len(buffer), len(piece))
                if size == 0:
                    raise RuntimeError("get_buffer() gave an empty buffer")
                buffer[:size] = piece[:size]
                rest, piece = piece[size:], b""
                self.peer._was_read(size)
                self.protocol.buffer_updated(size)
                if rest and not self._reading:
                    self._unread.appendleft(rest)
                else:
                    piece = rest

    def _was_read(self, size: int) -> None:
        self._unsent -= size
        if self._paused and self.get_write_buffer_size() <= self._high // 4 and not self._lost:
            self._paused = False
            if self.protocol is not None:
                self._in_program(self.protocol.resume_writing)
        if self._closing and not self._lost:
            self._close_if_sent()

    # The connection breaks

    def reset_peer(self) -> None:
        """Tell the other end that there is no connection any more, as soon as that reaches it."""
        source, target = self.host.name, self.peer.host.name
        due = self.network.open_until(source, target) + self.network.delay(source, target)
        self._loop.call_at(max(due, self._last), self.peer._broke_unless_holed, self, context=self._loop.outside)

    def _broke_unless_holed(self, source: End) -> None:
        until = self.network.open_until(source.host.name, self.host.name)
        if until > self._loop.now:
            self._loop.call_at(until, self._broke_unless_holed, source, context=self._loop.outside)
        else:
            self._broke()

    def _broke(self) -> None:
        if not self._vanished:
            self.broken = True
            self._lose(ConnectionResetError(104, "Connection reset by peer"))

    def reset(self) -> None:
        """Break this end, now."""
        self._broke()

    def host_died(self, *, vanished: bool) -> None:
        """The program is gone; its kernel says so, unless it is gone, too."""
        told = not self._lost and not vanished
        self._lost = self._closing = True
        self._unread.clear()
        if told:
            self.reset_peer()
        elif vanished:
            self._vanished = True
            self._outgoing.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Socket:
    def __init__(self, address: Address) -> None:
        self._address = address

    def getsockname(self) -> Address:
        return self._address


class _Server:
    """Stands for an `asyncio.Server`."""

    def __init__(self, network: Network, address: Address) -> None:
        self.sockets = (_Socket(address),)
        self._network = network

    def close(self) -> None:
        self._network.listeners.pop(self.sockets[0].getsockname(), None)


class NetworkLoop(HostLoop):
    """Connects over a `Network`, which is to be set."""

    network: Network

    def __init__(self) -> None:
        super().__init__()
        self.outside = contextvars.copy_context()  # nobody's machine

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return await self.network.connect(protocol_factory, (host, port))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        here = HERE.get()
        assert here is not None
        self.network.listeners[host, port] = here, protocol_factory
        return _Server(self.network, (host, port))
