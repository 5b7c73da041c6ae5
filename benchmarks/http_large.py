"""Measure the latency of sequential binary requests of 600 KB, relative to a lower bound.

The bound is two memory copies, out of the client's memory and into the server's, plus a small request. Models: one
returns a single number, the other, the identity, returns all of it. The time includes the model's own work (a mean, a
copy). Rounds alternate; figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import onnx_models
from benchmarks.harness import SMALL, Served, cotenant, drive, large, show

SIZE = 600_000
ROUNDS = 5
BUFFERS = 64  # exceed any cache

MAKERS: dict[str, Callable[[Path], object]] = {
    "small": onnx_models.identity,
    "mean": partial(onnx_models.mean, width=SIZE // 4),
    "identity": partial(onnx_models.identity, width=SIZE // 4),
}
MODELS = {name: Served(make=make, latencies={1: 0.002}, slo=0.2, rate=10) for name, make in MAKERS.items()}


def copy_time() -> float:
    """Return the seconds to copy SIZE bytes between buffers that are not in a cache."""
    sources = [memoryview(bytearray(b"x") * SIZE) for _ in range(BUFFERS)]
    targets = [memoryview(bytearray(b"y") * SIZE) for _ in range(BUFFERS)]
    start = time.perf_counter()
    for source, destination in zip(sources, targets, strict=True):
        destination[:] = source
    return (time.perf_counter() - start) / BUFFERS


def main() -> None:
    body, headers = large(SIZE)
    seconds: dict[str, list[float]] = {name: [] for name in (*MODELS, "copy")}
    with cotenant(MODELS) as (pid, url):
        for _ in range(ROUNDS):
            seconds["copy"].append(copy_time())
            for name in MODELS:
                content, extra = (SMALL, {}) if name == "small" else (body, headers)
                load = drive(pid, f"{url}/v2/models/{name}/infer", content, extra, connections=1, seconds=2)
                assert not load.errors
                seconds[name].append(load.latency)
    time_of = {name: statistics.median(each) for name, each in seconds.items()}
    least = 2 * time_of["copy"] + time_of["small"]
    show(
        "http_large",
        f"{time_of['mean'] * 1e6:.0f} µs for {SIZE // 1000} KB to a model with a small output "
        f"({time_of['mean'] / least:.2f} times two copies of {time_of['copy'] * 1e6:.0f} µs and a small request of "
        f"{time_of['small'] * 1e6:.0f} µs), {time_of['identity'] * 1e6:.0f} µs to the identity "
        f"({time_of['identity'] / least:.2f} times)",
        **{f"{name}_us": value * 1e6 for name, value in time_of.items()},
        ratio=time_of["mean"] / least,
    )


if __name__ == "__main__":
    main()
