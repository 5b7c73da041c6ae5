"""One worker process and our end of its socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from cotenant.errors import WorkerError
from cotenant.worker.wire import Answer, Broken, FromWorker, Inbox, Ready, ToWorker, pack

logger = logging.getLogger(__name__)

# One thread for one core: a numeric library that makes threads of its own would take more than the share.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_POLL = 0.005  # seconds between two looks at a process that has closed its socket
_LINGER = 2.0  # seconds that such a process, or a killed one, has to be gone

_decoder = msgspec.msgpack.Decoder(FromWorker)


class Process:
    """Starts at once. `started` becomes "" when it is ready, or the reason why it will never be; `gone` becomes the
    reason why it ended, once nothing is left of it.

    name: whose it is, for the log. arena: the descriptor that it inherits. answered: called with each answer and the
    size of its message; left: called when it is gone.
    """

    def __init__(
        self,
        name: str,
        arena: int,
        env: Mapping[str, str],
        *,
        answered: Callable[[Process, Answer, int], None],
        left: Callable[[Process, str], None],
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[str] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        self.footprints: dict[str, int] = {}
        self._name = name
        self._answered = answered
        self._left = left
        self._verdict = ""
        self._last_words = ""
        self._unsent = bytearray()
        self._ended = False  # its stream
        self._connection, theirs = socket.socketpair()
        self._output, printed = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cotenant.worker.main", str(arena), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=printed,
                stderr=printed,
                pass_fds=(arena,),
                env={**os.environ, **_ENVIRONMENT, **env},
                process_group=0,  # Ctrl-C is for the server alone, which tells its workers
            )
        except OSError as error:
            self._connection.close()
            os.close(self._output)
            raise WorkerError(
                f"no process for {name}: {error.strerror}; are there too many, or too little memory?"
            ) from None
        finally:
            theirs.close()
            os.close(printed)
        self.pid = self._process.pid
        self._inbox = Inbox(self._connection)
        self._connection.setblocking(False)
        os.set_blocking(self._output, False)
        loop.add_reader(self._connection.fileno(), self.receive)
        loop.add_reader(self._output, self._listen)

    def send(self, message: ToWorker) -> None:
        """Never blocks; what the socket does not take now follows later."""
        data = pack(message)
        if not self._unsent:
            data = self._push(data)
            if data:
                self._loop.add_writer(self._connection.fileno(), self._flush)
        self._unsent += data

    def retire(self) -> None:
        """It finishes what it runs, answers, and exits."""
        with contextlib.suppress(OSError):  # it is gone already
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self, reason: str) -> None:
        if not self.gone.done():
            self._verdict = self._verdict or reason
            self._process.kill()

    async def stop(self, grace: float) -> None:
        """Retire it, kill it after `grace` seconds or where it is not even ready, and wait until it is gone."""
        if self.started.done():
            self.retire()
            await asyncio.wait([self.gone], timeout=grace)
        self.kill(f"it did not stop within {grace:g} s")
        await asyncio.wait([self.gone], timeout=_LINGER)

    def _push(self, data: bytearray) -> bytearray:
        """What the socket does not take of it."""
        try:
            return data[self._connection.send(data) :]
        except BlockingIOError:
            return data
        except (BrokenPipeError, ConnectionResetError):
            return bytearray()  # it died, as `receive` is about to find out

    def _flush(self) -> None:
        self._unsent = self._push(self._unsent)
        if not self._unsent:
            self._loop.remove_writer(self._connection.fileno())

    def receive(self) -> None:
        """Take what it has said. Never blocks; the event loop calls this as soon as it comes to it."""
        if self._ended:
            return
        try:
            self._ended = not self._inbox.fill()
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._ended = True
        if self._ended:
            self._loop.remove_reader(self._connection.fileno())
            self._reap(self._loop.time() + _LINGER)
        while (data := self._inbox.take()) is not None:
            match _decoder.decode(data):
                case Ready(footprints):
                    self.footprints = footprints
                    self._settle("")
                case Broken(reason):
                    self._settle(reason)
                case answer:
                    self._answered(self, answer, len(data))

    def _settle(self, reason: str) -> None:
        if not self.started.done():
            self.started.set_result(reason)

    def _listen(self) -> None:
        """What it prints is for the log; its last words say why it died."""
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
        """It has closed its socket, so it is about to exit, if only with our help."""
        if self.gone.done():
            return
        if self._process.poll() is not None:
            self._clear()
            return
        if self._loop.time() > deadline:
            self.kill("it closed its socket")
        self._loop.call_later(_POLL, self._reap, deadline)

    def _clear(self) -> None:
        if self.gone.done():
            return
        self._listen()
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        os.close(self._output)
        reason = self._reason()
        self._settle(reason)
        self.gone.set_result(reason)
        self._left(self, reason)

    def _reason(self) -> str:
        code = self._process.returncode
        if self._verdict:
            return self._verdict
        text = f"it was killed by {_signal(-code)}" if code < 0 else f"it exited with status {code}"
        return f"{text}: {self._last_words}" if self._last_words else text


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def processor_time(pid: int) -> float | None:
    """Seconds that a process and its threads have used, as the kernel counts them; None where it does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before may hold anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_memory(pid: int) -> int:
    """Bytes of memory that no other process shares, 0 where the system does not say."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
