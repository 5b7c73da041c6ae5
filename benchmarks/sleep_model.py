"""Measure responses per second of a model that sleeps, relative to the ceiling of such a model.

A batch takes 4 ms and 0.1 ms per row, with at most 32 rows; 64 closed-loop clients have an SLO of 50 ms.
"""

from __future__ import annotations

import statistics

from benchmarks import onnx_models
from benchmarks.harness import SMALL, Served, cotenant, drive, show

ROUNDS = 3
BATCH = 32
CONNECTIONS = 64


def sleeper(factor: float = 1.0) -> Served:
    """Return the model, with latencies and SLO times `factor`."""
    latencies = {rows: (0.004 + 0.0001 * rows) * factor for rows in (1, BATCH)}
    return Served(make=onnx_models.identity, latencies=latencies, slo=0.05 * factor, rate=ceiling(factor))


def ceiling(factor: float = 1.0) -> float:
    """Return responses/s of full batches without gaps."""
    return BATCH / ((0.004 + 0.0001 * BATCH) * factor)


def main() -> None:
    with cotenant({"sleeper": sleeper()}, backend="fake") as (pid, url):
        address = f"{url}/v2/models/sleeper/infer"
        drive(pid, address, SMALL, connections=CONNECTIONS, seconds=1)
        loads = [drive(pid, address, SMALL, connections=CONNECTIONS) for _ in range(ROUNDS)]
    rate = statistics.median(load.rate for load in loads)
    cpu = statistics.median(load.cpu for load in loads)
    errors = sum(load.errors for load in loads)
    show(
        "sleep_model",
        f"{rate:,.0f} responses/s, {rate / ceiling():.1%} of the ceiling of {ceiling():,.0f}; {cpu * 1e6:.0f} µs "
        f"CPU time each, {errors} errors",
        rate=rate,
        ceiling=ceiling(),
        cpu_us=cpu * 1e6,
        errors=errors,
    )


if __name__ == "__main__":
    main()
