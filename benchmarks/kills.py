"""What do workers that die cost? One is killed every two seconds under load.

`python -m benchmarks.kills [--seconds S] [--every S] [--models NAME …] [--json]`

Example models are served on shares of the processor at 70 % of capacity, after `--settle` seconds within which the
server adapts to them. Reported are failed requests (answered by an
error, such as one whose worker died when there was no time left to try again, or not at all), attainment, and how long
killed workers were away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.adaptive import Segment, arguments, send, served
from benchmarks.harness import show_result


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """accepted: attainment of requests that were not rejected on arrival. outcomes: by model. back: seconds until a
    killed worker was ready again."""

    kills: int
    requests: int
    failed: int
    attainment: float
    accepted: float
    outcomes: dict[str, dict[str, int]]
    back_s_p50: float
    back_s_max: float
    load_average: float


async def measure(repository: Path, names: list[str], seconds: float, every: float, seed: int, **how: Any) -> Result:
    async with served(repository, names, adapt=True, **how) as given:
        rollouts = given.server._server._rollouts
        rng = np.random.default_rng(seed)
        away: list[float] = []

        async def kill() -> None:
            while True:
                await asyncio.sleep(every)
                there = [worker for worker in rollouts.workers() if worker.pid is not None]
                if not there:
                    continue
                victim = there[int(rng.integers(len(there)))]
                assert victim.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
                tasks.add(asyncio.create_task(back(victim.lane, victim.pid)))

        async def back(lane: object, pid: int) -> None:
            begun = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                now = [worker for worker in rollouts.workers() if worker.lane == lane]
                if not now:
                    return  # another plan is in force
                if now[0].pid not in (None, pid) and now[0].state == "ready":
                    away.append(time.monotonic() - begun)
                    return

        tasks: set[asyncio.Task[None]] = set()
        killing = asyncio.create_task(kill())
        end = (await send(given.address, [Segment(seconds, given.rates)], seed))[-1]
        killing.cancel()
        _, late = await asyncio.wait(tasks, timeout=10.0) if tasks else (set(), set())
        for task in late:
            task.cancel()
        return Result(
            kills=len(tasks),
            requests=end.stayed,
            failed=end.failed,
            attainment=end.within_target / end.stayed,
            accepted=end.within_target / (end.stayed - end.rejected),
            outcomes=end.outcomes,
            back_s_p50=statistics.median(away) if away else float("nan"),
            back_s_max=max(away, default=float("nan")),
            load_average=os.getloadavg()[0],
        )


def main() -> None:
    parser = arguments(__doc__, 300.0, settle=20.0)
    parser.add_argument("--every", type=float, default=2.0)
    args = parser.parse_args()
    result = uvloop.run(
        measure(
            args.model_repository,
            args.models,
            args.seconds,
            args.every,
            args.seed,
            settle=args.settle,
            event_log=args.event_log,
        )
    )
    show_result(
        result,
        f"{result.kills} workers killed under {result.requests} requests: {result.failed} failed, attainment "
        f"{result.attainment * 100:.2f} %; back after {result.back_s_p50:.2f} s, at most {result.back_s_max:.2f} s; "
        f"load average {result.load_average:.1f}",
    )


if __name__ == "__main__":
    main()
