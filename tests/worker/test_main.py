"""A worker's loop, in this process."""

from __future__ import annotations

import ctypes
import math
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from cotenant.worker import main
from cotenant.worker.arena import Arena
from cotenant.worker.cpu_throttle import CpuThrottle
from cotenant.worker.green import Multiprocessors
from cotenant.worker.runners.fake import Fake
from cotenant.worker.wire import (
    BatchResult,
    FromWorker,
    Inbox,
    Resize,
    RunBatch,
    Setup,
    TensorPart,
    WorkerReady,
    encode_message,
)
from tests.live.workers import sleeper


def test_worker_lane_environment_is_set_before_models_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA looks: in the C library's."""
    monkeypatch.setenv("COTENANT_TOLD", "before")
    seen: list[bytes] = []

    def load(*_: object) -> tuple[dict[str, object], dict[int, int]]:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        seen.append(getenv(b"COTENANT_TOLD"))
        return {}, {}

    monkeypatch.setattr(main, "_load_models", load)
    arena = Arena(1 << 16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=main.serve, args=(theirs, arena.fd, Multiprocessors(), lambda: 0.0))
        thread.start()
        ours.sendall(encode_message(Setup(arena=arena.size, models=(), env={"COTENANT_TOLD": "by the lane"})))
        ours.shutdown(socket.SHUT_WR)
        thread.join()
    arena.close()
    assert seen == [b"by the lane"] and os.environ["COTENANT_TOLD"] == "by the lane"


def test_process_ends_once_it_has_run_what_models_registered_and_printed() -> None:
    program = """
import atexit, threading
from cotenant.worker.main import _end_process
atexit.register(print, "registered")
ready = threading.Event()
threading.Thread(target=lambda: ready.wait() and print("thread")).start()
print("printed")
ready.set()
_end_process()
print("went on")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(ended.stdout.split()) == ["printed", "registered", "thread"] and not ended.stderr


def test_lane_is_served_by_the_thread_that_ended_one_last() -> None:
    served: list[tuple[int, int]] = []
    started, ends = queue.SimpleQueue[int](), {number: threading.Event() for number in range(5)}

    def serve(number: int) -> None:
        served.append((number, threading.get_ident()))
        started.put(number)
        ends[number].wait()

    threads = main.LaneThreads(serve)
    for number in range(2):
        threads.serve(number)
        assert started.get() == number
    for ended, number in ((1, 2), (2, 3), (0, 4)):
        idle = len(threads._idle)
        ends[ended].set()
        while len(threads._idle) == idle:
            os.sched_yield()
        threads.serve(number)
        assert started.get() == number
    by = dict(served)
    assert by[0] == by[4] != by[1] == by[2] == by[3]
    begun = [thread for thread in threading.enumerate() if thread.ident in by.values()]
    ends[3].set()
    threads.close()
    ends[4].set()
    for thread in begun:
        thread.join(10)
    assert not any(thread.is_alive() for thread in begun)


def test_resize_changes_limit_cores_and_batches_of_a_running_worker() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("cores cannot be chosen on this system")
    cores = os.sched_getaffinity(0)
    throttle, runner = CpuThrottle(0.1, lambda: 0.0), Fake(sleeper(0.1, max_batch=2))
    larger = sleeper(0.2, max_batch=4)
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        main._resize(Resize((larger,), (min(cores),), 0.3), throttle, {"sleeper": (runner, 8)}, {})
        seen = {frozenset(os.sched_getaffinity(int(each.name))) for each in Path("/proc/self/task").iterdir()}
        assert seen == {frozenset({min(cores)})}
    finally:
        waiting.set()
        thread.join()
        main._resize(Resize((larger,), tuple(cores)), throttle, {"sleeper": (runner, 8)}, {})
    assert throttle.rate == math.inf
    assert (runner.model, runner.minimum_seconds(4)) == (larger, 0.2)


class Unfinished(Fake):
    """Has three parts to do while no batch waits."""

    left = 3

    def improve(self) -> bool:
        self.left -= 1
        return self.left > 0


def test_runners_improve_while_no_batch_waits_and_now_and_then_where_one_always_does() -> None:
    first, last = Unfinished(sleeper(0.1)), Unfinished(sleeper(0.1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        later = main._Later(theirs)
        later.begin([first, Fake(sleeper(0.1)), last])
        ours.sendall(b"a batch")
        for _ in range(main.BUSY):
            later.improve()
        assert (first.left, last.left) == (3, 3)
        later.improve()
        assert (first.left, last.left) == (3, 2)
        theirs.recv(7)
        later.improve()
    assert (first.left, last.left) == (0, 0)


def test_worker_improves_its_runners_once_it_serves_and_after_a_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Unfinished(sleeper(0.0))
    monkeypatch.setattr(main, "_load_models", lambda *_: ({"sleeper": (runner, 8)}, {}))
    done = threading.Event()
    asked: list[int] = []

    def improve() -> bool:
        asked.append(len(asked))
        if len(asked) in (3, 5):
            done.set()
        return len(asked) < 3

    monkeypatch.setattr(runner, "improve", improve)
    arena = Arena(1 << 16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=main.serve, args=(theirs, arena.fd, Multiprocessors(), lambda: 0.0))
        thread.start()
        ours.sendall(encode_message(Setup(arena=arena.size, models=())))
        assert done.wait(30) and len(asked) == 3
        done.clear()
        for _ in range(2):
            before = len(asked)
            ours.sendall(encode_message(Resize((sleeper(0.0),))))
            while len(asked) == before:
                thread.join(0.01)
        ours.shutdown(socket.SHUT_WR)
        thread.join()
    arena.close()
    assert len(asked) == 5


@pytest.mark.parametrize("serve_first", [True, False])
def test_worker_that_serves_first_says_so_until_its_runners_have_nothing_left_to_do(serve_first: bool) -> None:
    arena = Arena(1 << 16)
    ours, theirs = socket.socketpair()
    inbox = Inbox(ours)
    decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

    def answer() -> FromWorker:
        while (message := inbox.take()) is None:
            assert inbox.fill()
        return decoder.decode(message)

    def batch(number: int) -> bytearray:
        row = TensorPart("x", "FP32", (1, 2), memoryview(bytes(8)))
        return encode_message(RunBatch(number, "sleeper", [[row]]))

    seen: list[bool] = []
    with ours, theirs:
        setup = Setup(arena=arena.size, models=(sleeper(0.0),), fake=True, serve_first=serve_first)
        ours.sendall(encode_message(setup) + batch(0))  # the batch waits already when the worker is ready
        thread = threading.Thread(target=main.serve, args=(theirs, arena.fd, Multiprocessors(), lambda: 0.0))
        thread.start()
        assert isinstance(answer(), WorkerReady)
        for number in range(1, main.BUSY + 2):
            result = answer()
            assert isinstance(result, BatchResult)
            seen.append(result.timing.warming_up)
            ours.sendall(batch(number))
        ours.shutdown(socket.SHUT_WR)
        thread.join()
    arena.close()
    assert seen[0] is serve_first and not seen[-1]


PINS = """
import contextlib, mmap, os, sys, threading
from cotenant.worker import main, runners
from cotenant.worker.cpu_throttle import CpuThrottle
from cotenant.worker.green import Multiprocessors
from cotenant.worker.wire import Resize, Setup
from tests.live.workers import sleeper

ended = threading.Event()

class Runner:
    def close(self):
        pass

def load(model, **_):
    for _ in range(int(sys.argv[1])):
        threading.Thread(target=ended.wait).start()
    return Runner(), 8

def show():
    print(*sorted(str(sorted(os.sched_getaffinity(thread))) for thread in main._threads()))

cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
os.sched_setaffinity(0, cores)
runners.load_runner = load
setup = Setup(arena=1, models=(sleeper(0.1), sleeper(0.1)), cores=cores, threads=2)
with contextlib.ExitStack() as stack:
    loaded, pinned = main._load_models(setup, Multiprocessors(), mmap.mmap(-1, 1), stack)
show()
main._resize(Resize((), cores[::-1]), CpuThrottle(1.0), loaded, pinned)
show()
main._resize(Resize((), cores[:1]), CpuThrottle(1.0), loaded, pinned)
show()
ended.set()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="threads are pinned to cores on Linux, to two"
)
def test_threads_of_a_batch_keep_to_a_core_each_where_the_lane_has_as_many() -> None:
    a, b = sorted(os.sched_getaffinity(0))[:2]

    def affinities(threads: int) -> list[str]:
        program = [sys.executable, "-c", PINS, str(threads)]
        given = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # as workers have it
        return subprocess.run(program, capture_output=True, text=True, check=True, env=given).stdout.splitlines()

    # Two models, of which each has one thread besides that of the worker.
    assert affinities(1) == [f"[{a}] [{b}] [{b}]", f"[{a}] [{a}] [{b}]", f"[{a}] [{a}] [{a}]"]
    # Threads that are begun for something else may use all cores, then as later.
    both = f"[{a}, {b}]"
    assert affinities(2)[0] == " ".join([both] * 5)
