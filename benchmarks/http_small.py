"""Measure CPU time per small JSON request of the whole server, workers included.

16 floats, 16 and 64 connections, the identity as an ONNX model; the same as binary tensors. Baselines: raw uvicorn with
an app that returns fixed bytes, uvicorn with an app that reads the JSON and writes the answer's, and our HTTP layer
alone. Rounds alternate; figures are medians.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from benchmarks import onnx_models
from benchmarks.harness import SMALL, Load, Served, cotenant, drive, large, show, started

ROUNDS = 3
CALLERS = (16, 64)
BASELINES = ("raw", "protocol", "layer")
# Latencies that do not limit the server.
IDENTITY = Served(make=onnx_models.identity, latencies={1: 0.0005, 32: 0.001}, slo=0.2, rate=1000)


def main() -> None:
    loads: dict[tuple[str, int], list[Load]] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(started("-m", "benchmarks.http_floor", name)) for name in BASELINES}
        servers["server"] = servers["binary"] = stack.enter_context(cotenant({"identity": IDENTITY}))
        for round_ in range(ROUNDS + 1):
            for callers in CALLERS:
                for name, (pid, url) in servers.items():
                    address = f"{url}/v2/models/identity/infer"
                    body, headers = large(64) if name == "binary" else (SMALL, {})
                    load = drive(pid, address, body, headers, connections=callers, seconds=2 if round_ else 1)
                    if round_:  # the first warms up
                        loads.setdefault((name, callers), []).append(load)
    figures = {
        f"{name}_{callers}_us": statistics.median(load.cpu for load in each) * 1e6
        for (name, callers), each in loads.items()
    }
    rates = {
        f"rate_{callers}": statistics.median(load.rate for load in loads["server", callers]) for callers in CALLERS
    }
    errors = sum(load.errors for each in loads.values() for load in each)
    lines = [
        f"{callers} connections: {figures[f'server_{callers}_us']:.0f} µs CPU time per request, binary "
        f"{figures[f'binary_{callers}_us']:.0f} µs (raw uvicorn "
        f"{figures[f'raw_{callers}_us']:.0f} µs, one that reads and writes JSON "
        f"{figures[f'protocol_{callers}_us']:.0f} µs; our HTTP layer alone {figures[f'layer_{callers}_us']:.0f} µs), "
        f"{rates[f'rate_{callers}']:,.0f} requests/s"
        for callers in CALLERS
    ]
    show("http_small", f"{'; '.join(lines)}; {errors} errors", **figures, **rates, errors=errors)


if __name__ == "__main__":
    main()
