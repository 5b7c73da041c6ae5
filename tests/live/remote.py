"""A front end and the server's process in one: the whole protocol between them, without sockets and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import msgspec

from cotenant.live.front_ends.board import SIZE, Board
from cotenant.live.front_ends.messages import HEAD, ToFrontEnd, ToServer
from cotenant.live.front_ends.publisher import AdmissionPublisher
from cotenant.live.front_ends.remote_core import RemoteCore, RemoteShedder
from cotenant.live.front_ends.session import FrontEndSession
from cotenant.live.http import HttpServer
from cotenant.live.oip import Core
from cotenant.worker.arena import Block, Region
from tests.live.stub import StubCore

PART = 8 << 20  # bytes


def _at_once(call: Callable[..., None], *args: Any) -> None:
    call(*args)


class Later:
    """Timers that run when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def __call__(self, seconds: float, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Remote:
    """A front end before a core of the server's process. server: serves HTTP. soon: calls back at the end of a round;
    by default a round has one message. later: timers of both. frames: that the server's process has taken, and sent.
    busy: what comes to it waits for `go_on`."""

    def __init__(self, core: StubCore, *, soon: Callable[..., Any] = _at_once, **options: Any) -> None:
        self.arena = core.arena
        board = self.arena.parts.allocate(SIZE)
        part = self.arena.parts.allocate(PART)
        assert board is not None and part is not None
        self.part = part
        self.later = Later()
        self.board = Board(board.view, 2, clock=lambda: 0.0)
        self.frames = [0, 0]
        self.busy = False
        self._kept: list[bytes] = []
        self.own = HttpServer(core, **options)
        core.changed.append(self.board.change_models)
        self.publisher = AdmissionPublisher(core, self.board, soon=soon, later=self.later)
        self.session = FrontEndSession(
            0,
            core,
            self.own.handler,
            self.board,
            self.publisher,
            part,
            self._to_front_end,
            soon=soon,
            soon_from_thread=_at_once,
        )
        memory = cast(Any, self.arena)._memory
        self.region = Region(memory, part.offset, part.offset + part.size, kept=0)
        self.core = RemoteCore(
            0,
            self.board,
            self.region,
            Block(0, self.arena.size, memoryview(memory)),
            self._to_server,
            soon=soon,
            later=self.later,
            soon_from_thread=_at_once,
        )
        limits = {name: value for name, value in options.items() if name in ("limits", "access", "log_access")}
        self.server = HttpServer(
            cast(Core, self.core),
            forward=self.core.forward,
            shedder=RemoteShedder(self.core, time.monotonic),
            **limits,
        )

    def end(self) -> None:
        """Let go of all that the front end's process had."""
        del self.server, self.core, self.region, self.session, self.part

    def go_on(self) -> None:
        """Let the server's process take what has come while it was busy."""
        self.busy = False
        kept, self._kept = self._kept, []
        for frame in kept:
            self._take(frame)

    def _to_server(self, frame: bytearray) -> None:
        if self.busy:
            self._kept.append(bytes(frame))
        else:
            self._take(bytes(frame))

    def _take(self, frame: bytes) -> None:
        self.frames[0] += 1
        for message in msgspec.msgpack.decode(frame[HEAD.size :], type=list[ToServer]):
            self.session.take(message)
        self.session.taken()

    def _to_front_end(self, frame: bytearray) -> None:
        self.frames[1] += 1
        for message in msgspec.msgpack.decode(bytes(frame)[HEAD.size :], type=list[ToFrontEnd]):
            self.core.take(message)
        self.core.taken()
