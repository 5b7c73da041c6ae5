"""Processor time of the whole server for a binary infer of 600 KB there and back, next to the least it can be.

The least is what the kernel must copy, once from the socket and once to it, and what a small request costs.
Takes the same arguments as http_small.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.harness import SMALL, drive, large, target

SIZE = 600_000
ROUNDS = 3
BUFFERS = 64  # more than any cache holds


def copy_time() -> float:
    """Seconds to copy SIZE bytes once, from and to memory that was not just used."""
    sources = [memoryview(bytearray(b"x") * SIZE) for _ in range(BUFFERS)]
    targets = [memoryview(bytearray(b"y") * SIZE) for _ in range(BUFFERS)]
    start = time.process_time()
    for source, destination in zip(sources, targets, strict=True):
        destination[:] = source
    return (time.process_time() - start) / BUFFERS


def main() -> None:
    body, headers = large(SIZE)
    with target() as (pid, url):
        address = f"{url}/v2/models/identity/infer"
        drive(pid, address, body, headers, connections=4, seconds=1)
        small, big, copies = [], [], []
        for _ in range(ROUNDS):
            small.append(drive(pid, address, SMALL, connections=4, seconds=2).cpu)
            load = drive(pid, address, body, headers, connections=4, seconds=2)
            assert not load.errors
            big.append(load.cpu)
            copies.append(copy_time())
    cost, one, copy = (statistics.median(values) for values in (big, small, copies))
    least = 2 * copy + one
    print(
        f"http_large: {cost * 1e6:.0f} µs of processor time for {SIZE // 1000} KB there and back, "
        f"{cost / least:.2f} times two copies ({copy * 1e6:.0f} µs each) and a small request ({one * 1e6:.0f} µs)"
    )


if __name__ == "__main__":
    main()
