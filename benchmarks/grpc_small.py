"""Measure CPU time per small gRPC request of the whole server, workers included.

16 floats, 16 and 64 callers, the identity as an ONNX model; callers with a connection each, and all on one, as those of
one client are. Beside it in turns: the same over HTTP with JSON, raw uvicorn, bare servers of the official gRPC library
on asyncio and with threads, and our gRPC layer alone. Figures are medians.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.grpc_floor import REQUEST, SERVICE
from benchmarks.harness import SMALL, Load, drive, processor_time, serving, show, started
from benchmarks.http_small import IDENTITY

ROUNDS = 3
CALLERS = (16, 64)
SECONDS = 2


def drive_grpc(pid: int, address: str, message: bytes, *, connections: int, streams: int, seconds: int) -> Load:
    """Send one message repeatedly over so many connections, with so many calls at once on each."""
    if shutil.which("h2load") is None:
        sys.exit(
            "this benchmark drives the server with h2load, which is not installed; try: apt-get install nghttp2-client"
        )
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"\0" + len(message).to_bytes(4, "big") + message)
        body.flush()
        command = ["h2load", f"--duration={seconds}", f"--clients={connections}", f"--max-concurrent-streams={streams}"]
        command += [f"--data={body.name}", "--header=content-type: application/grpc", "--header=te: trailers"]
        before = processor_time(pid)
        url = f"http://{address}/{SERVICE}/ModelInfer"
        output = subprocess.run([*command, url], check=True, capture_output=True, text=True).stdout
        spent = processor_time(pid) - before
    counts = re.search(r"requests: \d+ total, \d+ started, \d+ done, (\d+) succeeded, (\d+) failed", output)
    mean = re.search(r"time for request: +\S+ +\S+ +([\d.]+)(us|ms|s)", output)
    if counts is None or mean is None:
        sys.exit(f"unexpected output of h2load: {output}")
    requests = int(counts[1])
    return Load(
        requests=requests,
        seconds=seconds,
        cpu=spent / max(1, requests),
        latency=float(mean[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[mean[2]],
        errors=int(counts[2]),
    )


def served(http: str) -> int:
    """Return how many requests the model has answered: h2load does not tell an error of gRPC from an answer."""
    with urllib.request.urlopen(f"http://{http}/v2/models/identity/stats") as response:
        count: int = json.load(response)["model_stats"][0]["inference_stats"]["success"]["count"]
    return count


def main() -> None:
    loads: dict[str, list[Load]] = {}
    with ExitStack() as stack:
        bare = {name: stack.enter_context(started("-m", "benchmarks.grpc_floor", name)) for name in ("aio", "threads")}
        layer = stack.enter_context(started("-m", "benchmarks.grpc_floor", "layer"))
        raw_pid, raw_url = stack.enter_context(started("-m", "benchmarks.http_floor", "raw"))
        pid, addresses = stack.enter_context(serving({"identity": IDENTITY}))
        path = "v2/models/identity/infer"
        cases: dict[str, Callable[[int], Load]] = {}
        for callers in CALLERS:
            apart = {"connections": callers, "streams": 1}
            together = {"connections": 1, "streams": callers}
            for kind, how in (("", apart), ("_shared", together)):
                cases[f"grpc{kind}_{callers}"] = partial(_grpc, pid, addresses["grpc"], how)
                cases[f"layer{kind}_{callers}"] = partial(_grpc, *layer, how)
                for name, (bare_pid, address) in bare.items():
                    cases[f"{name}{kind}_{callers}"] = partial(_grpc, bare_pid, address, how)
            cases[f"json_{callers}"] = partial(_json, pid, f"http://{addresses['http']}/{path}", callers)
            cases[f"uvicorn_{callers}"] = partial(_json, raw_pid, f"{raw_url}/{path}", callers)
        for name, measure in cases.items():
            measure(1)  # warms up
            loads[name] = []
        before = served(addresses["http"])
        for _ in range(ROUNDS):
            for name, measure in cases.items():
                loads[name].append(measure(SECONDS))
        answered = served(addresses["http"]) - before
    sent = sum(load.requests for name, each in loads.items() for load in each if name.startswith(("grpc", "json")))
    errors = sum(load.errors for each in loads.values() for load in each) + max(0, sent - answered)
    figures = {name: statistics.median(load.cpu for load in each) * 1e6 for name, each in loads.items()}
    rates = {f"{name}_rate": statistics.median(load.rate for load in loads[name]) for name in loads}
    show(
        "grpc_small",
        "; ".join(
            f"{callers} callers: {figures[f'grpc_{callers}']:.0f} µs CPU time per request "
            f"({figures[f'grpc_shared_{callers}']:.0f} on one connection), our layer alone "
            f"{figures[f'layer_{callers}']:.0f} ({figures[f'layer_shared_{callers}']:.0f}), bare grpc.aio "
            f"{figures[f'aio_{callers}']:.0f} ({figures[f'aio_shared_{callers}']:.0f}), bare grpc with threads "
            f"{figures[f'threads_{callers}']:.0f} ({figures[f'threads_shared_{callers}']:.0f}), JSON over HTTP "
            f"{figures[f'json_{callers}']:.0f}, raw uvicorn {figures[f'uvicorn_{callers}']:.0f}"
            for callers in CALLERS
        )
        + f"; {errors} errors",
        **{f"{name}_us": value for name, value in figures.items()},
        **rates,
        errors=errors,
    )


def _grpc(pid: int, address: str, how: dict[str, int], seconds: int) -> Load:
    return drive_grpc(pid, address, REQUEST, **how, seconds=seconds)


def _json(pid: int, url: str, callers: int, seconds: int) -> Load:
    return drive(pid, url, SMALL, connections=callers, seconds=seconds)


if __name__ == "__main__":
    main()
