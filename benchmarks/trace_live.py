"""Serve a part of a public trace live: how much of it is late with the plan that adapts, and with one that does not?

`python -m benchmarks.trace_live [--trace conv|code|functions] [--start S] [--seconds S] [--models NAME …] [--json]`

A part of a trace of `benchmarks.traces` is striped over example models on shares of the processor, so that the busiest
minute of the whole trace asks for 70 % of their capacity, and sent to two servers, one after the other. Both begin with
a plan for the rates of that minute; one adapts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from benchmarks.adaptive import arguments, generate, served, ticks_of
from benchmarks.harness import show_result
from benchmarks.traces import TRACES, workload
from cotenant.workload.arrivals import generate_arrivals


class Asked(msgspec.Struct, frozen=True):
    """A part of a trace, and the rates (requests/s) of its busiest minute."""

    trace: str
    start: float
    seconds: float
    rates: dict[str, float]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """plans: requested while requests were sent."""

    requests: int
    within_target: int
    failed: int
    rejected: int
    plans: int

    @property
    def attainment(self) -> float:
        return self.within_target / self.requests


class Result(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    start: float
    seconds: float
    adapting: Run
    one_plan: Run
    load_average: float


async def measure(args: argparse.Namespace, *, adapt: bool) -> Run:
    async with served(args.model_repository, args.models, adapt=adapt, event_log=args.event_log) as given:
        rollouts = given.server._server._rollouts
        before, _ = rollouts.desired
        asked = Asked(args.trace, args.start, args.seconds, given.rates)
        program = "benchmarks.trace_live", given.address, str(args.seed)
        *_, last = [tick async for tick in ticks_of(program, msgspec.json.encode(asked))]
        after, _ = rollouts.desired
    return Run(
        requests=last.stayed,
        within_target=last.within_target,
        failed=last.failed,
        rejected=last.rejected,
        plans=(after or 0) - (before or 0),
    )


async def run(args: argparse.Namespace) -> Result:
    return Result(
        trace=args.trace,
        start=args.start,
        seconds=args.seconds,
        adapting=await measure(args, adapt=True),
        one_plan=await measure(args, adapt=False),
        load_average=os.getloadavg()[0],
    )


async def _send(address: str, asked: Asked, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        load = workload(asked.trace, asked.rates, asked.start, asked.seconds, Path(folder))
        await generate(address, list(asked.rates), generate_arrivals(load, asked.seconds, seed), asked.seconds, seed)


def main() -> None:
    parser = arguments(__doc__, 90.0)
    parser.add_argument("--trace", choices=TRACES, default="conv")
    parser.add_argument("--start", type=float, default=0.0)
    args = parser.parse_args()
    result = uvloop.run(run(args))
    show_result(
        result,
        *(
            f"{name}: {100 * it.attainment:.2f} % of {it.requests} requests within their targets, "
            f"{it.rejected} rejected, {it.failed} failed; {it.plans} plans"
            for name, it in (("adapting", result.adapting), ("one plan", result.one_plan))
        ),
        f"{result.trace}, {result.seconds:g} s from {result.start:g} s on; load average {result.load_average:.1f}",
    )


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        uvloop.run(_send(sys.argv[1], msgspec.json.decode(sys.stdin.buffer.read(), type=Asked), int(sys.argv[2])))
    else:
        main()
