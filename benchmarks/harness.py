"""Run `cotenant serve`, load it with `wrk`, and measure what it uses; shared by the HTTP benchmarks."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.core.units import WHOLE

_TICK = os.sysconf("SC_CLK_TCK")
_Result = TypeVar("_Result", bound=msgspec.Struct)

SMALL = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [n + 0.5 for n in range(16)]}]}
).encode()


def large(size: int) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request with a binary FP32 tensor of `size` bytes, answered in binary."""
    shape = [1, size // 4]
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + bytes(size), {"Inference-Header-Content-Length": str(len(head))}


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a model to serve.

    make: writes its file; latencies: assumed seconds by batch; slo: seconds; rate: requests/s.
    """

    make: Callable[[Path], object]
    latencies: Mapping[int, float]
    slo: float
    rate: float


@contextmanager
def cotenant(
    models: Mapping[str, Served], *, backend: str = "cpu", adapt: bool = True, http_processes: int = 1
) -> Iterator[tuple[int, str]]:
    """Run `cotenant serve` with these models on one whole device; yield pid and URL."""
    with serving(models, backend=backend, adapt=adapt, http_processes=http_processes) as (pid, addresses):
        yield pid, f"http://{addresses['http']}"


@contextmanager
def serving(
    models: Mapping[str, Served], *, backend: str = "cpu", adapt: bool = True, http_processes: int = 1
) -> Iterator[tuple[int, dict[str, str]]]:
    """Run `cotenant serve` with these models on one whole device; yield pid, and addresses by front end. adapt: to what
    they are asked for. http_processes: processes that accept HTTP."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        entries = []
        for model, served in models.items():
            folder = root / "models" / model / "1"
            folder.mkdir(parents=True)
            served.make(folder / "model.onnx")
            entries.append(f'[[models]]\nname = "{model}"\nslo = "{served.slo}s"\nrate = {served.rate}\n')
        profiles = [
            Profile(
                model,
                backend,
                [Point(share=WHOLE, batch=n, latency=latency, memory=0) for n, latency in served.latencies.items()],
            )
            for model, served in models.items()
        ]
        (root / "profiles.csv").write_text(write_profiles(profiles))
        head = f'backend = "{backend}"\nprofiles = "profiles.csv"\nadapt = {str(adapt).lower()}\n'
        head += f"http_processes = {http_processes}\n[cpu]\ncuts = [100]\n"
        (root / "settings.toml").write_text(head + "".join(entries))
        ports = (f"--{front}-port=0" for front in ("http", "grpc", "metrics"))
        with started("-m", "cotenant", "serve", f"{root}/settings.toml", *ports, "--json") as (pid, line):
            yield pid, json.loads(line)["addresses"]


@contextmanager
def started(*command: str) -> Iterator[tuple[int, str]]:
    """Run a Python program that prints one line when it is ready; yield its pid and the line."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            sys.exit(f"{' '.join(command)} did not start")
        yield process.pid, line
    finally:
        process.terminate()
        process.wait(10)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of a load.

    cpu: CPU seconds of server and children per request; latency: median in seconds.
    """

    requests: int
    seconds: float
    cpu: float
    latency: float
    errors: int

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def drive(
    pid: int, url: str, body: bytes, headers: dict[str, str] | None = None, *, connections: int = 16, seconds: int = 3
) -> Load:
    """Post one body repeatedly; each connection sends again when it has a response."""
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
        sys.exit(f"unexpected output of wrk: {output}")
    requests, micros, median, errors = last.split()
    return Load(
        requests=int(requests),
        seconds=int(micros) / 1e6,
        cpu=spent / max(1, int(requests)),
        latency=float(median) / 1e6,
        errors=int(errors),
    )


def processor_time(pid: int) -> float:
    """Return user and system CPU seconds of a process and its living descendants."""
    return sum(own_processor_time(each) for each in tree(pid))


def own_processor_time(pid: int) -> float:
    """Return user and system CPU seconds of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def memory(pid: int) -> int:
    """Return the proportional set size of a process and its living descendants, in bytes."""
    return sum(pss(each) for each in tree(pid))


def pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes. Raises IndexError for one that has exited."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)[0]) << 10


def tree(pid: int) -> Iterator[int]:
    """Yield a process and its living descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # by thread
        for child in children.read_text().split():
            yield from tree(int(child))


@functools.cache
def fixed_loop_ms() -> float:
    """Return the CPU time of a fixed loop in Python, the least of five, in ms: how fast this machine is.

    Machines that these benchmarks ran on differ by 2.5 times; a figure means little without it.
    """
    times = []
    for _ in range(5):
        began = time.process_time()
        total = 0
        for n in range(1_000_000):
            total += n & 3
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def former_results(path: Path | None, kind: type[_Result]) -> list[_Result]:
    """Return what earlier runs have written to a file of results, a line of JSON each; nothing where there is none."""
    if path is None or not path.exists():
        return []
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]


def keep_result(path: Path | None, result: msgspec.Struct) -> None:
    """Append a result to such a file, if there is to be one."""
    if path is not None:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")


def show(name: str, text: str, **figures: float) -> None:
    """Print a result: one line of text, or one JSON object with `--json`."""
    busy = os.getloadavg()[0]
    if "--json" in sys.argv[1:]:
        print(json.dumps({"benchmark": name, **figures, "load_average": busy, "fixed_loop_ms": fixed_loop_ms()}))
    else:
        print(f"{name}: {text}; load average {busy:.1f}; fixed loop {fixed_loop_ms():.1f} ms")


def show_result(result: object, *lines: str) -> None:
    """Print a result: lines of text, or with `--json` its fields."""
    if "--json" in sys.argv[1:]:
        fields = msgspec.to_builtins(result)
        fields = fields | {"fixed_loop_ms": fixed_loop_ms()} if isinstance(fields, dict) else fields
        print(msgspec.json.encode(fields).decode())
    else:
        print("\n".join([*lines, f"fixed loop {fixed_loop_ms():.1f} ms"]))
