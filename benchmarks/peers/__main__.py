"""Measure small JSON requests of other servers beside ours: processor time of each, and a model that sleeps.

    python -m benchmarks.peers --litserve PYTHON --mlserver PYTHON --triton PYTHON [--json]

PYTHON: an interpreter that has `litserve`, `mlserver` or `nvidia-pytriton` (`python3 -m venv DIR` and
`DIR/bin/pip install litserve`), which are no dependencies of this project; what is not given is left out. Beside them
run ours and raw uvicorn, which answers fixed bytes. All serve the identity of 16 floats to 16 and 64 connections, and a
model that sleeps 4 ms and 0.1 ms a row to 64, in batches of 32 rows at most; theirs are functions of Python, ours is an
ONNX model, and the one that sleeps a fake worker. Turns alternate; figures are medians of three.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import SMALL, Load, cotenant, drive, show, started
from benchmarks.http_small import IDENTITY
from benchmarks.sleep_model import sleeper

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("litserve", "mlserver", "triton")
JSON = {"Content-Type": "application/json"}
ROUNDS = 3
STARTS_WITHIN = 60.0  # seconds
CASES = (("identity", 16), ("identity", 64), ("sleeper", 64))


@contextmanager
def peer(python: str, name: str, model: str) -> Iterator[tuple[int, str]]:
    """Run another server with a model; yield its pid and the URL of inference."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    path = "predict" if name == "litserve" else f"v2/models/{model}/infer"
    url = f"http://127.0.0.1:{port}/{path}"
    command = [python, "-m", f"benchmarks.peers.{name}_server", model, str(port)]
    quiet = subprocess.DEVNULL
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # they are killed, and so leave what they write
        environ = {**os.environ, "TMPDIR": folder}
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            deadline = time.monotonic() + STARTS_WITHIN
            while not answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{name} does not answer; try: {' '.join(command)}")
                time.sleep(0.2)
            yield process.pid, url
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # some leave processes behind otherwise
            process.wait(30)


def answers(url: str) -> bool:
    """Return whether a server gives the input back as its output."""
    request = urllib.request.Request(url, SMALL, JSON)  # noqa: S310  # of this machine
    try:
        with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
            return b"15.5" in response.read()
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"Interpreter that has {name}")
    parser.add_argument("--seconds", type=int, default=2, help="Duration of a turn")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    loads: dict[tuple[str, str, int], list[Load]] = {}
    for model in ("identity", "sleeper"):
        with ExitStack() as stack:
            served = IDENTITY if model == "identity" else sleeper()
            pid, url = stack.enter_context(cotenant({model: served}, backend="cpu" if model == "identity" else "fake"))
            servers = {"cotenant": (pid, f"{url}/v2/models/{model}/infer")}
            if model == "identity":
                servers["uvicorn"] = stack.enter_context(started("-m", "benchmarks.http_floor", "raw"))
            for name in PEERS:
                if python := getattr(given, name):
                    servers[name] = stack.enter_context(peer(python, name, model))
            for round_ in range(ROUNDS + 1):
                for case, callers in CASES:
                    for name, (pid, url) in servers.items() if case == model else ():
                        load = drive(pid, url, SMALL, JSON, connections=callers, seconds=given.seconds if round_ else 1)
                        if round_:  # the first warms up
                            loads.setdefault((name, case, callers), []).append(load)
    for (name, case, callers), each in loads.items():
        cpu, rate = (
            statistics.median(values) for values in zip(*[(load.cpu, load.rate) for load in each], strict=True)
        )
        errors = sum(load.errors for load in each)
        show(
            f"peers/{name}/{case}/{callers}",
            f"{cpu * 1e6:.0f} µs CPU time per request, {rate:,.0f} requests/s, {errors} errors",
            cpu_us=cpu * 1e6,
            rate=rate,
            errors=errors,
        )


if __name__ == "__main__":
    main()
