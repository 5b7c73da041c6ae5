"""Measure goodput, rejections and memory at three times the planned rate.

Open-loop Poisson arrivals to the model of `sleep_model`, at the planned rate and at three times that. Repeated with a
model 3 and 10 times slower, with SLOs as much longer: overload limited by the model, and by the CPU. `--seconds N`:
duration of each run, 60 by default.
"""

from __future__ import annotations

import argparse

import msgspec
import uvloop

from benchmarks.harness import SMALL, cotenant, memory, processor_time, show
from benchmarks.sleep_model import ceiling, sleeper
from cotenant.core.model import Model
from cotenant.live.load_generator import RequestBody, generate_load
from cotenant.measure.report import ModelReport, Report
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals

OVERLOAD = 3.0
FACTORS = (10.0, 3.0, 1.0)
SETTLED = 10.0  # seconds after which memory should be constant


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a run.

    lag: p99 send lag in seconds; busy: processors that the server used; growth: relative growth of its memory after the
    start.
    """

    seen: ModelReport
    lag: float
    busy: float
    growth: float


async def run(pid: int, url: str, slo: float, rate: float, seconds: float) -> Run:
    held: list[int] = []

    def note(report: Report) -> None:
        if not held or report.seconds <= SETTLED:
            held[:] = [memory(pid)]

    used = processor_time(pid)
    models = [Model(name="sleeper", slo=slo)]
    arrivals = generate_arrivals(Workload.poisson({"sleeper": rate}), seconds, seed=0)
    report = await generate_load(url, models, {"sleeper": RequestBody(content=SMALL)}, arrivals, seconds, on_tick=note)
    return Run(
        seen=report.models[0],
        lag=report.lag or 0.0,
        busy=(processor_time(pid) - used) / seconds,
        growth=memory(pid) / held[0] - 1,
    )


def measure(factor: float, seconds: float) -> None:
    rate = ceiling(factor)
    model = sleeper(factor)
    with cotenant({"sleeper": model}, backend="fake") as (pid, url):
        uvloop.run(run(pid, url, model.slo, rate, min(seconds, 2.0)))
        fair, over = (uvloop.run(run(pid, url, model.slo, rate * times, seconds)) for times in (1.0, OVERLOAD))
    ratio = over.seen.goodput / fair.seen.goodput
    rejection = over.seen.rejection_p99 or 0.0
    show(
        f"overload/{factor:g}",
        f"goodput {fair.seen.goodput:,.0f}/s of {fair.seen.offered:,.0f}/s, and {over.seen.goodput:,.0f}/s of "
        f"{over.seen.offered:,.0f}/s ({ratio:.1%}); rejection p99 {rejection * 1e3:.1f} ms; memory grew by "
        f"{over.growth:.1%}; the server used {over.busy:.2f} processors; send lag p99 {over.lag * 1e3:.1f} ms",
        goodput=fair.seen.goodput,
        goodput_overload=over.seen.goodput,
        ratio=ratio,
        rejection_p99_ms=rejection * 1e3,
        memory_growth=over.growth,
        busy=over.busy,
        lag_p99_ms=over.lag * 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    seconds = parser.parse_args().seconds
    for factor in FACTORS:
        measure(factor, seconds)


if __name__ == "__main__":
    main()
