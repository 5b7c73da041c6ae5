"""An HTTP process and the server's process in one: the whole protocol between them, without sockets and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec

from cotenant.live.http import HttpServer
from cotenant.live.http_processes.board import SIZE, Board
from cotenant.live.http_processes.messages import HEAD, ToHttpProcess, ToServer
from cotenant.live.http_processes.publisher import AdmissionPublisher
from cotenant.live.http_processes.remote_core import RemoteCore, RemoteShedder
from cotenant.live.http_processes.session import HttpProcessSession
from cotenant.live.oip import Core
from cotenant.worker.arena import Block, Region
from tests.live.stub import StubCore

PART = 8 << 20  # bytes


class StubLoop:
    """An event loop whose timers run when the test says so, and its rounds end with each callback, or by `end`, too."""

    def __init__(self, *, ends: bool = True) -> None:
        self.timers: list[Callable[[], object]] = []
        self._ends = ends
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[..., object], /, *args: Any) -> None:
        if self._ends:
            callback(*args)
        else:
            self._soon.append(partial(callback, *args))

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> None:
        callback(*args)

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> None:
        self.timers.append(partial(callback, *args))

    def run_timers(self) -> None:
        timers, self.timers = self.timers, []
        for call in timers:
            call()

    def end(self) -> None:
        while self._soon:
            self._soon.pop(0)()


class Remote:
    """An HTTP process before a core of the server's process. server: serves HTTP. loop: of both; by default
    a round has one message. frames: that the server's process has taken, and sent.
    busy: what comes to it waits for `go_on`."""

    def __init__(self, core: StubCore, *, loop: StubLoop | None = None, **options: Any) -> None:
        self.arena = core.arena
        board = self.arena.parts.allocate(SIZE)
        part = self.arena.parts.allocate(PART)
        assert board is not None and part is not None
        self.part = part
        self.loop = loop = loop or StubLoop()
        self.board = Board(board.view, 2, clock=lambda: 0.0)
        self.frames = [0, 0]
        self.busy = False
        self._kept: list[bytes] = []
        self.own = HttpServer(core, **options)
        core.changed.append(self.board.change_models)
        self.publisher = AdmissionPublisher(core, self.board, loop=loop)
        self.session = HttpProcessSession(
            0,
            core,
            self.own.handler,
            self.board,
            self.publisher,
            part,
            self._to_http_process,
            loop,
        )
        memory = cast(Any, self.arena)._memory
        self.region = Region(memory, part.offset, part.offset + part.size, kept=0)
        self.core = RemoteCore(
            0,
            self.board,
            self.region,
            Block(0, self.arena.size, memoryview(memory)),
            self._to_server,
            loop,
        )
        limits = {name: value for name, value in options.items() if name in ("limits", "access", "log_access")}
        self.server = HttpServer(
            cast(Core, self.core),
            forward=self.core.forward,
            shedder=RemoteShedder(self.core, time.monotonic),
            **limits,
        )

    def end(self) -> None:
        """Let go of all that the HTTP process had."""
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

    def _to_http_process(self, frame: bytearray) -> None:
        self.frames[1] += 1
        for message in msgspec.msgpack.decode(bytes(frame)[HEAD.size :], type=list[ToHttpProcess]):
            self.core.take(message)
        self.core.taken()
