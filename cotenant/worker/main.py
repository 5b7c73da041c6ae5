"""Run the worker process: load models, then receive a batch, run it and send the result back.

Standard input is the socket to the server; the arguments are the file descriptor of the arena and the server's process
id. The worker stops when the server closes its end of the socket or dies. With a third argument, `shared`, the socket
carries the sockets of lanes instead, and each lane is served by a thread: the lanes share one copy of the weights, and
they end together with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import math
import mmap
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from cotenant.errors import DeviceError, ModelError, WorkerError
from cotenant.runtime.lending import BOARD_SIZE, Borrower, LendingBoard, look_interval
from cotenant.worker import runners
from cotenant.worker.arena import map_memory
from cotenant.worker.background import in_background
from cotenant.worker.batch import BatchBuilder
from cotenant.worker.cpu_throttle import CpuThrottle
from cotenant.worker.green import Multiprocessors
from cotenant.worker.parent_death import die_with_parent
from cotenant.worker.wire import (
    BatchResult,
    FromWorker,
    Inbox,
    Resize,
    RunBatch,
    Setup,
    Timing,
    ToWorker,
    WorkerBroken,
    WorkerClosed,
    WorkerReady,
    encode_message,
)

# Interpreter switch interval in seconds: a thread whose device has just finished should not wait for another thread.
SWITCH_INTERVAL = 0.0002
# What makes later batches faster is done after so many seconds without a batch, or after so many batches without such a
# pause: a lane that is slow for lack of it may have none.
IDLE = 0.002
BUSY = 20

# Created before any thread starts: two threads creating decoders of the same types at once can crash msgspec 0.22.
_decoder = msgspec.msgpack.Decoder(ToWorker)


# One mapping for all lanes of a process: what of it a GPU may read, the driver then keeps in place once.
_mapped = functools.cache(map_memory)
_mapping = threading.Lock()


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    work()


def work() -> None:
    """Serve one lane, or host many, as the arguments say, until standard input ends."""
    connection = socket.socket(fileno=sys.stdin.fileno())
    arena, processors = int(sys.argv[1]), Multiprocessors()
    if "shared" in sys.argv[3:]:
        host(connection, arena, processors)
        return
    try:
        device = serve(connection, arena, processors, time.process_time)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the server is gone
    except DeviceError as error:
        end_broken(error)
    if not device:
        _end_process()


def _end_process() -> NoReturn:
    """End the process without taking apart its modules, which would take as long as a batch of another worker.

    What Python models have begun ends as it always does: their threads, and what they registered for the exit.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # nobody listens any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def host(control: socket.socket, arena: int, processors: Multiprocessors) -> None:
    """Serve each lane socket received on `control` in a thread; return when `control` is closed."""
    threading.excepthook = _exit_process
    sys.setswitchinterval(SWITCH_INTERVAL)
    threads = LaneThreads(lambda descriptor: _serve_lane(descriptor, arena, processors))
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        threads.serve(descriptors[0])
    threads.close()


class LaneThreads:
    """Serve lanes in threads, each lane in the thread that was the last to end one.

    PyTorch keeps what cuDNN has chosen for each size of input by thread: a lane in a new one chooses again.
    """

    def __init__(self, serve: Callable[[int], None]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[int | None]] = []
        self._closed = False

    def serve(self, descriptor: int) -> None:
        """Serve a lane by its socket."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(inbox,)).start()
        inbox.put(descriptor)

    def close(self) -> None:
        """End the threads, each with its lane."""
        with self._lock:
            self._closed = True
            for inbox in self._idle:
                inbox.put(None)

    def _run(self, inbox: queue.SimpleQueue[int | None]) -> None:
        while (descriptor := inbox.get()) is not None:
            self._serve(descriptor)
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)


def _serve_lane(descriptor: int, arena: int, processors: Multiprocessors) -> None:
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(connection, arena, processors, time.thread_time)
        connection.sendall(encode_message(WorkerClosed()))


def _exit_process(failure: threading.ExceptHookArgs) -> None:
    """End the process: an unexpected error in one lane may have corrupted the state that all lanes share."""
    if isinstance(failure.exc_value, DeviceError):
        end_broken(failure.exc_value)
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def end_broken(error: DeviceError) -> NoReturn:
    """End the process with the reason as the last line, which the server reports.

    Nothing is taken apart: CUDA's libraries abort the process when they meet a broken device there, and say so last.
    """
    print(error, file=sys.stderr)  # noqa: T201
    sys.stderr.flush()
    os._exit(1)


def serve(connection: socket.socket, arena: int, processors: Multiprocessors, used: Callable[[], float]) -> bool:
    """Serve one lane until its stream ends; return whether it was on a device, which libraries may have to let go of.

    used: reads the CPU time charged to this lane, in seconds.
    """
    inbox = Inbox(connection)
    later = _Later(connection)

    def receive() -> ToWorker | None:
        while (message := inbox.take()) is None:
            later.improve()
            if not inbox.fill():
                return None
        decoded: ToWorker = _decoder.decode(message)
        return decoded

    def send(message: FromWorker) -> None:
        connection.sendall(encode_message(message))

    if not isinstance(setup := receive(), Setup):
        return False
    # CUDA reads its environment on first use. Lanes of one process share it, so a variable that is set is not changed.
    os.environ.update(setup.env.items() - os.environ.items())
    if setup.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)  # before any thread pool is created: threads inherit the affinity
    with _mapping:
        memory = _mapped(arena, setup.arena)
    resources = contextlib.ExitStack()  # closed on an orderly end only: closing on a broken device would mask its error
    try:
        with in_background() if setup.background else contextlib.nullcontext():
            loaded, pinned = _load_models(setup, processors, memory, resources)
    except (DeviceError, ModelError) as error:
        send(WorkerBroken(str(error)))
        resources.close()
        return setup.cuda
    gc.freeze()  # libraries and models stay: scanning them pauses batches for 3 ms, with PyTorch for 0.3 s
    send(WorkerReady({name: footprint for name, (_, footprint) in loaded.items()}))
    throttle = CpuThrottle(math.inf if setup.cpu_limit is None else setup.cpu_limit, used)
    borrower = _borrower(setup, memory)
    later.begin(runner for runner, _ in loaded.values())

    while isinstance(run := receive(), RunBatch | Resize):
        if isinstance(run, Resize):
            _resize(run, throttle, loaded, pinned)
            later.begin(runner for runner, _ in loaded.values())
            continue
        started = time.monotonic()
        runner = loaded[run.model][0]
        batch = BatchBuilder(runner, memory, run.room)
        answers = batch.run(run.requests)
        done = time.monotonic()
        due, cpu = throttle.charge(started)
        if borrower is not None:
            hold(connection, due, borrower, throttle)
        elif not setup.lent_by_kernel:
            wait(connection, due)
        ended = time.monotonic()
        throttle.ended(due, ended)
        wait(connection, started + runner.minimum_seconds(batch.rows))
        parts = batch.gather, batch.infer, batch.scatter
        pause = max(time.monotonic() - done, 0.0)
        lent = max(due - ended, 0.0) if borrower is not None or setup.lent_by_kernel else 0.0
        warming_up = setup.serve_first and later.unfinished
        timing = Timing(started, *parts, pause, cpu, batch.device, runner.memory, lent, warming_up)
        try:
            send(BatchResult(run.batch, answers, timing))
        except WorkerError as error:  # too long: nothing of it was sent
            send(BatchResult(run.batch, [str(error)] * len(answers), timing))
    gc.unfreeze()  # in a shared process this lane's models may be garbage now
    resources.close()
    return setup.cuda


class _Later:
    """Let the runners of a lane do what makes later batches faster, in parts, while none waits on `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unfinished: list[runners.Runner] = []
        self._batches = 0  # without a pause

    def begin(self, all_: Iterable[runners.Runner]) -> None:
        """Ask all runners of the lane what they have to do."""
        self._unfinished = list(all_)

    @property
    def unfinished(self) -> bool:
        """Return whether a runner has something left to do."""
        return bool(self._unfinished)

    def improve(self) -> None:
        """Go on until a batch waits, or all is done; to be called between two batches."""
        while self._unfinished and (self._batches >= BUSY or not self._waits()):
            self._batches = 0
            if not self._unfinished[-1].improve():
                self._unfinished.pop()
        self._batches += 1

    def _waits(self) -> bool:
        return bool(select.select([self._connection], [], [], IDLE)[0])


def _load_models(
    setup: Setup, processors: Multiprocessors, memory: mmap.mmap, resources: contextlib.ExitStack
) -> tuple[dict[str, tuple[runners.Runner, int]], dict[int, int]]:
    """Load each model. Return its runner with the bytes that the outputs of one row take, and threads that stay on a
    core of their own: on which of the lane's."""
    stream = 0 if setup.cuda else None
    if setup.groups:
        stream = resources.enter_context(processors.stream(setup.groups))
    loaded = {}
    pinned: dict[int, int] = {}
    for model in setup.models:
        before = _threads()
        runner, footprint = runners.load_runner(
            model, threads=setup.threads, fake=setup.fake, stream=stream, memory=memory, serve_first=setup.serve_first
        )
        resources.callback(runner.close)
        loaded[model.name] = runner, footprint
        created = sorted(_threads() - before)
        if len(created) == len(setup.cores) - 1:
            pinned |= {thread: number for number, thread in enumerate(created, 1)}
    if not pinned or len(pinned) < len(loaded) * (len(setup.cores) - 1):
        return loaded, {}  # threads that others begin later should not be bound to the first core
    pinned[threading.get_native_id()] = 0
    _pin(setup.cores, pinned)
    return loaded, pinned


def _threads() -> set[int]:
    """Return the ids of this process' threads; none on systems other than Linux."""
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()} if sys.platform == "linux" else set()


def _pin(cores: Sequence[int], pinned: Mapping[int, int]) -> None:
    """Let threads run on these cores, each that is pinned on one of its own.

    The threads of a batch wait for each other. Where the kernel puts two of them on one core, because the other looks
    busy with work of a lower priority, the batch takes up to twice as long.
    """
    for thread in _threads():
        with contextlib.suppress(OSError):  # it has just ended
            os.sched_setaffinity(thread, [cores[pinned[thread]]] if thread in pinned else cores)


def _resize(
    resize: Resize,
    throttle: CpuThrottle,
    loaded: dict[str, tuple[runners.Runner, int]],
    pinned: Mapping[int, int],
) -> None:
    throttle.rate = math.inf if resize.cpu_limit is None else resize.cpu_limit
    if resize.cores and sys.platform == "linux":
        _pin(resize.cores, pinned if max(pinned.values(), default=0) < len(resize.cores) else {})
    for model in resize.models:
        loaded[model.name][0].model = model


def _borrower(setup: Setup, memory: mmap.mmap) -> Borrower | None:
    offset, slot = setup.board
    if not slot:
        return None
    return Borrower(LendingBoard(memoryview(memory)[offset : offset + BOARD_SIZE]), slot)


def wait(connection: socket.socket, until: float) -> None:
    """Sleep until a monotonic time, or until the server closes its end; nothing else arrives while a batch runs."""
    while (left := until - time.monotonic()) > 0:
        if select.select([connection], [], [], left)[0]:
            return


def hold(connection: socket.socket, due: float, borrower: Borrower, throttle: CpuThrottle) -> None:
    """Sleep like `wait`, but no longer than others need the cores. Looking whether they do is not charged: on a share
    of 5 % it takes a third of what a small model takes, and a plan counts on what the share does for the model."""
    if due <= time.monotonic():
        return
    borrower.hold(due)
    while not borrower.may_resume() and (left := due - time.monotonic()) > 0:
        if select.select([connection], [], [], look_interval(left))[0]:
            break
    borrower.resume()
    throttle.skip()


if __name__ == "__main__":
    main()
