"""Measure throughput, and the latency of rejections, with several processes that accept HTTP.

For each of `--counts` a server with a model that is never the limit, for throughput (callers ask again as soon as they
are answered), and with the model of `sleep_model` for rejections, offered `--factor` times what it serves. A quarter of
the cores is the callers' (`caller.c`, a process on each), the others are the server's; with two cores each has one.
`--seconds N`: duration of each of the two runs. `--caller FILE`: the compiled load generator, where there is no
compiler. `--out FILE`: where the results go as JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks import onnx_models
from benchmarks.harness import Served, cotenant, fixed_loop_ms, own_processor_time, processor_time
from benchmarks.overload import Caller, Ends, compiled
from benchmarks.sleep_model import ceiling, sleeper

CONNECTIONS = 512  # of callers that ask again, all together
OPEN = 4000  # of an open loop, all together
WARM_UP = 1.0  # seconds
FAST = Served(make=onnx_models.identity, latencies={1: 0.0005, 256: 0.001}, slo=0.5, rate=1000)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what so many HTTP processes do. served: requests/s, the model not being the limit, with the median and the
    99th percentile of their latency, in ms; processors: used by the server meanwhile; dispatcher_us: of these, by its
    own process, in µs a request. Under overload: goodput: of the model's ceiling; offered, rejected: requests/s;
    latencies of rejections in ms."""

    http_processes: int
    served: float
    served_p50: float
    served_p99: float
    processors: float
    dispatcher_us: float
    goodput: float
    offered: float
    rejected: float
    rejected_p50: float
    rejected_p99: float
    rejected_max: float
    late: int
    broken: int
    overloaded_processors: float


def run_together(callers: Sequence[Caller], seconds: float, connections: int, rate: float = 0.0) -> list[Ends]:
    """Run callers at once; connections and rate are of all together."""
    count = len(callers)
    waiting: list[Callable[[], Ends]] = [
        caller.start(seconds, connections // count, rate / count) for caller in callers
    ]
    return [ends() for ends in waiting]


def measure(count: int, program: Path, folder: Path, seconds: float, factor: float, cores: list[int]) -> Result:
    models = {"fast": FAST, "sleeper": msgspec.structs.replace(sleeper(), rate=1000)}
    with cotenant(models, backend="fake", adapt=False, http_processes=count) as (pid, url):
        fast = [Caller(program, folder, url, FAST.slo, {core}, -1.0, "fast") for core in cores]
        slow = [Caller(program, folder, url, sleeper().slo, {core}, 25.0) for core in cores]
        run_together(fast, WARM_UP, CONNECTIONS)
        used, own = processor_time(pid), own_processor_time(pid)
        quick = run_together(fast, seconds, CONNECTIONS)
        busy, dispatching = (processor_time(pid) - used) / seconds, own_processor_time(pid) - own
        run_together(slow, WARM_UP, CONNECTIONS, ceiling())
        used = processor_time(pid)
        over = run_together(slow, seconds, OPEN, factor * ceiling())
        overloaded = (processor_time(pid) - used) / seconds
    return Result(
        http_processes=count,
        served=sum(each.served for each in quick) / seconds,
        served_p50=statistics.median(each.served_p50 for each in quick),
        served_p99=max(each.served_p99 for each in quick),
        processors=busy,
        dispatcher_us=dispatching / max(1, sum(each.served for each in quick)) * 1e6,
        goodput=sum(each.within for each in over) / seconds / ceiling(),
        offered=sum(each.sent for each in over) / seconds,
        rejected=sum(each.rejected for each in over) / seconds,
        rejected_p50=statistics.median(each.rejected_p50 for each in over),
        rejected_p99=max(each.rejected_p99 for each in over),
        rejected_max=max(each.rejected_max for each in over),
        late=sum(each.served - each.within for each in over),
        broken=sum(each.failed + each.other + each.unanswered for each in [*quick, *over]),
        overloaded_processors=overloaded,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--caller", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("there is no core for the callers alone")
    own = cores[-max(1, len(cores) // 4) :]
    os.sched_setaffinity(0, set(cores) - set(own))  # what the server inherits
    print(f"{len(cores)} cores, {len(own)} of them the callers'; fixed loop {fixed_loop_ms():.1f} ms")
    print(
        "HTTP processes   served/s    p50    p99 ms  processors  own µs | "
        "offered/s  goodput  rejected/s    p50    p99    max ms"
    )
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = asked.caller or compiled(folder)
        for count in asked.counts:
            found = measure(count, program.resolve(), folder, asked.seconds, asked.factor, own)
            results.append(found)
            throughput = (
                f"{count:14} {found.served:10,.0f} {found.served_p50:6.1f} {found.served_p99:6.1f} "
                f"{found.processors:11.1f} {found.dispatcher_us:7.1f}"
            )
            overload = (
                f"{found.offered:9,.0f} {found.goodput:8.1%} {found.rejected:11,.0f} {found.rejected_p50:6.1f} "
                f"{found.rejected_p99:6.1f} {found.rejected_max:6.0f}; late {found.late}, broken {found.broken}"
            )
            print(throughput, "|", overload, flush=True)
            if asked.out is not None:
                asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


if __name__ == "__main__":
    main()
