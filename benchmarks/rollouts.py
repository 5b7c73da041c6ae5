"""What does a rollout under load cost those who wait for answers?

`python -m benchmarks.rollouts [--rollouts N] [--kind workers|shares] [--models NAME …] [--seconds S] [--json]`

Example models are served on shares of the processor at 70 % of capacity, by the plan that the server has after it could
adapt to them for `--settle` seconds. The same load is sent twice: without rollouts for `--seconds`, then with one
rollout after the other until there were N of them, each as soon as there is a warm worker. `workers`: every rollout
goes over to another version of all models, by the same plan, and so replaces all workers; `shares`: every partition
gets 5 % less, or back, which on processors happens in place. Reported are failed requests (answered by an error, or not
at all), requests late in both runs, the switch on the event loop with the processor time that it takes (what is longer,
the loop waited for a processor), whole rollouts, and the memory of the server and its workers before and after.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time

import msgspec
import uvloop

from benchmarks.adaptive import Segment, Served, Tick, arguments, send, sending, served
from benchmarks.harness import memory, show_result
from cotenant.control.events import Switch
from cotenant.core.plan import Partition
from cotenant.live.deployment import Deployment
from cotenant.planners import Problem


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Fractions are of requests; switch in milliseconds, rollout in seconds, memory in MiB."""

    rollouts: int
    kind: str
    requests: int
    failed: int
    late_without: float
    late_with: float
    outcomes_without: dict[str, dict[str, int]]
    outcomes_with: dict[str, dict[str, int]]
    switch_ms_p50: float
    switch_ms_p99: float
    switch_ms_max: float
    switch_processor_ms_max: float
    rollout_s_p50: float
    rollout_s_max: float
    memory_before_mib: float
    memory_after_mib: float
    load_average: float


def other(deployment: Deployment, kind: str) -> Deployment:
    """Return the deployment to go over to and back from."""
    plan, problem = deployment.plan, deployment.problem
    if kind == "workers":
        versions = {
            name: msgspec.structs.replace(model, entry=msgspec.structs.replace(model.entry, version="2"))
            for name, model in deployment.offered.items()
        }
        return msgspec.structs.replace(deployment, offered=versions)
    (device,) = plan.devices
    partitions = tuple(_resized(it, max(it.share - 50, 50), problem, device.kind) for it in device.partitions)
    changed = msgspec.structs.replace(plan, devices=(msgspec.structs.replace(device, partitions=partitions),))
    return msgspec.structs.replace(deployment, plan=changed)


def _resized(partition: Partition, share: int, problem: Problem, kind: str) -> Partition:
    placements = tuple(
        msgspec.structs.replace(it, latency=problem.profiles[it.model, kind].latency(it.batch, share, it.procs))
        for it in partition.placements
    )
    return Partition(share=share, placements=placements)


async def measure(given: Served, kind: str, rollouts: int, seconds: float, seed: int) -> Result:
    server = given.server._server
    first = server.deployment
    second = other(first, kind)
    await server.apply(second)  # both have run once: warm workers and memory are as they stay
    await server.apply(first)
    without = (await send(given.address, [Segment(seconds, given.rates)], seed))[-1]
    before = memory(os.getpid())
    statistics_, pool = server._rollouts.statistics, server._rollouts._control.pool
    last: list[Tick] = []
    endless = [Segment(3600.0, given.rates)]
    switches: list[float] = []
    processor: list[float] = []
    switch_over = server._rollouts._switch

    def switch(command: Switch) -> None:
        begun = time.thread_time()
        switch_over(command)
        processor.append((time.thread_time() - begun) * 1e3)

    server._rollouts._switch = switch  # type: ignore[assignment,method-assign]
    wholes: list[float] = []

    async def roll() -> None:
        for number in range(rollouts):
            while kind == "workers" and not pool.warm_workers:
                await asyncio.sleep(0.01)
            await server.apply(second if number % 2 == 0 else first)
            await server._rollouts.idle()
            durations = statistics_.last[0][1].durations
            switches.append(durations.switch * 1e3)
            wholes.append(durations.queued + durations.prepare + durations.switch + durations.drain)

    rolling = asyncio.create_task(roll())
    async for tick in sending(given.address, endless, seed):
        last.append(tick)
        if rolling.done():
            break
    await rolling
    await server.apply(first)
    await asyncio.sleep(1.0)
    end = last[-1]
    return Result(
        rollouts=rollouts,
        kind=kind,
        requests=end.stayed,
        failed=end.failed,
        late_without=1 - without.within_target / without.stayed,
        late_with=1 - end.within_target / end.stayed,
        outcomes_without=without.outcomes,
        outcomes_with=end.outcomes,
        switch_ms_p50=statistics.median(switches),
        switch_ms_p99=sorted(switches)[int(0.99 * (len(switches) - 1))],
        switch_ms_max=max(switches),
        switch_processor_ms_max=max(processor),
        rollout_s_p50=statistics.median(wholes),
        rollout_s_max=max(wholes),
        memory_before_mib=before / 2**20,
        memory_after_mib=memory(os.getpid()) / 2**20,
        load_average=os.getloadavg()[0],
    )


async def run(kind: str, rollouts: int, seconds: float, seed: int, **given: object) -> Result:
    async with served(**given, adapt=False) as it:  # type: ignore[arg-type]
        return await measure(it, kind, rollouts, seconds, seed)


def main() -> None:
    parser = arguments(__doc__, 20.0, settle=20.0)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--kind", choices=("workers", "shares"), default="workers")
    args = parser.parse_args()
    result = uvloop.run(
        run(
            args.kind,
            args.rollouts,
            args.seconds,
            args.seed,
            repository=args.model_repository,
            names=args.models,
            settle=args.settle,
            event_log=args.event_log,
        )
    )
    show_result(
        result,
        f"{result.rollouts} rollouts ({result.kind}) under {result.requests} requests: {result.failed} failed; "
        f"late {result.late_with * 100:.2f} %, without rollouts {result.late_without * 100:.2f} %; "
        f"switch p50 {result.switch_ms_p50:.2f} ms, p99 {result.switch_ms_p99:.2f} ms, "
        f"most {result.switch_ms_max:.2f} ms, of the processor {result.switch_processor_ms_max:.2f} ms; "
        f"rollout p50 {result.rollout_s_p50:.2f} s, most {result.rollout_s_max:.2f} s; memory "
        f"{result.memory_before_mib:.0f} MiB before, {result.memory_after_mib:.0f} MiB after; "
        f"load average {result.load_average:.1f}",
    )


if __name__ == "__main__":
    main()
