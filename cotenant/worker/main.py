"""A worker: a process that serves a partition, or many. It loads models, then receives a batch, runs it, sends it back.

Its standard input is the socket to the server; its arguments are the file descriptor of the arena and the server's
process. It stops when the server closes its end of the socket or is gone. With a third argument, `shared`, sockets of
lanes come over that socket, and each is served by a thread of its own: so they share the models' weights, and an end of
the process is the end of them all.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from cotenant.errors import DeviceError, ModelError
from cotenant.worker import runners
from cotenant.worker.arena import map_memory
from cotenant.worker.batch import BatchBuilder
from cotenant.worker.cpu_throttle import CpuThrottle
from cotenant.worker.green import Multiprocessors
from cotenant.worker.parent_death import die_with_parent
from cotenant.worker.wire import (
    BatchResult,
    FromWorker,
    Inbox,
    RunBatch,
    Setup,
    Timing,
    ToWorker,
    WorkerBroken,
    WorkerClosed,
    WorkerReady,
    encode_message,
)

# Seconds after which a thread lets another have the interpreter: one that waits for a device is ready to go on at once.
SWITCH = 0.0002

# Made before there are threads: two that make decoders of the same types at once can crash msgspec (0.22).
_decoder = msgspec.msgpack.Decoder(ToWorker)


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    work()


def work() -> None:
    """As the arguments say, until the stream on the standard input ends."""
    connection = socket.socket(fileno=sys.stdin.fileno())
    arena, processors = int(sys.argv[1]), Multiprocessors()
    if "shared" in sys.argv[3:]:
        host(connection, arena, processors)
        return
    try:
        serve(connection, arena, processors, time.process_time)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the server is gone
    except DeviceError as error:
        sys.exit(str(error))


def host(control: socket.socket, arena: int, processors: Multiprocessors) -> None:
    """Serve lanes until the stream of their sockets ends, and then those that are left."""
    threading.excepthook = _end
    sys.setswitchinterval(SWITCH)
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        threading.Thread(target=_serve_one, args=(descriptors[0], arena, processors)).start()


def _serve_one(descriptor: int, arena: int, processors: Multiprocessors) -> None:
    """One lane of many."""
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(connection, arena, processors, time.thread_time)
        connection.sendall(encode_message(WorkerClosed()))


def _end(failure: threading.ExceptHookArgs) -> None:
    """What no lane expects may have broken what all share: they begin anew, in another process."""
    if isinstance(failure.exc_value, DeviceError):
        print(failure.exc_value, file=sys.stderr)  # noqa: T201  # the last line that a worker prints is its reason
    else:
        traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def serve(connection: socket.socket, arena: int, processors: Multiprocessors, used: Callable[[], float]) -> None:
    """One lane, until its stream ends. used: reads the processor time that it pays for, in seconds."""
    inbox = Inbox(connection)

    def receive() -> Setup | RunBatch | None:
        while (message := inbox.take()) is None:
            if not inbox.fill():
                return None
        order: Setup | RunBatch = _decoder.decode(message)
        return order

    def send(message: FromWorker) -> None:
        connection.sendall(encode_message(message))

    if not isinstance(setup := receive(), Setup):
        return
    # CUDA reads them when it is first called. Lanes of one process have the same, and none changes them under others.
    os.environ.update(setup.env.items() - os.environ.items())
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)  # before any pool of threads is made: they inherit it
    memory = map_memory(arena, setup.arena)
    held = contextlib.ExitStack()  # let go of in good order, or not at all: a broken device would hide what broke it
    try:
        loaded = _load(setup, processors, held)
    except (DeviceError, ModelError) as error:
        send(WorkerBroken(str(error)))
        held.close()
        return
    gc.freeze()  # libraries and models stay: to look through them for garbage stops batches for 3 ms, torch's for 0.3 s
    send(WorkerReady({name: footprint for name, (_, footprint) in loaded.items()}))
    pace = CpuThrottle(math.inf if setup.cpu_limit is None else setup.cpu_limit, used)

    while isinstance(run := receive(), RunBatch):
        started = time.monotonic()
        runner = loaded[run.model][0]
        batch = BatchBuilder(runner, memory, run.room)
        answers = batch.run(run.requests)
        done = time.monotonic()
        due, cpu = pace.charge(started)
        due = max(due, started + runner.least(batch.rows))
        wait(connection, due)
        pace.ended(due, time.monotonic())
        parts = batch.gather, batch.infer, batch.scatter
        timing = Timing(started, *parts, max(due - done, 0.0), cpu, batch.device, runner.memory)
        send(BatchResult(run.batch, answers, timing))
    gc.unfreeze()  # the models of this lane may be garbage now, in a process that goes on for others
    held.close()


def _load(
    setup: Setup, processors: Multiprocessors, held: contextlib.ExitStack
) -> dict[str, tuple[runners.Runner, int]]:
    """By model, what runs it, and the bytes that the outputs of one row take. `held` lets go of it all."""
    stream = 0 if setup.cuda else None
    if setup.groups:
        stream = held.enter_context(processors.stream(setup.groups))
    loaded = {}
    for model in setup.models:
        runner, footprint = runners.load_runner(model, threads=setup.threads, fake=setup.fake, stream=stream)
        held.callback(runner.close)
        loaded[model.name] = runner, footprint
    return loaded


def wait(connection: socket.socket, until: float) -> None:
    """Until that time, or until the server closes its end: nothing else arrives while a batch is under way."""
    while (left := until - time.monotonic()) > 0:
        if select.select([connection], [], [], left)[0]:
            return


if __name__ == "__main__":
    main()
