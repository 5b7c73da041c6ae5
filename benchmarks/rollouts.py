"""What does a rollout under load cost those who wait for answers?

`python -m benchmarks.rollouts [--rollouts N] [--kind workers|shares|batches] [--models NAME …] [--seconds S]
[--series FILE] [--limit S] [--json]`

Example models are served on shares of the processor, at 70 % of what the lesser of two plans sustains: one partition of
all models, and two, with the quicker half of the models on a fifth of the processors. They are the same in every run,
whatever the planner thinks of them, so that runs can be compared; batches and rates follow from the profiles. Where a
round of the one partition takes nearly as long as a target, anything that disturbs it makes requests late.

The same load is sent under each plan without rollouts for `--seconds`, then with one rollout after the other until
there were N of them. `workers`: from one plan to the other and back, which replaces all workers, each as soon as there
is a warm worker for every new one; `shares`: every one of two partitions gets 5 % less, or back; `batches`: every model
of two partitions gets the smallest batches that keep up, or those that leave most headroom. The last two happen in
place on processors. Reported are failed requests (answered by an error, or not at all), requests late in all runs, the
switch on the event loop with the processor time that it takes (what is longer, the loop waited for a processor), whole
rollouts, and the memory of the server and its workers before and after.

With `--series` the N rollouts are those of several runs, each with a server of its own: a run ends after `--limit`
seconds of rollouts, of which it has at least one, and is added to the file, and what is reported is of all runs in it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from benchmarks.adaptive import SETTLING, SHARE_OF_CAPACITY, Segment, Served, Tick, arguments, send, sending, served
from benchmarks.harness import memory, show_result
from cotenant.control.events import Switch
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.units import WHOLE
from cotenant.live.deployment import Deployment
from cotenant.planners import Problem
from cotenant.planners.capacity import PartitionDraft, batched_partitions, with_totals
from cotenant.planners.largest_rate import largest_scale
from cotenant.planners.rates import at_scale
from cotenant.planners.registry import Planner
from cotenant.planning.front_end import plan_with_front_end

SETTLE = 5.0  # seconds of load under each plan before it is measured
WARM = 2  # pre-started workers: as many as a plan starts
PAUSE = 0.05  # seconds between two rollouts: 1,000 in place take a minute, and so some thousand requests
QUICK = 200  # ‰ of the processors for the quicker half of the models

Layout = tuple[tuple[int, tuple[str, ...]], ...]  # the share and models of each partition


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what one server went through. Durations are in seconds, memory is in bytes, models in order of their names.

    requests: whose caller stayed; within: those of them within their target; both without rollouts, too. switches: on
    the event loop; processor: the processor time of each; wholes: of rollouts. misses: seconds with rollouts in which
    requests were late, and how many; those of one second mostly have one reason.
    """

    kind: str
    models: tuple[str, ...]
    requests_without: int
    within_without: int
    outcomes_without: tuple[dict[str, dict[str, int]], ...]
    requests: int
    within: int
    failed: int
    outcomes: dict[str, dict[str, int]]
    switches: list[float]
    processor: list[float]
    wholes: list[float]
    memory_before: int
    memory_after: int
    load_average: float
    misses: list[tuple[float, int]] = []


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Sum up runs. Fractions are of requests; switch in milliseconds, rollout in seconds, memory in MiB, by run."""

    runs: int
    rollouts: int
    seconds_with_late: int
    kind: str
    requests_without: int
    requests: int
    failed: int
    late_without: float
    late_with: float
    switch_ms_p50: float
    switch_ms_p99: float
    switch_ms_max: float
    switch_processor_ms_p50: float
    switch_processor_ms_max: float
    rollout_s_p50: float
    rollout_s_max: float
    memory_before_mib: tuple[float, ...]
    memory_after_mib: tuple[float, ...]
    load_average: tuple[float, ...]


def summed(runs: Sequence[Run]) -> Result:
    """Sum up one run, or more."""
    switches = sorted(switch * 1e3 for run in runs for switch in run.switches)
    processor = [switch * 1e3 for run in runs for switch in run.processor]
    wholes = [whole for run in runs for whole in run.wholes]
    without, requests = sum(run.requests_without for run in runs), sum(run.requests for run in runs)
    return Result(
        runs=len(runs),
        rollouts=len(wholes),
        seconds_with_late=sum(len(run.misses) for run in runs),
        kind=runs[0].kind,
        requests_without=without,
        requests=requests,
        failed=sum(run.failed for run in runs),
        late_without=1 - sum(run.within_without for run in runs) / without,
        late_with=1 - sum(run.within for run in runs) / requests,
        switch_ms_p50=statistics.median(switches),
        switch_ms_p99=switches[int(0.99 * (len(switches) - 1))],
        switch_ms_max=switches[-1],
        switch_processor_ms_p50=statistics.median(processor),
        switch_processor_ms_max=max(processor),
        rollout_s_p50=statistics.median(wholes),
        rollout_s_max=max(wholes),
        memory_before_mib=tuple(run.memory_before / 2**20 for run in runs),
        memory_after_mib=tuple(run.memory_after / 2**20 for run in runs),
        load_average=tuple(run.load_average for run in runs),
    )


def layouts(problem: Problem, kind: Kind) -> tuple[Layout, Layout]:
    """Return the shares, in thousandths, and models of the partitions of both plans."""
    quick = sorted(problem.rates, key=lambda name: problem.profiles[name, kind.name].latency(1, WHOLE))
    half = len(quick) // 2
    return ((WHOLE, tuple(quick)),), ((WHOLE - QUICK, tuple(quick[half:])), (QUICK, tuple(quick[:half])))


def fixed_planner(layout: Layout, *, full: bool) -> Planner:
    """Return a planner that gives one device these partitions. full: see `batched_partitions`."""

    def planned(problem: Problem) -> Plan:
        (kind,) = problem.fleet
        drafts = [PartitionDraft(share, {name: problem.rates[name] for name in names}) for share, names in layout]
        partitions = batched_partitions(problem, kind, drafts, full=full)
        devices = () if partitions is None else (Device(id=DeviceId(kind.name, 0), partitions=partitions),)
        return with_totals(Plan(planner="fixed", devices=devices), problem)

    return planned


def planned(layout: Layout, problem: Problem, *, full: bool = True) -> Plan:
    """Return the plan of a layout for the rates of a problem, or for their largest multiple by its objective, as the
    server's own plans are made: with room for what serving costs beside batches. Exits where there is none."""

    def solve(asked: Problem) -> Plan:
        planner = fixed_planner(layout, full=full)
        return largest_scale(planner, asked) if asked.objective == "rate" else planner(asked)

    assert problem.front_end is not None
    plan = plan_with_front_end(solve, problem, problem.front_end)
    if plan.unserved or not plan.scale:
        sys.exit(f"no batches of {layout} meet the targets on this machine")
    return plan


def with_smaller_shares(plan: Plan, problem: Problem) -> Plan:
    """Return the plan of one device with 5 % of it less for each partition."""
    (device,) = plan.devices
    partitions = tuple(_resized(it, max(it.share - 50, 50), problem, device.kind) for it in device.partitions)
    return msgspec.structs.replace(plan, devices=(msgspec.structs.replace(device, partitions=partitions),))


def _resized(partition: Partition, share: int, problem: Problem, kind: str) -> Partition:
    placements = tuple(
        msgspec.structs.replace(it, latency=problem.profiles[it.model, kind].latency(it.batch, share, it.procs))
        for it in partition.placements
    )
    return Partition(share=share, placements=placements)


def deployments(given: Deployment, problem: Problem, kind: str) -> tuple[Deployment, Deployment]:
    """Return the deployments to go over to and back from, at the rates of `SHARE_OF_CAPACITY`."""
    (device,) = problem.fleet
    most = msgspec.structs.replace(problem, objective="rate")
    one, two = layouts(most, device)
    scale = SHARE_OF_CAPACITY * min(planned(layout, most).scale for layout in (one, two))
    problem = at_scale(most, scale)
    plan = planned(two, problem)
    match kind:
        case "workers":
            other = planned(one, problem)
        case "shares":
            other = with_smaller_shares(plan, problem)
        case _:
            other = planned(two, problem, full=False)
    if other.devices == plan.devices:
        sys.exit(f"the profiles of this machine leave nothing to change for --kind {kind}")
    first, second = (msgspec.structs.replace(given, problem=problem, plan=it, slowdowns={}) for it in (plan, other))
    return first, second


async def measure(given: Served, kind: str, rollouts: int, limit: float, seconds: float, seed: int) -> Run:
    server = given.server._server
    first, second = deployments(server.deployment, given.problem, kind)
    rates = first.problem.rates
    without: list[Tick] = []
    for deployment in (second, first):  # both have run once: warm workers and memory are as they stay
        await server.apply(deployment)
        await send(given.address, [Segment(SETTLE, rates)], SETTLING)
        without.append((await send(given.address, [Segment(seconds, rates)], seed))[-1])
    before = memory(os.getpid())
    statistics_, pool = server._rollouts.statistics, server._rollouts._control.pool
    last: list[Tick] = []
    endless = [Segment(3600.0, rates)]
    switches: list[float] = []
    processor: list[float] = []
    resize, switch_over = server._rollouts._resize, server._rollouts._switch
    spent = [0.0]

    def timed_resize(lanes: Sequence[LaneId]) -> None:
        begun = time.thread_time()
        resize(lanes)
        spent[0] = time.thread_time() - begun

    def timed_switch(switch: Switch) -> None:
        begun = time.thread_time()
        switch_over(switch)
        processor.append(spent[0] + time.thread_time() - begun)
        spent[0] = 0.0

    server._rollouts._resize = timed_resize  # type: ignore[method-assign]
    server._rollouts._switch = timed_switch  # type: ignore[method-assign]
    wholes: list[float] = []

    async def roll() -> None:
        until = time.monotonic() + limit
        for number in range(rollouts):
            if number and time.monotonic() > until:  # a run without any would tell nothing
                break
            await asyncio.sleep(PAUSE)
            while kind == "workers" and pool.warm_workers < WARM:
                await asyncio.sleep(0.01)
            await server.apply(second if number % 2 == 0 else first)
            await server._rollouts.idle()
            durations = statistics_.last[0][1].durations
            switches.append(durations.switch)
            wholes.append(durations.total)

    rolling = asyncio.create_task(roll())
    async for tick in sending(given.address, endless, seed):
        last.append(tick)
        if rolling.done():
            break
    await rolling
    await server.apply(first)
    await asyncio.sleep(1.0)
    end = last[-1]
    return Run(
        kind=kind,
        models=tuple(sorted(rates)),
        requests_without=sum(it.stayed for it in without),
        within_without=sum(it.within_target for it in without),
        outcomes_without=tuple(it.outcomes for it in without),
        requests=end.stayed,
        within=end.within_target,
        failed=end.failed,
        outcomes=end.outcomes,
        switches=switches,
        processor=processor,
        wholes=wholes,
        memory_before=before,
        memory_after=memory(os.getpid()),
        load_average=os.getloadavg()[0],
        misses=_misses(last),
    )


def _misses(ticks: Sequence[Tick]) -> list[tuple[float, int]]:
    late = [(tick.seconds, tick.stayed - tick.within_target) for tick in ticks]
    return [(second, now - before) for (_, before), (second, now) in itertools.pairwise(late) if now > before]


async def run(kind: str, rollouts: int, limit: float, seconds: float, seed: int, **given: object) -> Run:
    async with served(**given, adapt=False, warm_workers=WARM) as it:  # type: ignore[arg-type]
        return await measure(it, kind, rollouts, limit, seconds, seed)


def earlier(series: Path | None, kind: str, models: Sequence[str]) -> list[Run]:
    """Return the runs of a series so far. Exits where they are of another kind, or of other models."""
    lines = series.read_text().splitlines() if series is not None and series.exists() else []
    try:
        runs = [msgspec.json.decode(line, type=Run) for line in lines]
    except msgspec.DecodeError as error:
        sys.exit(f"{series} is not a series of runs of this version ({error}); begin a new file")
    if any(it.kind != kind for it in runs):
        sys.exit(f"{series} has runs of another --kind; give each its own file")
    others = [it.models for it in runs if set(it.models) != set(models)]
    if others:
        sys.exit(f"{series} has runs of other --models ({' '.join(others[0])}); give each its own file")
    return runs


def positive_count(text: str) -> int:
    """Return a count of 1 or more, as an argument of the command line."""
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return count


def positive_seconds(text: str) -> float:
    """Return a duration above 0, as an argument of the command line."""
    if not (seconds := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 seconds")
    return seconds


def main() -> None:
    parser = arguments(__doc__, 20.0)
    parser.add_argument("--rollouts", type=positive_count, default=1000)
    parser.add_argument("--kind", choices=("workers", "shares", "batches"), default="workers")
    parser.add_argument("--series", type=Path, help="add this run to those in a file, and report all")
    parser.add_argument(
        "--limit", type=positive_seconds, default=math.inf, help="seconds of rollouts after which no other begins"
    )
    args = parser.parse_args()
    runs = earlier(args.series, args.kind, args.models)
    missing = args.rollouts - sum(len(it.wholes) for it in runs)
    if missing > 0:
        added = uvloop.run(
            run(
                args.kind,
                missing,
                args.limit,
                args.seconds,
                args.seed + len(runs),
                repository=args.model_repository,
                names=args.models,
                event_log=args.event_log,
            )
        )
        runs.append(added)
        if args.series is not None:
            with args.series.open("ab") as file:
                file.write(msgspec.json.encode(added) + b"\n")
    result = summed(runs)
    show_result(
        result,
        f"{result.rollouts} rollouts ({result.kind}) in {result.runs} runs under {result.requests} requests: "
        f"{result.failed} failed; late {result.late_with * 100:.3f} %, in {result.seconds_with_late} seconds; without "
        f"rollouts {result.late_without * 100:.3f} % of {result.requests_without}; "
        f"switch p50 {result.switch_ms_p50:.2f} ms, p99 {result.switch_ms_p99:.2f} ms, "
        f"most {result.switch_ms_max:.2f} ms, of the processor p50 {result.switch_processor_ms_p50:.2f}, most "
        f"{result.switch_processor_ms_max:.2f} ms; "
        f"rollout p50 {result.rollout_s_p50:.2f} s, most {result.rollout_s_max:.2f} s; memory before and after in MiB "
        + ", ".join(
            f"{before:.0f} and {after:.0f}"
            for before, after in zip(result.memory_before_mib, result.memory_after_mib, strict=True)
        )
        + f"; load average {max(result.load_average):.1f} at most",
    )


if __name__ == "__main__":
    main()
