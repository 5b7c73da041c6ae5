"""A crowd leaves enough to start workers again; no terminal obeys what callers and models say."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
from pathlib import Path

import pytest

from cotenant.app.log_format import LogFormatter
from cotenant.live.descriptors import DescriptorReserve
from tests.security.server import ORDINARY, Served, post, read_response, served
from tests.security.test_memory import until

FILES = 256


def workers(server: Served) -> list[int]:
    tasks = Path(f"/proc/{server.pid}/task").iterdir()
    pids: list[int] = []
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            pids += map(int, (task / "children").read_text().split())
    return pids


def descriptors(server: Served) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def test_workers_start_again_though_callers_hold_all_connections(tmp_path: Path) -> None:
    with served(tmp_path, files=FILES) as server, contextlib.ExitStack() as crowd:
        assert server.serves()
        ours = crowd.enter_context(server.connect())
        for address in (server.http, server.metrics, server.grpc):
            for _ in range(FILES):
                with contextlib.suppress(OSError):
                    crowd.enter_context(server.connect(address))
        until(lambda: descriptors(server) >= FILES - 32)
        for _ in range(2):  # the second time no warm worker can be left over from before
            first = workers(server)
            for pid in first:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda first=first: bool(set(workers(server)) - set(first)))  # type: ignore[misc]
        until(lambda: served_over(ours))
    # Whoever was above the limits was told so, or waits for gRPC to accept it; nobody stopped the server.


def served_over(sock: socket.socket) -> bool:
    body = json.dumps({"inputs": [ORDINARY["identity"]]}).encode()
    sock.sendall(post("/v2/models/identity/infer", body))
    return read_response(sock)[0] == 200


def test_reserve_gives_its_descriptors_back_within_and_takes_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        """Of descriptors as the reserve holds them: others come and go, as garbage is collected."""
        opened = 0
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the folder's own, which is closed by now
                opened += str(descriptor.readlink()) == os.devnull
        return opened

    before = count()
    reserve = DescriptorReserve(5)
    assert count() == before + 5
    with reserve.lent():
        assert count() == before
        with reserve.lent():
            assert count() == before
        assert count() == before
    assert count() == before + 5
    with monkeypatch.context() as patch:
        opened = iter((True, True, False))  # the callers take the others first

        def scarce(path: str, flags: int) -> int:
            if not next(opened):
                raise OSError(errno.EMFILE, "too many open files")
            return real(path, flags)

        real = os.open
        patch.setattr(os, "open", scarce)
        with reserve.lent():
            pass
    assert count() == before + 2
    with reserve.lent():
        pass
    assert count() == before + 5
    reserve.close()
    with reserve.lent():
        pass
    assert count() == before


@pytest.mark.parametrize("text", ["a\nERROR: forged", "\x1b[2J", "\x9b31m", "\u202egpj", "\r\0"])
def test_control_characters_are_spelled_out_in_the_log(text: str) -> None:
    formatter = LogFormatter()
    record = logging.LogRecord("x", logging.ERROR, "", 0, "model %r is '%s'", (text, text), None)
    shown = formatter.format(record)
    assert shown.isprintable() and shown.startswith("ERROR: model")
    try:
        raise ValueError(text)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    lines = formatter.format(record).split("\n")
    assert (all(line.isprintable() for line in lines) and lines[-1].startswith("ValueError: ")) or "\n" in text
