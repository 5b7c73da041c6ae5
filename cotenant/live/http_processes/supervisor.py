"""Start HTTP processes, start them again where they die, and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from cotenant import __version__
from cotenant.errors import ConfigError
from cotenant.live.access import Access
from cotenant.live.confinement import Confinement
from cotenant.live.http.listener import listening_sockets
from cotenant.live.http.request_handler import RequestHandler
from cotenant.live.http.server import cannot_listen
from cotenant.live.http_processes.board import SIZE, Board
from cotenant.live.http_processes.link import CLOSED, Link
from cotenant.live.http_processes.messages import Drain, Setup, TlsFiles, ToServer
from cotenant.live.http_processes.publisher import AdmissionPublisher
from cotenant.live.http_processes.session import HttpProcessSession, SharedCore
from cotenant.live.limits import Limits
from cotenant.worker.arena import PAGE, Arena

logger = logging.getLogger(__name__)

WATCH = 1.0  # seconds between two looks whether HTTP processes are alive
SILENCE = 10.0  # seconds without a sign of life after which one is ended
STARTING = 60.0  # the same while it starts
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 5.0  # seconds before one that died is started again: doubled while they die young
YOUNG = 10.0  # seconds
LOOK = 0.01  # seconds between two looks whether one that is to end has exited
EXIT = 1.0  # seconds that one has to exit beyond the time that its callers have

# What OpenSSL and Python's `ssl` read besides what workers are given.
TLS_ENVIRONMENT = (
    "OPENSSL_CONF",
    "OPENSSL_CONF_INCLUDE",
    "OPENSSL_ENGINES",
    "OPENSSL_MODULES",
    "OPENSSL_ia32cap",
    "SSLKEYLOGFILE",
)


def part_size(limits: Limits) -> int:
    """Return the bytes of the arena that an HTTP process may allocate: bodies, and tensors that were read from JSON."""
    return -(-2 * limits.memory // PAGE) * PAGE


def beyond(count: int, limits: Limits) -> int:
    """Return the bytes that an arena needs beyond its own: the board, and for each HTTP process two parts, since what
    workers still read of one that died is not its successor's."""
    return -(-SIZE // PAGE) * PAGE + 2 * count * part_size(limits)


class HttpProcesses:
    """Serve HTTP by `count` processes on one port. As `HttpServer` it listens and stops.

    core: answers their requests. arena: has `beyond` for them. module: what a process runs. handler: answers what is
    not inference. limits: of each process. access, tls, log_level, log_format, log_access: as `HttpServer` and the log
    of the server have them.
    """

    def __init__(
        self,
        core: SharedCore,
        arena: Arena,
        count: int,
        module: str,
        handler: RequestHandler,
        *,
        limits: Limits,
        access: Access,
        tls: TlsFiles | None,
        log_level: str,
        log_format: str,
        log_access: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        block = arena.parts.allocate(SIZE)
        assert block is not None, "an arena without room for the board"
        self._core = core
        self._clock = clock
        self._arena = arena
        self._module = module
        self._handler = handler
        self._board_block = block
        self._board = Board(block.view, count)
        self._publisher = AdmissionPublisher(core, self._board, loop=loop)
        self._setup = partial(
            Setup,
            arena=arena.size,
            board=block.offset,
            limits=limits,
            tokens=access.digests,
            control=access.control,
            tls=tls,
            log_level=log_level,
            log_format=log_format,
            access_log=log_access,
        )
        self._part = part_size(limits)
        self._places = [_Place(number) for number in range(count)]
        self._stopping = False
        self._watching: asyncio.TimerHandle | None = None
        self._watched = self._listening = 0.0  # when it was last looked at all; since when it was without a gap
        self._ending: dict[asyncio.Task[None], subprocess.Popen[bytes]] = {}  # by what reaps them and starts others
        core.watch_models(partial(self._changed, core))
        self._changed(core)

    def _changed(self, core: SharedCore) -> None:
        self._board.change_models(core.shortest_target)

    async def listen(self, host: str, port: int) -> int:
        """Start to serve; return the port (a free one for port 0). Raises ConfigError.

        The sockets stay this process's, too: connections that wait for an HTTP process which dies are its successor's.
        """
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError("http_processes: this system cannot share a port (SO_REUSEPORT); set http_processes = 1")
        try:
            if port:  # held by somebody else, it would be shared with them, if they are this user's
                for probe in await listening_sockets(host, port):
                    probe.close()
            for place in self._places:
                place.listening = await listening_sockets(host, port, shared=True)
                port = port or int(place.listening[0].getsockname()[1])
        except (OSError, OverflowError) as error:
            self._close_sockets()
            raise cannot_listen("HTTP", host, port, error) from None
        for place in self._places:
            self._start(place)
        self._watched = self._listening = self._clock()
        self._watching = self._loop.call_later(WATCH, self._watch)
        return port

    async def stop(self, grace: float) -> None:
        """Accept nothing more, let pending requests be answered within `grace` seconds, and end the processes."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
        self._close_sockets()
        running = [place for place in self._places if place.process is not None]
        for place in running:
            if place.session is not None:
                place.session.send(Drain(grace))
        await asyncio.gather(*(self._end(place, grace + EXIT) for place in running))
        await self._handler.stop()
        for process in self._ending.values():
            process.kill()
        if self._ending:
            await asyncio.wait(self._ending, timeout=EXIT)

    # Our own

    def _start(self, place: _Place) -> None:
        """Start an HTTP process. One that cannot be started now is tried again."""
        if self._stopping:
            return
        place.started = self._clock()
        self._publisher.forget(place.number)  # the last one may have written to the board until its end
        part = self._arena.parts.allocate(self._part)
        try:
            if part is None:
                raise OSError(0, "workers still read what the last ones have received")
            process, connection = self._spawn(place)
        except OSError as error:
            self._again(place, f"cannot start HTTP process {place.number}: {error.strerror}")
            return
        place.process = process
        link: Link[ToServer] = Link(
            connection,
            ToServer,
            lambda message: session.take(message),
            taken=lambda: session.taken(),
            lost=lambda reason: self._lost(place, reason),
        )
        session = place.session = HttpProcessSession(
            place.number,
            self._core,
            self._handler,
            self._board,
            self._publisher,
            part,
            link.write,
            self._loop,
        )
        place.link = link
        session.send(
            self._setup(
                number=place.number,
                listening=tuple(each.fileno() for each in place.listening),
                part=(part.offset, part.size),
            )
        )

    def _spawn(self, place: _Place) -> tuple[subprocess.Popen[bytes], socket.socket]:
        with contextlib.ExitStack() as ours:
            connection, other = socket.socketpair()
            ours.enter_context(connection)
            with other:
                arguments = (self._arena.fd, len(self._places), os.getpid(), __version__)
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module, *map(str, arguments)],
                    stdin=other.fileno(),
                    pass_fds=(self._arena.fd, *(each.fileno() for each in place.listening)),
                    env=Confinement(environment=TLS_ENVIRONMENT).environ(os.environ),
                    process_group=0,  # Ctrl-C is for the server, which lets them finish
                )
            ours.pop_all()
        return process, connection

    def _lost(self, place: _Place, reason: str) -> None:
        """End an HTTP process that is gone, or cannot be understood; start another."""
        process, session = place.process, place.session
        place.process = place.session = place.link = None
        if process is None or session is None:
            return
        session.cancel()
        if reason != CLOSED:
            place.verdict = place.verdict or reason
            process.kill()
        task = self._loop.create_task(self._replace(place, process, session, reason))
        self._ending[task] = process
        task.add_done_callback(self._ending.pop)

    async def _replace(
        self, place: _Place, process: subprocess.Popen[bytes], session: HttpProcessSession, reason: str
    ) -> None:
        if not await _exited(process, EXIT):
            process.kill()
            await _exited(process, math.inf)  # what it was lent is not another's before
        session.close()
        if not self._stopping:
            code = process.returncode
            ended = f"it was killed by signal {-code}" if code is not None and code < 0 else reason
            self._again(place, f"HTTP process {place.number} died: {place.verdict or ended}")

    def _again(self, place: _Place, reason: str) -> None:
        logger.warning("%s; it is started again", reason)
        place.verdict = ""
        is_young = self._clock() - place.started < YOUNG
        place.pause = min(2 * place.pause, LONGEST_PAUSE) if is_young else FIRST_PAUSE
        self._loop.call_later(place.pause, self._start, place)

    def _watch(self) -> None:
        """End HTTP processes that give no sign of life. Where this process itself was frozen, so may they have been:
        their time begins anew."""
        self._watching = self._loop.call_later(WATCH, self._watch)
        self._arena.parts.reclaim()  # of processes that ended while workers read what they had received
        now = self._clock()
        if now - self._watched > SILENCE / 2:
            self._listening = now
        self._watched = now
        for place in self._places:
            last = self._board.last_beat(place.number)
            since, patience = (last, SILENCE) if last else (place.started, STARTING)
            if place.process is not None and now - max(since, self._listening) > patience:
                place.verdict = f"it gave no sign of life for {patience:g} s"
                place.process.kill()

    async def _end(self, place: _Place, seconds: float) -> None:
        process = place.process
        if process is not None and not await _exited(process, seconds):
            process.kill()
            await _exited(process, EXIT)
        if place.link is not None:
            place.link.close()
        if place.session is not None:
            place.session.close()

    def _close_sockets(self) -> None:
        for place in self._places:
            for each in place.listening:
                each.close()


class _Place:
    """Hold an HTTP process's place: its sockets, which stay, and its process, which may be another one later. verdict:
    why it was ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.listening: Sequence[socket.socket] = ()
        self.process: subprocess.Popen[bytes] | None = None
        self.session: HttpProcessSession | None = None
        self.link: Link[ToServer] | None = None
        self.started = 0.0
        self.pause = FIRST_PAUSE / 2
        self.verdict = ""


async def _exited(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a process has exited; return whether it has. It is reaped then.

    No thread waits for it: those of the event loop's executor answer what HTTP processes pass on until they exit.
    """
    until = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(LOOK)
    return True
