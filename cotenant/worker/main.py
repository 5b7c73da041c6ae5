"""A worker: one process for one partition. It loads models, then receives a batch, runs it, sends it back.

Its standard input is the socket to the server; its arguments are the file descriptor of the arena and the server's
process. It stops when the server closes its end of the socket or is gone.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import sys
import time

import msgspec

from cotenant.errors import ModelError
from cotenant.worker import runners
from cotenant.worker.arena import map_memory
from cotenant.worker.batch import Batch
from cotenant.worker.pace import Pace
from cotenant.worker.wire import Answer, Broken, FromWorker, Inbox, Ready, Run, Setup, Timing, ToWorker, pack

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # A supervisor, or a terminal, tells all processes to stop; workers wait for the server to let them go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # The end of the stream says as much, but not to a worker in the middle of a long batch.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        sys.exit(1)  # it was gone before
    connection = socket.socket(fileno=sys.stdin.fileno())
    try:
        serve(connection, int(sys.argv[1]))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the server is gone


def serve(connection: socket.socket, arena: int) -> None:
    """Until the stream ends."""
    inbox = Inbox(connection)
    decoder = msgspec.msgpack.Decoder(ToWorker)

    def receive() -> Setup | Run | None:
        while (message := inbox.take()) is None:
            if not inbox.fill():
                return None
        order: Setup | Run = decoder.decode(message)
        return order

    def send(message: FromWorker) -> None:
        connection.sendall(pack(message))

    if not isinstance(setup := receive(), Setup):
        return
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)  # before any pool of threads is made: they inherit it
    memory = map_memory(arena, setup.arena)
    loaded = {}
    footprints = {}
    for model in setup.models:
        try:
            loaded[model.name], footprints[model.name] = runners.load(model, threads=setup.threads, fake=setup.fake)
        except ModelError as error:
            send(Broken(str(error)))
            return
    send(Ready(footprints))
    pace = Pace(math.inf if setup.pace is None else setup.pace)

    while isinstance(run := receive(), Run):
        started = time.monotonic()
        runner = loaded[run.model]
        batch = Batch(runner, memory, run.room)
        answers = batch.run(run.requests)
        done = time.monotonic()
        due, cpu = pace.charge(started)
        due = max(due, started + runner.least(batch.rows))
        wait(connection, due)
        pace.ended(due, time.monotonic())
        timing = Timing(started, batch.gather, batch.infer, batch.scatter, max(due - done, 0.0), cpu)
        send(Answer(run.batch, answers, timing))


def wait(connection: socket.socket, until: float) -> None:
    """Until that time, or until the server closes its end: nothing else arrives while a batch is under way."""
    while (left := until - time.monotonic()) > 0:
        if select.select([connection], [], [], left)[0]:
            return


if __name__ == "__main__":
    main()
