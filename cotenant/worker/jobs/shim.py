"""Start the processes of one best-effort job, hold them to what is granted, keep what they print, and end them.

`python -m cotenant.worker.jobs.shim`, with a socket to the server as standard input. Orphans of the job become children
of the shim, so none escapes it: it stops, resumes, counts and kills all that descend from it. When the socket ends, the
server is gone, and so is the job: one that went on would meet its own next attempt after a restart.

The shim runs at the usual priority, so that it can stop a job on a busy machine; it sleeps nearly all the time. The job
runs where nobody else wants a processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cotenant.core.units import show_memory
from cotenant.worker.background import LOWEST_PRIORITY, lower_session
from cotenant.worker.jobs.messages import (
    PROGRESS,
    SHARE,
    SHARE_SIZE,
    Attempt,
    Ended,
    Failed,
    FromJob,
    FromShim,
    Grant,
    Kill,
    Lines,
    Report,
    Started,
    Stepped,
    Tell,
    ToShim,
    encode_line,
    write_share,
)
from cotenant.worker.jobs.output_file import OutputFile
from cotenant.worker.jobs.pacer import Pacer
from cotenant.worker.jobs.process_tree import (
    descendants,
    private_memory,
    processor_seconds,
    proportional_memory,
    signal_all,
)

REPORT = 0.25  # seconds between two reports, and looks at memory
READ = 1 << 16  # bytes: what a pipe holds
READ_PAUSE = 0.01  # seconds between two reads of what is printed: one that writes without end costs next to nothing
MAX_PROCESSES = 1000  # of one job
UNKILLABLE = 10.0  # seconds that killed processes have to be gone, which may be blocked in a driver
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OOM_SCORE = 1000  # of 1000: without memory the system ends a job first
_TOLD = "it was asked to stop"


class Shim:
    """Run one attempt, and talk of it to the server over a connected socket. lines: what was read of that already."""

    def __init__(self, server: socket.socket, lines: Lines[ToShim], attempt: Attempt, output: OutputFile) -> None:
        self._server = server
        self._lines = lines
        self._attempt = attempt
        self._output = output
        self._pacer = Pacer()
        self._steps: Lines[FromJob] = Lines(msgspec.json.Decoder(FromJob))
        self._last = Stepped(steps=0)
        self._failed: Failed | None = None
        self._verdict = ""  # why it was killed
        self._told = False
        self._stopped = False
        self._sessions = {os.getsid(0)}  # whose priority is as it should be
        self._ended = 0.0  # processor seconds of processes that were reaped
        self._report_at = 0.0
        self._read_at = 0.0
        self._printed, printed = os.pipe2(os.O_CLOEXEC)
        self._progress, progress = os.pipe2(os.O_CLOEXEC)
        self._open = {self._printed, self._progress}  # pipes that some process of the job may write to
        os.set_blocking(self._printed, False)
        os.set_blocking(self._progress, False)
        share = os.memfd_create("cotenant-job")
        os.ftruncate(share, SHARE_SIZE)
        self._share = mmap.mmap(share, SHARE_SIZE)
        try:
            self._job = _start(attempt, printed, progress, share)
        finally:
            for descriptor in (printed, progress, share):
                os.close(descriptor)

    def run(self, messages: Iterable[ToShim]) -> None:
        """Serve until the job has ended, or the server has. messages: that have come already."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._hold()
        self._send(Started(self._job.pid))
        for message in messages:
            self._obey(message)
        self._reap()  # it may have ended before the signal was watched
        while self._job.returncode is None and not self._verdict:
            now = time.monotonic()
            sources: list[socket.socket | int] = [self._server, woken, *self._open]
            if now < self._read_at and self._printed in self._open:
                sources.remove(self._printed)
            ready = select.select(sources, [], [], self._patience(now))[0]
            if woken in ready:
                os.read(woken, 1 << 10)
            if self._server in ready:
                self._hear()
            if self._progress in ready:
                self._hear_steps()
            if self._printed in ready:
                self._keep()
                self._read_at = time.monotonic() + READ_PAUSE
            self._reap()
            self._look(time.monotonic())
        self._finish()

    # What is heard

    def _hear(self) -> None:
        try:
            data = self._server.recv(READ)
        except ConnectionResetError:
            data = b""
        if not data:
            self._verdict = "the server is gone"
        for message in self._lines.feed(data):
            self._obey(message)

    def _obey(self, message: ToShim) -> None:
        match message:
            case Grant(share, processors):
                write_share(self._share, share)
                rate = 0.0 if not share else math.inf if processors is None else processors
                self._pacer.grant(rate, self._used(), time.monotonic())
                self._hold()
            case Tell():
                self._tell()
            case Kill(reason):
                self._verdict = self._verdict or reason

    def _hear_steps(self) -> None:
        try:
            data = os.read(self._progress, READ)
            if not data:
                self._open.discard(self._progress)
            for message in self._steps.feed(data):
                match message:
                    case Stepped():
                        self._last = message
                    case Failed():
                        self._failed = message
        except BlockingIOError:
            pass
        except msgspec.DecodeError as error:
            self._verdict = f"it broke the protocol of its progress: {error}"

    def _keep(self) -> bool:
        """Keep what was printed; return whether there was any."""
        try:
            data = os.read(self._printed, READ)
        except BlockingIOError:
            return False
        if not data:
            self._open.discard(self._printed)
        self._output.write(data)
        return bool(data)

    # What is done

    def _tell(self) -> None:
        """Tell the job to exit, and let it run until it has."""
        self._told = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._job.pid, signal.SIGTERM)
        self._hold()

    def _hold(self) -> None:
        """Stop the job's processes, or let them go on, as it is granted."""
        # One that waits by itself is never stopped in the middle of a step.
        stop = not (self._pacer.runs or self._told or self._attempt.waits)
        if stop == self._stopped:
            return
        self._stopped = stop
        number = signal.SIGSTOP if stop else signal.SIGCONT
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._job.pid, number)  # nearly always that is all of it, and it is quick
        signal_all(os.getpid(), number)

    def _look(self, now: float) -> None:
        """Pace the job, and report now and then."""
        if self._pacer.next_look() < math.inf:
            self._pacer.look(self._used(), now)
            self._hold()
        if now < self._report_at:
            return
        self._report_at = now + REPORT
        alive = descendants(os.getpid())
        if len(alive) > MAX_PROCESSES:
            self._verdict = f"it started more than {MAX_PROCESSES} processes"
        self._lower_sessions(alive)
        limit = self._attempt.memory
        # What processes share since they were forked is counted once, which takes longer to find out.
        if limit is not None and private_memory(alive) > limit and (taken := proportional_memory(alive)) > limit:
            self._verdict = f"it used {show_memory(taken)} of memory and may have {show_memory(limit)}"
        self._send(self._report(self._ended + processor_seconds(alive)))

    def _lower_sessions(self, alive: Iterable[int]) -> None:
        """Let sessions that processes of the job have made come last, too."""
        for pid in alive if self._attempt.background else ():
            with contextlib.suppress(ProcessLookupError):
                if (session := os.getsid(pid)) not in self._sessions and lower_session(pid):
                    self._sessions.add(session)

    def _report(self, processor: float) -> Report:
        last = self._last
        return Report(steps=last.steps, total=last.total, metrics=last.metrics, processor=processor)

    def _used(self) -> float:
        return self._ended + processor_seconds(descendants(os.getpid()))

    def _patience(self, now: float) -> float:
        due = min(self._report_at - now, self._pacer.next_look())
        return max(min(due, self._read_at - now) if now < self._read_at else due, 0.0)

    def _reap(self) -> None:
        """Wait for processes that have ended, those without another parent included."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return
                self._ended += used.ru_utime + used.ru_stime
                if pid == self._job.pid:
                    self._job.returncode = os.waitstatus_to_exitcode(status)

    def _finish(self) -> None:
        """Kill what is left, and report the end."""
        deadline = time.monotonic() + UNKILLABLE
        while descendants(os.getpid()) and time.monotonic() < deadline:
            signal_all(os.getpid(), signal.SIGKILL)
            self._reap()
            time.sleep(0.002)
        self._reap()
        for _ in range(READ // 4096):  # a pipe's worth; a process that cannot be killed may write on
            if not self._keep():
                break
        self._hear_steps()
        left = descendants(os.getpid())
        self._send(self._report(self._ended + processor_seconds(left)))
        self._send(self._end(len(left)))

    def _end(self, left: int) -> Ended:
        code, failed = self._job.returncode, self._failed
        # A program that saves what it has when it is told to stop, and exits in good order, is not done for that.
        done = code == 0 and (self._attempt.tells_end or not self._told)
        if done and not self._verdict and failed is None:
            return Ended(completed=True, processor=self._ended)
        if self._verdict:
            reason = self._verdict
        elif failed is not None:
            reason = failed.reason
        elif self._told and code in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            reason = _TOLD
        else:
            words = self._output.last_line
            ended = f"it was killed by {_name(-code)}" if code < 0 else f"it exited with status {code}"
            reason = f"{ended}: {words}" if words else ended
        if left:
            reason += f"; {left} of its processes could not be killed"
        return Ended(
            completed=False, reason=reason, hopeless=failed is not None and failed.hopeless, processor=self._ended
        )

    def _send(self, message: FromShim) -> None:
        with contextlib.suppress(OSError):  # the server is gone, as the next read tells
            self._server.sendall(encode_line(message))


def _start(attempt: Attempt, printed: int, progress: int, share: int) -> subprocess.Popen[bytes]:
    """Start the job's program, with these descriptors. Raises OSError, ValueError, subprocess.SubprocessError."""
    return subprocess.Popen(
        attempt.argv,
        cwd=attempt.directory,
        env={**os.environ, PROGRESS: str(progress), SHARE: str(share)},
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
        pass_fds=(progress, share),
        process_group=0,  # of the server's session: between sessions SCHED_IDLE may not count, see `lower_session`
        preexec_fn=lambda: _confine(attempt),
    )


def _leave_terminal() -> None:
    """Give up the terminal of the session: a job that asks there would be stopped, and wait for ever."""
    with contextlib.suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


def _confine(attempt: Attempt) -> None:
    """Confine the process that will be the job, which its own inherit."""
    _leave_terminal()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
        if attempt.background:
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        if attempt.cores:
            os.sched_setaffinity(0, attempt.cores)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if attempt.memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (attempt.memory, attempt.memory))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def serve(server: socket.socket) -> None:
    """Run the attempt that the server asks for, until it has ended or the server is gone."""
    lines: Lines[ToShim] = Lines(msgspec.json.Decoder(ToShim))
    messages: list[ToShim] = []
    while not messages:
        if not (data := server.recv(READ)):
            return
        messages = list(lines.feed(data))
    attempt, *rest = messages
    assert isinstance(attempt, Attempt)
    try:
        output = OutputFile(Path(attempt.output), header=attempt.header)
        if attempt.own_directory:
            Path(attempt.directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        server.sendall(encode_line(Ended(completed=False, reason=f"{error.filename}: {error.strerror}")))
        return
    try:
        shim = Shim(server, lines, attempt, output)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        server.sendall(encode_line(_unstarted(attempt, error)))
        return
    shim.run(rest)


def _unstarted(attempt: Attempt, error: Exception) -> Ended:
    """Say why a program could not be started. One that is not there will not be there the next time."""
    if isinstance(error, OSError):
        place = attempt.argv[0] if Path(attempt.directory).is_dir() else attempt.directory
        hopeless = isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError)
        return Ended(completed=False, reason=f"{place}: {error.strerror}", hopeless=hopeless)
    return Ended(completed=False, reason=f"it could not be started: {error}", hopeless=isinstance(error, ValueError))


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as server:
        serve(server)


if __name__ == "__main__":
    main()
