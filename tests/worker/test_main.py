"""A worker's loop, in this process."""

from __future__ import annotations

import ctypes
import os
import socket
import threading

import pytest

from cotenant.worker import main
from cotenant.worker.arena import Arena
from cotenant.worker.green import Multiprocessors
from cotenant.worker.wire import Setup, encode_message


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
