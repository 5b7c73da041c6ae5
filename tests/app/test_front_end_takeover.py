"""Two front ends that are processes before one node: one serves, the other stands by until that one is gone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.app.test_nodes import PATIENCE, ROW, NodeProcess, start, write_settings
from tests.cli.program import until

__all__ = ["start"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FrontEnd:
    """`cotenant serve` with a settings file of its own, which differs from the other's by its port."""

    def __init__(self, settings: Path, name: str) -> None:
        self.port = free_port()
        path = settings.with_name(f"{name}.toml")
        path.write_text(settings.read_text().replace("http_port = 0", f"http_port = {self.port}"))
        self.log = settings.with_name(f"{name}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cotenant", "serve", str(path), "--json"],
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
            )

    def answers(self, path: str, body: bytes | None = None) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/{path}", body, timeout=5.0) as answer:
                self.body = answer.read()
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @property
    def is_live(self) -> bool:
        return self.answers("health/live")

    @property
    def is_ready(self) -> bool:
        return self.answers("health/ready")

    def serves(self) -> bool:
        tensor = {"name": "x", "datatype": "FP32", "shape": list(ROW.shape), "data": ROW.ravel().tolist()}
        if not self.answers("models/identity/infer", json.dumps({"inputs": [tensor]}).encode()):
            return False
        (output,) = json.loads(self.body)["outputs"]
        assert np.allclose(output["data"], ROW.ravel())
        return True

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE)


@pytest.fixture
def pair(folder: Path, start: Callable[..., NodeProcess]) -> Iterator[tuple[FrontEnd, FrontEnd]]:
    """One that serves, and one that stands by."""
    settings = write_settings(folder, {"node-a": start("one").address}, adapt=True)
    text = settings.read_text().replace("[cluster]\n", '[cluster]\nlease = "lease.sqlite"\n').replace("150", "50")
    settings.write_text(text.replace('state = "state.sqlite"\n', ""))
    started = [FrontEnd(settings, "first")]
    try:
        until(started[0].serves)
        started.append(FrontEnd(settings, "second"))
        until(lambda: started[1].is_live)
        until(lambda: "standing by" in started[1].log.read_text())
        until((folder / "lease.sqlite.state").exists)
        yield started[0], started[1]
    finally:
        for each in started:
            if each.process.poll() is None:
                each.process.send_signal(signal.SIGCONT)
                each.end(signal.SIGKILL)


def test_standby_front_end_takes_over_from_one_that_is_killed(
    pair: tuple[FrontEnd, FrontEnd], record_property: Callable[[str, object], None]
) -> None:
    first, second = pair
    assert first.is_ready and second.is_live and not second.is_ready and not second.serves()
    began = time.monotonic()
    first.end(signal.SIGKILL)
    until(second.serves)
    seconds = time.monotonic() - began
    record_property("takeover_seconds", round(seconds, 2))
    sys.stderr.write(f"takeover: {seconds:.2f} s\n")
    assert second.is_ready


def test_front_end_that_is_frozen_gives_up_once_it_wakes(pair: tuple[FrontEnd, FrontEnd]) -> None:
    first, second = pair
    first.process.send_signal(signal.SIGSTOP)
    until(second.serves)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(timeout=PATIENCE) == 1
    # It says which it found first: that the time was over, or who has the lease.
    assert "restart it to stand by" in first.log.read_text()
    assert "Traceback" not in first.log.read_text()
    assert second.serves()


def test_front_end_that_stops_in_good_order_hands_over(pair: tuple[FrontEnd, FrontEnd]) -> None:
    first, second = pair
    assert first.end(signal.SIGTERM) == 0
    until(second.serves)
