"""How fast does a server follow when its load, or what other programs leave it, changes at once?

`python -m benchmarks.step [--seconds S] [--models NAME …] [--no-adapt] [--json]`

Example models are served on shares of the processor. A rate doubles, within 70 % of capacity, which the first plan
knows nothing of; then other programs take one core, then two; then they end. Each of these five phases lasts
`--seconds`. Reported for each: attainment in its first 10 seconds and after them, of all requests and of those that
were not rejected on arrival, and when a plan made after its beginning was in force.
`--no-adapt`: the same with the first plan throughout.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop

from benchmarks.adaptive import Segment, Tick, arguments, attainment, foreign_programs, sending, served
from benchmarks.harness import show_result

SETTLED = 10.0  # seconds after the beginning of a phase


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """attainment: in the first `SETTLED` seconds, and from then on; accepted: of requests that were not rejected on
    arrival. plans: rollouts that ended within it. in_force:
    seconds until the first of them; None where there was none. said: the controller's last word of what is short."""

    name: str
    attainment_first: float
    attainment_later: float
    accepted_first: float
    accepted_later: float
    plans: int
    in_force_s: float | None
    short: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    adapt: bool
    phases: tuple[Phase, ...]
    load_average: float


PHASES = (("planned rates", 0), ("a rate doubled", 0), ("one core taken", 1), ("two cores taken", 2), ("cores back", 0))


async def measure(
    repository: Path, names: list[str], seconds: float, seed: int, *, adapt: bool, event_log: Path | None
) -> Result:
    async with served(repository, names, adapt=adapt, event_log=event_log, planned_for=_halved) as given:
        full, half = given.rates, _halved(given.rates)
        statistics = given.server._server._rollouts.statistics
        segments = [Segment(seconds, half), Segment(seconds * (len(PHASES) - 1), full)]
        ticks: list[Tick] = []
        ended: list[float] = []
        shorts: list[tuple[float, str]] = []
        begun: list[float] = []

        async def watch() -> None:
            seen = set[int]()
            while True:
                now = time.monotonic() - begun[0]
                for _, past in statistics.last:
                    if past.revision.number not in seen:
                        seen.add(past.revision.number)
                        ended.append(now)
                status = await given.server.status()
                if status.adaptation is not None:
                    shorts.append((now, status.adaptation.short))
                await asyncio.sleep(0.2)

        async def disturb() -> None:
            with ExitStack() as taken:
                for number, (_, cores) in enumerate(PHASES):
                    await asyncio.sleep(max(0.0, number * seconds - (time.monotonic() - begun[0])))
                    taken.close()
                    taken.enter_context(foreign_programs(cores))
                await asyncio.sleep(seconds)

        tasks: list[asyncio.Task[None]] = []
        async for tick in sending(given.address, segments, seed):
            if not begun:
                begun.append(time.monotonic() - tick.seconds)
                tasks = [asyncio.create_task(watch()), asyncio.create_task(disturb())]
            ticks.append(tick)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Result(
        adapt=adapt,
        phases=tuple(
            Phase(
                name=name,
                attainment_first=attainment(ticks, number * seconds, number * seconds + SETTLED),
                attainment_later=attainment(ticks, number * seconds + SETTLED, (number + 1) * seconds),
                accepted_first=attainment(ticks, number * seconds, number * seconds + SETTLED, accepted=True),
                accepted_later=attainment(ticks, number * seconds + SETTLED, (number + 1) * seconds, accepted=True),
                plans=len(inside := [t for t in ended[1:] if number * seconds <= t < (number + 1) * seconds]),
                in_force_s=min(inside) - number * seconds if inside else None,
                short=next((s for t, s in reversed(shorts) if t < (number + 1) * seconds), ""),
            )
            for number, (name, _) in enumerate(PHASES)
        ),
        load_average=os.getloadavg()[0],
    )


def _halved(rates: dict[str, float]) -> dict[str, float]:
    """Halve the highest rate."""
    highest = max(rates, key=lambda name: rates[name])
    return rates | {highest: rates[highest] / 2}


def main() -> None:
    parser = arguments(__doc__, 30.0)
    parser.add_argument("--no-adapt", action="store_true")
    args = parser.parse_args()
    adapt = not args.no_adapt
    result = uvloop.run(
        measure(args.model_repository, args.models, args.seconds, args.seed, adapt=adapt, event_log=args.event_log)
    )
    show_result(
        result,
        *map(_line, result.phases),
        f"{'adapting' if result.adapt else 'one plan throughout'}; load average {result.load_average:.1f}",
    )


def _line(phase: Phase) -> str:
    after = "no new plan" if phase.in_force_s is None else f"{phase.plans} plans, first {phase.in_force_s:.1f} s after"
    return (
        f"{phase.name:16} {phase.attainment_first * 100:6.2f} % in the first {SETTLED:g} s, "
        f"{phase.attainment_later * 100:6.2f} % later; of accepted requests {phase.accepted_first * 100:6.2f} and "
        f"{phase.accepted_later * 100:6.2f} %; {after}{'; ' + phase.short if phase.short else ''}"
    )


if __name__ == "__main__":
    main()
