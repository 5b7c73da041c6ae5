"""Manage worker processes and the server's end of each lane's socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from cotenant.errors import WorkerError
from cotenant.live.confinement import Confinement
from cotenant.worker.background import lower_priority
from cotenant.worker.wire import (
    BatchResult,
    FromWorker,
    Inbox,
    ToWorker,
    WorkerBroken,
    WorkerClosed,
    WorkerReady,
    encode_message,
)

logger = logging.getLogger(__name__)

_CPUCLOCK_SCHED = 2  # the clock of CPU time in nanoseconds, of those that Linux has for a process
_POLL = 0.005  # seconds between two checks whether a process that has closed its socket has exited
_SLOW = 0.1  # the same, once it was killed: one that is blocked in a driver may never exit
_LINGER = 2.0  # seconds within which such a process, or a killed one, must exit

_UNCONFINED = Confinement()
_decoder = msgspec.msgpack.Decoder(FromWorker)


class ProcessLimitError(WorkerError):
    """Say that the system cannot run one more process now, and may be able to later."""


@contextlib.contextmanager
def _counted(name: str) -> Iterator[None]:
    """Raise ProcessLimitError where the system refuses a resource within this context."""
    try:
        yield
    except OSError as error:
        what = f"no process for {name}: {error.strerror}"
        raise ProcessLimitError(f"{what}; are there too many processes or open files, or too little memory?") from None


class WorkerProcess:
    """Start a worker process. Raises ProcessLimitError. It serves one lane over its standard input, and exits with it;
    a `shared` process serves any number, each over a socket that it is handed, and exits after the last.

    `gone` becomes the reason why the process exited, once nothing is left of it. name: of its lane or device, for the
    log. arena: the descriptor that it inherits. left: called with the lanes that ended at the same moment, and why.
    preload: modules that a pre-started process imports before a lane takes it; None for a process that serves a lane at
    once.
    """

    def __init__(
        self,
        name: str,
        arena: int,
        *,
        left: Callable[[Sequence[WorkerConnection], str], None],
        shared: bool = False,
        preload: Sequence[str] | None = None,
        confinement: Confinement = _UNCONFINED,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[str] = loop.create_future()
        self.lines: set[WorkerConnection] = set()
        self.ending = False  # accepts no further lane
        self.waits = False  # pre-started, ready, and not taken yet
        self._reaping = False
        self._name = name
        self._left = left
        self._shared = shared
        self._verdict = ""
        self._last_words = ""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours, _counted(name):
            self._connection, other = socket.socketpair()
            theirs.enter_context(other)
            ours.enter_context(self._connection)
            self._output, printed = os.pipe()
            theirs.callback(os.close, printed)
            ours.callback(os.close, self._output)
            program = ["cotenant.worker.main"] if preload is None else ["cotenant.worker.prestart", ",".join(preload)]
            words = ["shared"] * shared + ["background"] * confinement.background
            self._process = subprocess.Popen(
                [sys.executable, "-m", *program, str(arena), str(os.getpid()), *words],
                stdin=other.fileno(),
                stdout=printed,
                stderr=printed,
                pass_fds=(arena,),
                env=confinement.environ(os.environ),
                process_group=0,  # Ctrl-C is for the server alone, which stops its workers
            )
            ours.pop_all()  # the server's ends stay open
        self.pid = self._process.pid
        if preload is not None:  # nobody waits for it, and the interpreter alone takes as long as a batch
            lower_priority(self.pid)
        confinement.apply(self.pid)
        os.set_blocking(self._output, False)
        loop.add_reader(self._output, self._listen)
        if preload is not None:
            loop.add_reader(self._connection, self._watch)

    def take(self, name: str) -> bool:
        """Take a pre-started process under a new name; return False where it is not ready or has died."""
        if not self.waits or self._process.poll() is not None:
            return False
        self._loop.remove_reader(self._connection)
        self.waits = False
        self._name = name
        return True

    def connect(self) -> socket.socket:
        """Return the server's end of a socket for one more lane. Raises ProcessLimitError."""
        if not self._shared:
            return self._connection
        with _counted(self._name):
            ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # the process died: then `ours` reads as closed
            socket.send_fds(self._connection, [b"\0"], [theirs.fileno()])
        return ours

    def kill(self, reason: str) -> None:
        if not self.gone.done():
            self.ending = True
            self._verdict = self._verdict or reason
            self._process.kill()

    async def stop(self, reason: str) -> None:
        """Kill the process unless it is about to exit, and wait until nothing is left of it. The wait is bounded: a
        process that is blocked in a driver may stay."""
        if not self._reaping:
            self.kill(reason)
        await asyncio.wait([self.gone], timeout=2 * _LINGER)

    def forget(self, line: WorkerConnection) -> None:
        """Forget a lane that has ended; the process ends with its last."""
        self.lines.discard(line)
        if not self.lines and not self.gone.done():
            self.end()

    def end(self) -> None:
        """Help the process exit after it has closed a socket or lost its last lane."""
        self.ending = True
        if self._reaping:
            return
        self._reaping = True
        if self._shared:
            with contextlib.suppress(OSError):  # it has exited already
                self._connection.shutdown(socket.SHUT_WR)
        self._reap(self._loop.time() + _LINGER)

    def _watch(self) -> None:
        """Read the byte that a pre-started process sends once it is ready."""
        with contextlib.suppress(BlockingIOError):
            try:
                self.waits = bool(self._connection.recv(1, socket.MSG_DONTWAIT))
            except ConnectionResetError:
                self.waits = False
            if not self.waits:
                self._loop.remove_reader(self._connection)
                self.end()

    def _listen(self) -> None:
        """Log the output of the process, and keep its last line as the reason of a death."""
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output)
        for line in data.decode(errors="replace").splitlines():
            logger.info("%s: %s", self._name, line)
            self._last_words = line.strip() or self._last_words

    def _reap(self, deadline: float) -> None:
        if self.gone.done():
            return
        if self._process.poll() is not None:
            self._clear()
            return
        late = self._loop.time() > deadline
        if late:
            self.kill("it closed its socket")
        self._loop.call_later(_SLOW if late else _POLL, self._reap, deadline)

    def _clear(self) -> None:
        self._listen()
        self._loop.remove_reader(self._output)
        os.close(self._output)
        reason = self._reason()
        self.ending = True
        self.gone.set_result(reason)
        self.clear(list(self.lines), reason)
        self._connection.close()

    def clear(self, lines: Sequence[WorkerConnection], reason: str) -> None:
        """Clear lanes of which nothing is left in the process, and report them together."""
        cleared = [line for line in lines if line.clear(reason)]
        if cleared:
            self._left(cleared, reason)

    def _reason(self) -> str:
        code = self._process.returncode
        if self._verdict:
            return self._verdict
        text = f"it was killed by {_signal(-code)}" if code < 0 else f"it exited with status {code}"
        return f"{text}: {self._last_words}" if self._last_words else text


class WorkerConnection:
    """Hold the server's end of one lane's socket to the process that serves it.

    `started` becomes "" when the lane is ready, or the reason why it will never be; `gone` becomes the reason why it
    ended, once nothing of it runs any more. fileno: of the socket. answered: called with each answer, and the size of
    its message.
    """

    def __init__(
        self,
        process: WorkerProcess,
        *,
        answered: Callable[[WorkerConnection, BatchResult, int], None],
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.process = process
        self.started: asyncio.Future[str] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        self.footprints: dict[str, int] = {}
        self._answered = answered
        self._unsent = bytearray()
        self._ended = False  # end of stream
        self._ready = False  # the worker said so
        self._closed = False  # the worker closed the lane in good order
        self._connection = process.connect()
        self._connection.setblocking(False)
        self.fileno = self._connection.fileno()
        self._inbox = Inbox(self._connection)
        process.lines.add(self)
        loop.add_reader(self.fileno, self.receive)

    def send(self, message: ToWorker) -> None:
        """Send a message without blocking: what the socket does not accept now follows later."""
        data = encode_message(message)
        if not self._unsent:
            data = self._push(data)
            if data:
                self._loop.add_writer(self.fileno, self._flush)
        self._unsent += data

    def retire(self) -> None:
        """Let the lane finish its batch, answer, and end."""
        with contextlib.suppress(OSError):  # it has exited already
            self._connection.shutdown(socket.SHUT_WR)

    async def stop(self, grace: float) -> None:
        """Retire the lane, and wait until it is gone. Where it is not ready, or after `grace` seconds, its process is
        killed; a process that serves other lanes is left to exit by itself, and sends no more answers."""
        alone = self.process.lines <= {self}
        if self.started.done() or not alone:
            self.retire()
            await asyncio.wait([self.gone], timeout=grace)
        if self.process.lines <= {self}:
            if not self.gone.done():
                self.process.kill(f"it did not stop within {grace:g} s")
                await asyncio.wait([self.gone], timeout=_LINGER)
            await asyncio.wait([self.process.gone], timeout=2 * _LINGER)

    def _push(self, data: bytearray) -> bytearray:
        """Return what the socket did not accept."""
        try:
            return data[self._connection.send(data) :]
        except BlockingIOError:
            return data
        except (BrokenPipeError, ConnectionResetError):
            return bytearray()  # the process died, as `receive` will find out

    def _flush(self) -> None:
        self._unsent = self._push(self._unsent)
        if not self._unsent:
            self._loop.remove_writer(self.fileno)

    def receive(self) -> None:
        """Receive messages without blocking. Called by the event loop when the socket is readable."""
        if self._ended:
            return
        try:
            self._ended = not self._inbox.fill()
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._ended = True
        if self._ended:
            self._loop.remove_reader(self.fileno)
        try:
            while (data := self._inbox.take()) is not None:
                self._accept(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, WorkerError) as error:
            self._distrust(str(error))
            return
        if self._ended:
            if self._closed:
                self.process.clear([self], "it was stopped")
            else:
                self.process.end()

    def _accept(self, data: bytes) -> None:
        match _decoder.decode(data):
            case WorkerReady(footprints):
                if self._ready:
                    raise WorkerError("it said a second time that it is ready")
                self._ready = True
                self.footprints = footprints
                self._settle("")
            case WorkerBroken(reason):
                self._settle(reason)
            case WorkerClosed():
                self._closed = True
            case answer:
                self._answered(self, answer, len(data))

    def _distrust(self, error: str) -> None:
        """Read nothing more of a worker that sends what is not the protocol, and end its process."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self.fileno)
        self.process.kill(f"it broke the protocol: {error}")
        self.process.end()

    def _settle(self, reason: str) -> None:
        if not self.started.done():
            self.started.set_result(reason)

    def give_up(self, reason: str) -> None:
        """Stop waiting for the lane to be ready. Harmless where it is."""
        self._settle(reason)

    def clear(self, reason: str) -> bool:
        """Clear the lane; return False where that was done before."""
        if self.gone.done():
            return False
        self._ended = True
        self._loop.remove_reader(self.fileno)
        self._loop.remove_writer(self.fileno)
        self._connection.close()
        self._settle(reason)
        self.gone.set_result(reason)
        self.process.forget(self)
        return True


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cpu_time(pid: int) -> float | None:
    """Return the CPU seconds that a process and its threads have used; None where there is no such process.

    It reads the process's CPU clock, by the identifier that clock_getcpuclockid(3) gives it: a system call of 2 us,
    where reading /proc takes 100 us, too long for the event loop.
    """
    clock = ~pid << 3 | _CPUCLOCK_SCHED
    try:
        return time.clock_gettime(clock)
    except OSError:
        return None


def private_memory(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other, 0 where there is no such process. It reads /proc,
    so call it in a thread."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
