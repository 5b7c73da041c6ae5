"""Hold the server's end of a job: its shim (`worker.jobs.shim`), which starts, holds and ends the job's processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec

from cotenant.worker.jobs.messages import (
    Attempt,
    Ended,
    FromShim,
    Grant,
    Kill,
    Lines,
    Report,
    Started,
    Tell,
    ToShim,
    encode_line,
)

_READ = 1 << 16  # bytes
_MAX_UNSENT = 1 << 20  # bytes that a shim that hears nothing may be owed
_LINGER = 0.05  # seconds between two looks whether a shim that has closed its socket has exited
_LONGEST_LINGER = 15.0  # seconds until it is killed


class JobProcess:
    """Start a shim, and with it an attempt. Raises OSError where the system refuses one more process.

    environ: of the job. reported: hears how far it is. ended: hears once that nothing of it is left, and nothing after
    that. All methods belong to the event loop, and none of them waits.
    """

    def __init__(
        self,
        attempt: Attempt,
        environ: Mapping[str, str],
        *,
        reported: Callable[[Report], None],
        ended: Callable[[Ended], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._reported = reported
        self._tell_ended = ended
        self._last = Report()
        self._end: Ended | None = None
        self._group = 0  # process group of the job
        self._waits = attempt.waits
        self._closed = False  # the shim has closed its end
        self._told = False
        self._unsent = bytearray()
        self._lines: Lines[FromShim] = Lines(msgspec.json.Decoder(FromShim))
        self._connection, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._connection.close)
            self._shim = subprocess.Popen(
                [sys.executable, "-m", "cotenant.worker.jobs.shim"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environ),
                process_group=0,  # Ctrl-C is for the server alone
            )
            undo.pop_all()
        self.pid = self._shim.pid
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection, self._receive)
        self._send(attempt)

    @property
    def processor(self) -> float:
        """Processor seconds that the job is known to have used."""
        return self._last.processor

    def grant(self, share: int, processors: float | None) -> None:
        """Let the job use a share, in ‰. processors: that so much is; None: no limit."""
        if not share and not self._waits and not self._told:
            # The shim does it too, and to what has left the group: this is sooner by the time that it takes to wake up.
            self._signal(signal.SIGSTOP)
        self._send(Grant(share, processors))

    def tell(self) -> None:
        """Tell the job to save what it has and exit."""
        self._told = True  # from now on it runs
        self._send(Tell())

    def kill(self, reason: str) -> None:
        self._send(Kill(reason))

    def abandon(self) -> None:
        """Kill the shim as well, where it is still there: it hangs, or processes of the job cannot be killed."""
        if not self.gone.done():
            self._shim.kill()
            self._signal(signal.SIGKILL)

    def _send(self, message: ToShim) -> None:
        if self._closed or len(self._unsent) > _MAX_UNSENT:
            return
        if not self._unsent:
            self._loop.add_writer(self._connection, self._flush)
        self._unsent += encode_line(message)
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                del self._unsent[: self._connection.send(self._unsent)]
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._connection)

    def _receive(self) -> None:
        try:
            data = self._connection.recv(_READ)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        try:
            for message in self._lines.feed(data):
                self._accept(message)
        except msgspec.DecodeError:
            data = b""
        if not data:
            self._closed = True
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
            self._reap(self._loop.time() + _LONGEST_LINGER)

    def _accept(self, message: FromShim) -> None:
        match message:
            case Started(group):
                self._group = group
            case Report():
                self._last = message
                self._reported(message)
            case Ended():
                self._end = message
                self._group = 0

    def _reap(self, deadline: float) -> None:
        """Wait for the shim to exit, and report the end."""
        if self._shim.poll() is None:
            if self._loop.time() > deadline:
                self._shim.kill()
            self._loop.call_later(_LINGER, self._reap, deadline)
            return
        self._signal(signal.SIGKILL)  # of a shim that was killed itself
        reason = "the process that held it ended"
        self.gone.set_result(None)
        self._tell_ended(self._end or Ended(completed=False, reason=reason, processor=self.processor))

    def _signal(self, number: signal.Signals) -> None:
        if self._group:
            with contextlib.suppress(OSError):  # it has ended
                os.killpg(self._group, number)
