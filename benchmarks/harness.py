"""What the HTTP benchmarks share: a server process, `wrk` to drive it, and the processor time that it took."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

SMALL = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [n + 0.5 for n in range(16)]}]}
).encode()
_TICK = os.sysconf("SC_CLK_TCK")


def large(size: int) -> tuple[bytes, dict[str, str]]:
    """A request with a binary FP32 tensor of `size` bytes, answered in binary: body and headers."""
    shape = [1, size // 4]
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + bytes(size), {"Inference-Header-Content-Length": str(len(head))}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """cpu: seconds of processor time of the server and its children for one request. latency: median, in seconds."""

    requests: int
    seconds: float
    cpu: float
    latency: float
    errors: int


def drive(
    pid: int, url: str, body: bytes, headers: dict[str, str] | None = None, *, connections: int = 16, seconds: int = 3
) -> Load:
    """Post one body over and over, each connection as soon as it has its answer."""
    if shutil.which("wrk") is None:
        sys.exit("this benchmark drives the server with wrk, which is not installed; try: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        payload, script = Path(folder, "body"), Path(folder, "post.lua")
        payload.write_bytes(body)
        lines = [f'wrk.headers["{name}"] = "{value}"' for name, value in (headers or {}).items()]
        script.write_text(
            "\n".join(
                [
                    'wrk.method = "POST"',
                    f'wrk.body = io.open("{payload}", "rb"):read("*a")',
                    *lines,
                    "function done(summary, latency)",
                    '  io.write(string.format("%d %d %f %d\\n", summary.requests, summary.duration,',
                    "    latency:percentile(50), summary.errors.status + summary.errors.connect + summary.errors.read",
                    "    + summary.errors.write + summary.errors.timeout))",
                    "end",
                ]
            )
        )
        before = processor_time(pid)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script), url]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        spent = processor_time(pid) - before
    last = output.strip().splitlines()[-1]
    if not re.fullmatch(r"\d+ \d+ [\d.]+ \d+", last):
        sys.exit(f"wrk said what is not understood: {output}")
    requests, micros, median, errors = last.split()
    return Load(
        requests=int(requests),
        seconds=int(micros) / 1e6,
        cpu=spent / max(1, int(requests)),
        latency=float(median) / 1e6,
        errors=int(errors),
    )


def processor_time(pid: int) -> float:
    """Seconds that a process and its living descendants have used, in user and in kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / _TICK + sum(processor_time(int(child)) for child in children)


@contextmanager
def serving(*command: str) -> Iterator[tuple[int, str]]:
    """A server process that says its URL in its first line: its pid, and the URL."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url.startswith("http://"):
            sys.exit(f"{' '.join(command)} did not start")
        yield process.pid, url
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def target() -> Iterator[tuple[int, str]]:
    """The server to measure: pid and URL. The one that the command line names, or our HTTP layer before a core in
    process."""
    if len(sys.argv) == 3:
        yield int(sys.argv[2]), sys.argv[1].rstrip("/")
    elif len(sys.argv) == 1:
        with serving("-m", "benchmarks.floor", "ours") as served:
            yield served
    else:
        sys.exit("usage: python -m benchmarks.<name> [URL PID]")
