"""Measure goodput and the latency of rejections while callers offer more than the server can serve.

The model of `sleep_model`, which serves at most 4,444 requests/s. Open loop: Poisson arrivals at `--factors` times
that, sent when they are due whatever the server does (`caller.c`); closed loop: `--callers` that ask again as soon as
they are answered, rejections included. The callers have the last core for themselves, and server and workers the
others, unless `--shared`: then they compete for all. `--slower N`: with a model, and a target, N times as slow.
Where all of an open loop's connections are taken, its requests wait for one, or are given up after `--patience` ms: a
server that answers less than is offered gets them late otherwise, whatever it does.
`--seconds N`: duration of each run, 20 by default. `--http-processes N`: processes that accept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.harness import SMALL, cotenant, memory, processor_time, show
from benchmarks.sleep_model import ceiling, sleeper

WARM_UP = 2.0  # seconds at the planned rate, before anything counts
CONNECTIONS = 4000  # open at once, at most, in an open loop


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests of a run ended, as `caller.c` prints it. within: served within the target; given_up: not sent,
    as no connection was free. Latencies are in ms, from when the request was due; lag_p99: how late requests were sent,
    for want of processor time of the caller."""

    sent: int
    served: int
    within: int
    rejected: int
    other: int
    failed: int
    given_up: int
    unanswered: int
    connects: int
    served_p50: float
    served_p99: float
    rejected_p50: float
    rejected_p99: float
    rejected_max: float
    lag_p99: float
    cpu: float


class Caller:
    """Run the caller against a server. program: `compiled`. cores: those that it may use. patience: ms for which a
    request waits for a connection; negative: for ever."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        url: str,
        slo: float,
        cores: set[int],
        patience: float,
        model: str = "sleeper",
    ) -> None:
        self._program = program
        self._port = url.rpartition(":")[2]
        self._request = folder / f"request-{model}"
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(SMALL)}\r\n\r\n"
        self._request.write_bytes(head.encode() + SMALL)
        self._slo = slo
        self._cores = cores
        self._patience = patience

    def run(self, seconds: float, connections: int, rate: float = 0.0) -> Ends:
        """Offer that many requests/s, or, at rate 0, let each connection ask again as soon as it is answered."""
        return self.start(seconds, connections, rate)()

    def start(self, seconds: float, connections: int, rate: float = 0.0) -> Callable[[], Ends]:
        """Begin to, and return what waits for the end."""
        words = (self._port, self._request, self._slo * 1e3, seconds, connections, rate, 1, self._patience)
        process = subprocess.Popen(
            [str(self._program), *map(str, words)],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
        )

        def ends() -> Ends:
            output, _ = process.communicate()
            if process.returncode:
                sys.exit(f"the load generator ended with status {process.returncode}")
            return msgspec.json.decode(output, type=Ends)

        return ends


def compiled(folder: Path) -> Path:
    """Compile the load generator."""
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("this benchmark compiles its load generator, and finds no C compiler; try: apt-get install gcc")
    program = folder / "caller"
    source = Path(__file__).with_name("caller.c")
    subprocess.run([compiler, "-O2", "-o", str(program), str(source), "-lm"], check=True)
    return program


def measure(
    slower: float,
    factors: list[float],
    callers: list[int],
    seconds: float,
    *,
    shared: bool,
    patience: float,
    http_processes: int,
) -> None:
    cores = os.sched_getaffinity(0)
    own = cores if shared else {max(cores)}
    if not shared:
        if len(cores) < 2:
            sys.exit("there is no core for the callers alone; try --shared")
        os.sched_setaffinity(0, cores - own)  # what the server inherits
    with (
        cotenant({"sleeper": sleeper(slower)}, backend="fake", http_processes=http_processes) as (pid, url),
        tempfile.TemporaryDirectory() as folder,
    ):
        caller = Caller(compiled(Path(folder)), Path(folder), url, sleeper(slower).slo, own, patience)
        most = ceiling(slower)
        caller.run(WARM_UP, 512, most)
        for factor in factors:
            report(pid, f"{factor:g}", caller, seconds, CONNECTIONS, factor * most, most)
        for count in callers:
            report(pid, f"{count} callers", caller, seconds, count, 0.0, most)
    os.sched_setaffinity(0, cores)


def report(pid: int, name: str, caller: Caller, seconds: float, connections: int, rate: float, most: float) -> None:
    before, used = memory(pid), processor_time(pid)
    ends = caller.run(seconds, connections, rate)
    busy = (processor_time(pid) - used) / seconds
    goodput = ends.within / seconds
    growth = memory(pid) / before - 1
    show(
        f"overload/{name}",
        f"goodput {goodput:,.0f}/s of {ends.sent / seconds:,.0f}/s ({goodput / most:.1%} of the ceiling of "
        f"{most:,.0f}); rejected {ends.rejected / seconds:,.0f}/s, p50 {ends.rejected_p50:.1f}, p99 "
        f"{ends.rejected_p99:.1f}, at most {ends.rejected_max:.0f} ms; late {ends.served - ends.within}, broken "
        f"{ends.failed + ends.other}, given up {ends.given_up}, unanswered {ends.unanswered}; "
        f"the server used {busy:.2f} processors, its memory grew by {growth:.1%}; send lag p99 {ends.lag_p99:.1f} ms",
        goodput=goodput,
        ceiling=most,
        ratio=goodput / most,
        busy=busy,
        memory_growth=growth,
        **msgspec.structs.asdict(ends),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--factors", type=float, nargs="*", default=[1.0, 3.0, 10.0])
    parser.add_argument("--callers", type=int, nargs="*", default=[512, 4000])
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=-1.0)
    parser.add_argument("--http-processes", type=int, default=1)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    measure(
        asked.slower,
        asked.factors,
        asked.callers,
        asked.seconds,
        shared=asked.shared,
        patience=asked.patience,
        http_processes=asked.http_processes,
    )


if __name__ == "__main__":
    main()
