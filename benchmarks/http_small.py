"""Processor time of the whole server for a small JSON infer: 16 floats, 16 connections.

Of a server that runs, with a model `identity` (x, FP32 [-1, -1], to y), given its URL and process id; without them, of
the HTTP layer before a core in process.
"""

from __future__ import annotations

import statistics

from benchmarks.harness import SMALL, drive, target

ROUNDS = 3


def main() -> None:
    with target() as (pid, url):
        address = f"{url}/v2/models/identity/infer"
        drive(pid, address, SMALL, seconds=1)
        loads = [drive(pid, address, SMALL) for _ in range(ROUNDS)]
    cost = statistics.median(load.cpu for load in loads)
    rate = statistics.median(load.requests / load.seconds for load in loads)
    errors = sum(load.errors for load in loads)
    print(f"http_small: {cost * 1e6:.1f} µs of processor time a request, {rate:,.0f} requests/s, {errors} errors")


if __name__ == "__main__":
    main()
