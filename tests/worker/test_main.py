"""A worker's loop, in this process."""

from __future__ import annotations

import ctypes
import math
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cotenant.worker import main
from cotenant.worker.arena import Arena
from cotenant.worker.cpu_throttle import CpuThrottle
from cotenant.worker.green import Multiprocessors
from cotenant.worker.runners.fake import Fake
from cotenant.worker.wire import Resize, Setup, encode_message
from tests.live.workers import sleeper


def test_worker_lane_environment_is_set_before_models_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA looks: in the C library's."""
    monkeypatch.setenv("COTENANT_TOLD", "before")
    seen: list[bytes] = []

    def load(*_: object) -> dict[str, object]:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        seen.append(getenv(b"COTENANT_TOLD"))
        return {}

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
        main._resize(Resize((larger,), (min(cores),), 0.3), throttle, {"sleeper": (runner, 8)})
        seen = {frozenset(os.sched_getaffinity(int(each.name))) for each in Path("/proc/self/task").iterdir()}
        assert seen == {frozenset({min(cores)})}
    finally:
        waiting.set()
        thread.join()
        main._resize(Resize((larger,), tuple(cores)), throttle, {"sleeper": (runner, 8)})
    assert throttle.rate == math.inf
    assert (runner.model, runner.minimum_seconds(4)) == (larger, 0.2)
