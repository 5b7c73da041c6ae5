"""Solve in a process of its own, so that a planner takes no time from the event loop that serves requests.

`SolverProcess` is the server's end; run as a program, this module is the other. One process serves all `Solve`s, since
a planner takes seconds to import; one that dies, or does not answer in time, is replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe

from cotenant.control.adaptation import Solve, Solved
from cotenant.planners import Problem
from cotenant.planning.replan import Replanner
from cotenant.worker.parent_death import die_with_parent

NICENESS = 5  # a third of the processor time of one that serves, where both want it
LIMIT = 30.0  # seconds until an answer, the start of the process included


class SolverProcess:
    """Answer a `Solve` at a time, from one thread; only `close` may be called from another.

    planner: its name, which may change from one answer to the next. limit: seconds that an answer may take. program:
    what is run, for tests.
    """

    def __init__(
        self,
        planner: str,
        *,
        limit: float = LIMIT,
        program: tuple[str, ...] = ("-m", "cotenant.planning.solver_process"),
    ) -> None:
        self.planner = planner
        self._limit = limit
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._known: tuple[Problem, str] | None = None  # the problem and the planner that the process has
        self._closed = False
        self._lock = threading.Lock()  # of starting and closing

    @property
    def pid(self) -> int | None:
        """The process that solves; None where there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, so that the first answer does not wait for it. Raises OSError."""
        with self._lock:
            if self._process is not None or self._closed:
                return
            ours, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *self._program, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    process_group=0,  # Ctrl-C is for the server alone
                )
            self._connection, self._known = ours, None

    def __call__(self, problem: Problem, solve: Solve) -> Solved:
        """Return the answer, whatever becomes of the process."""
        expired = threading.Event()
        try:
            self.start()
            if self._connection is None or self._process is None:
                return Solved(number=solve.number, error="the server stops")
            # A process that is stopped takes no question either, once the pipe is full.
            timer = threading.Timer(self._limit, _expire, (self._process, expired))
            timer.daemon = True
            timer.start()
            try:
                return self._ask(self._connection, problem, solve)
            finally:
                timer.cancel()
        except (OSError, EOFError):
            reason = f"the solver process died{self._how()}, and was replaced"
            if expired.is_set():
                reason = f"the solver did not answer within {self._limit:g} s, and was replaced"
        except Exception as error:  # noqa: BLE001  # such as a problem that cannot be pickled
            reason = f"the solver could not be asked: {type(error).__name__}: {error}"
        self._stop()
        return Solved(number=solve.number, error=reason)

    def _ask(self, connection: Connection, problem: Problem, solve: Solve) -> Solved:
        planner = self.planner
        if self._known is None or problem is not self._known[0] or planner != self._known[1]:
            connection.send((problem, planner))
            self._known = problem, planner
        connection.send(solve)
        answer = connection.recv()
        assert isinstance(answer, Solved)
        return answer

    def close(self) -> None:
        """End the process; a call under way answers at once."""
        self._closed = True
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def wait(self) -> None:
        """Leave nothing behind of a process that was closed."""
        self._stop()

    def _how(self) -> str:
        if self._process is None:
            return ""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        if code >= 0:
            return f" with exit status {code}"
        # Real-time signals have no names.
        return f" by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f" by signal {-code}"

    def _stop(self) -> None:
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = self._known = None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


def _expire(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    process.kill()


def serve(connection: Connection) -> None:
    """Answer what comes until the other end is closed."""
    replanner: Replanner | None = None
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        if isinstance(asked, Solve):
            assert replanner is not None
            connection.send(_answered(replanner, asked))
        else:
            problem, planner = asked
            replanner = Replanner(problem, planner, timed=True)


def _answered(replanner: Replanner, solve: Solve) -> Solved:
    try:
        return replanner(solve)
    except Exception as error:  # noqa: BLE001  # the controller has to hear of every end
        return Solved(number=solve.number, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    os.nice(NICENESS)
    serve(Connection(int(sys.argv[1])))
