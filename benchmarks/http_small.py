"""Measure CPU time per small JSON request of the whole server, workers included.

16 floats, 16 connections, the identity as an ONNX model. Baselines: raw uvicorn with an app that returns fixed bytes,
and our HTTP layer alone. Rounds alternate; figures are medians.
"""

from __future__ import annotations

import statistics

from benchmarks import onnx_models
from benchmarks.harness import SMALL, Load, Served, cotenant, drive, show, started

ROUNDS = 3
# Latencies that do not limit the server.
IDENTITY = Served(make=onnx_models.identity, latencies={1: 0.0005, 32: 0.001}, slo=0.2, rate=1000)


def main() -> None:
    loads: dict[str, list[Load]] = {"raw": [], "layer": [], "server": []}
    with (
        started("-m", "benchmarks.http_floor", "raw") as raw,
        started("-m", "benchmarks.http_floor", "layer") as layer,
        cotenant({"identity": IDENTITY}) as server,
    ):
        for round_ in range(ROUNDS + 1):
            for name, (pid, url) in {"raw": raw, "layer": layer, "server": server}.items():
                load = drive(pid, f"{url}/v2/models/identity/infer", SMALL, seconds=2 if round_ else 1)
                if round_:  # the first warms up
                    loads[name].append(load)
    cpu = {name: statistics.median(load.cpu for load in each) * 1e6 for name, each in loads.items()}
    rate = statistics.median(load.rate for load in loads["server"])
    errors = sum(load.errors for each in loads.values() for load in each)
    show(
        "http_small",
        f"{cpu['server']:.0f} µs CPU time per request ({cpu['server'] / cpu['raw']:.1f} times raw uvicorn's "
        f"{cpu['raw']:.0f} µs; the HTTP layer alone takes {cpu['layer']:.0f} µs), {rate:,.0f} requests/s, "
        f"{errors} errors",
        server_us=cpu["server"],
        layer_us=cpu["layer"],
        raw_us=cpu["raw"],
        rate=rate,
        errors=errors,
    )


if __name__ == "__main__":
    main()
